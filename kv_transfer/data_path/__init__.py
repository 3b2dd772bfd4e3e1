"""The data path: sender and receiver, grants, pulls and staging."""
