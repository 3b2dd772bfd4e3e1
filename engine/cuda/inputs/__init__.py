"""What a step on the GPU reads: batch inputs, the state of decodes, the columns of sampling."""
