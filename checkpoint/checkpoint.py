"""A model that was found: what the gateway needs to speak for it, and what the engine needs to load it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tokenizers import Tokenizer

from checkpoint.quantization import Quantization
from models.config import ModelConfig

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); `total` is 0 while unknown."""


class WeightFormat(StrEnum):
    GGUF = "gguf"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True)
class Advice:
    """How to draw where a request does not say, in the API's terms; a `top_k` of 0 is all."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Checkpoint:
    """`name` is the served id; `path` the GGUF file or the folder; `chat_template` is None for a base model;
    `quantization` for a folder whose matrices are not plain numbers; `tool_template` is what conversations with tools
    have in place of the other, if not the same; `advice` is that of those who made the model.
    """

    name: str
    path: Path
    format: WeightFormat
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None
    add_bos: bool
    chat_template: str | None
    build_tokenizer: Callable[[], Tokenizer]
    quantization: Quantization | None = None
    tool_template: str | None = None
    advice: Advice = Advice()

    def tokenizer(self) -> Tokenizer:
        """A new tokenizer. Its post-processor adds BOS where the model wants it (`add_special_tokens=True`)."""
        return self.build_tokenizer()
