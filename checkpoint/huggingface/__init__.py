"""The reader of Hugging Face folders: config.json, safetensors files, tokenizer, and the hub."""
