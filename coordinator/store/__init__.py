"""The state that processes share: its interface, and Redis, where it is kept."""
