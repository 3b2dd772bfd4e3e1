"""Load on a server that speaks the OpenAI API."""
