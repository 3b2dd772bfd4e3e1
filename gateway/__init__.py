"""HTTP in, server-sent events out: OpenAI's API in front of prefill and decode workers. Imports no torch."""
