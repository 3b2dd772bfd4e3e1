"""The page at `/`: chat with token timing, a live picture of the system, the time account of a request."""
