"""The page at `/`: a chat, a live picture of the system, and the time account of a request."""
