"""The backend for a CPU: one runner over torch."""
