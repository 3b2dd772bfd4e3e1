"""The way of the bytes: sender and receiver, grants, pulls and staging."""
