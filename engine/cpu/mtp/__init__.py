"""A model's own layer for multi-token prediction as its drafter, in torch."""
