"""The front: the HTTP process of a worker."""
