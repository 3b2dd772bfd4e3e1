"""The decode service: takes KV caches over and computes the answers."""
