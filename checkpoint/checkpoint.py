"""A model that was found, with what the gateway needs to serve it and the engine to load it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tokenizers import Tokenizer

from checkpoint.quantization import Quantization
from models.config import ModelConfig

Progress = Callable[[str, int, int], None]
"""The function called with (stage, done, total); `total` is 0 while unknown."""


class WeightFormat(StrEnum):
    GGUF = "gguf"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True)
class Advice:
    """The sampling parameters for requests that do not state them, in the API's terms.

    A `top_k` of 0 is all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class EmbeddingForm:
    """How an embedding is made of the row of a text's last token.

    `is_normalized`: it has length 1. `fault`: why none is made; empty for none.
    """

    fault: str = ""
    is_normalized: bool = True


@dataclass(frozen=True)
class ScoreForm:
    """How a score is made of what a classifier gives for a pair of texts.

    `is_sigmoid`: it is between 0 and 1. `fault`: why none is made; empty for none.
    """

    fault: str = ""
    is_sigmoid: bool = True


@dataclass(frozen=True)
class Checkpoint:
    """A model's files and what they state.

    `name` is the served id; `path` the GGUF file or the folder; `chat_template` is None for a base model;
    `quantization` is set for a folder whose matrices are not plain numbers; `tool_template` replaces the chat template
    in conversations with tools, if it is another; `advice` comes from those who made the model; `score` is set for a
    classifier, which writes no text.
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
    embedding: EmbeddingForm = EmbeddingForm()
    score: ScoreForm | None = None

    def tokenizer(self) -> Tokenizer:
        """Return a new tokenizer.

        Its post-processor adds BOS where the model wants it (`add_special_tokens=True`).
        """
        return self.build_tokenizer()
