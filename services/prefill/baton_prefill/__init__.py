"""The prefill worker: computes prompts and hands their KV cache over."""
