"""The words for a GPU whose memory does not suffice."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from contracts.errors import ConfigError

TOO_LARGE = "the model and a full batch do not fit on the GPU"
SMALLER = (
    "free the GPU, use a smaller model or dtype, lower max_num_seqs or max_batched_tokens, or share it among more GPUs "
    "by tensor_parallel"
)


@contextmanager
def full_in_words() -> Iterator[None]:
    """Turn an error for a GPU that is full into a ConfigError.

    Torch's, or CUDA's, Triton's or NCCL's by its words.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error).lower():
            raise
        words, _, _ = str(error).partition(" Including ")
        raise ConfigError(f"{TOO_LARGE} ({words}): {SMALLER}") from error


@contextmanager
def advising(what: str, advice: str) -> Iterator[None]:
    """Put what failed before a ConfigError, and advice behind it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{what} ({error}): {advice}") from error
