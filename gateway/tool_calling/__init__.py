"""Tool calls: what a client may ask for, how families write calls, how they are read out of an answer."""
