"""Anthropic's Messages API: its requests, answers and errors."""
