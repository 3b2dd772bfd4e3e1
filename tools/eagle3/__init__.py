"""The training of an EAGLE3 head from text that its target writes."""
