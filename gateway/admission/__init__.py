"""What may come in at once: concurrent requests, queued ones, memory for bodies."""
