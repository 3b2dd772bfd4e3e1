"""The registry of workers, placement, credits and the states of requests, in Redis or in memory."""
