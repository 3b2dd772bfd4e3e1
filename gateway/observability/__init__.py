"""What the gateway shows of itself: its metrics, those under the names of vLLM, and its traces."""
