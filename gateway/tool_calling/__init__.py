"""Tool calls: what a client may ask for, how each family writes calls, and how they are read out of an answer."""
