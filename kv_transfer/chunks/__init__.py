"""The format of a chunk of KV: its segments, its checksum, its plan and the pools that it fits."""
