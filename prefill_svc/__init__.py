"""The prefill service, which computes prompts and hands their KV cache over."""
