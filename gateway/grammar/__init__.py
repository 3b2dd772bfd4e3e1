"""Structured outputs: JSON schemas and grammars, compiled where a hopeless one can be killed."""
