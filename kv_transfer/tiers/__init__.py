"""The tiers of the KV cache below the device's pool, one file each."""
