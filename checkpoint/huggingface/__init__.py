"""A folder as Hugging Face lays it out: config.json, safetensors files and the hub that has them."""
