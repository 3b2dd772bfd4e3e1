"""Speculative decoding: tokens that are guessed, and verified several in a step."""
