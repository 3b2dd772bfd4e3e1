"""The blocks of the KV cache: their pool, their prefix index and how many fit."""
