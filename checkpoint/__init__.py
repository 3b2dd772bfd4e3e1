"""A model's files and what they say: resolving a name, configuration, tokenizer, chat template. Imports no torch."""

from checkpoint.checkpoint import Advice, Checkpoint, Progress
from checkpoint.resolve import open_checkpoint
from models.config import ModelConfig

__all__ = ["Advice", "Checkpoint", "ModelConfig", "Progress", "open_checkpoint"]
