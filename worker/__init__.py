"""A worker: an HTTP front and an engine core as two processes."""
