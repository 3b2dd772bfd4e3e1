"""A peer as a node sees it: the two ends of a link, the health of its paths and its rate."""
