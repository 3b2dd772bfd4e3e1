"""The CUDA graphs: those of decode steps, of prompts, and of the last layer."""
