"""Tokens to text: detokenizer, bytes of tokens, stop strings."""
