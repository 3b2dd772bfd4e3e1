"""The KV cache in GPU memory and its copies: transfer pools, checksums, parts of heads, staging."""
