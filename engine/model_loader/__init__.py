"""The tensors of a checkpoint as a model takes them: names, formats and shards."""
