"""The reader of GGUF files: the header, the tensors and the tokenizer in it."""
