"""OpenAI's API: requests, answers, and the fields of vLLM beside them."""
