"""The links to peers: the two ends of a link, the health of paths and the rate of handoffs."""
