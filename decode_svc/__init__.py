"""The decode service, which receives KV caches and computes the answers."""
