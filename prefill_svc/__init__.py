"""The prefill service: computes prompts and hands their KV cache over."""
