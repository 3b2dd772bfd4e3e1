"""The library of a worker, which runs as two processes: an HTTP front and an engine core."""
