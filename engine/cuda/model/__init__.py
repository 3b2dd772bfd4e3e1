"""The model on the GPU: its layers, weights and number formats."""
