"""A smaller model that drafts for another one on the CPU."""
