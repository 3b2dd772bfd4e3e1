"""From a request to the prompt of a model: chat template, tokens, sampling options, grammar of the answer."""
