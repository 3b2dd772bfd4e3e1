"""Requests on the workers: placement, the pool of workers, and what becomes of each request in flight."""
