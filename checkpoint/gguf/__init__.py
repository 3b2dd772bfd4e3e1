"""A GGUF file: its header, its tensors and the tokenizer in it."""
