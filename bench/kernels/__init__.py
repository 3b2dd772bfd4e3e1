"""The kernel library's operations, each beside its peers and the limit of the card."""
