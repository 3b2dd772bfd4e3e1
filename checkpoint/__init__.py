"""A model's files: the resolution of its name, its configuration, tokenizer and chat template.

This package imports no torch.
"""

from checkpoint.checkpoint import Advice, Checkpoint, Progress
from checkpoint.resolve import open_checkpoint
from models.config import ModelConfig

__all__ = ["Advice", "Checkpoint", "ModelConfig", "Progress", "open_checkpoint"]
