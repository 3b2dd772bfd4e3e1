"""Who serves what: registry, placement, credits and the states of requests, in Redis or in memory."""
