"""The library of a worker process: an HTTP front and an engine core as two processes."""
