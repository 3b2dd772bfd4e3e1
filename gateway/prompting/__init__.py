"""The way from a request to a prompt: chat template, tokens, sampling options, grammar of the answer."""
