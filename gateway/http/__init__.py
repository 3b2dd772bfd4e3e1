"""The HTTP side: application, server, API keys."""
