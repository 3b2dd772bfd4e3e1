"""The gateway: OpenAI's API in front of prefill and decode workers. It imports no torch."""
