"""A model's tokens as llguidance sees them, and how it compiles a grammar over them: the same wherever that is done."""

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from checkpoint.checkpoint import Checkpoint

# What it says of an error goes to users and into logs: its state would show both the tokens of an answer. It is said
# once, and not by the library on the standard error, too (`log_level`).
_LIMITS = LLParserLimits(verbose_errors=False)
_ADVICE = {
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "oneOf is not supported where a value may fit two of its schemas; use anyOf"
    )
}
"""In place of an option of the library's, which no client can set."""


class Vocabulary(msgspec.Struct, frozen=True):
    """`tokenizer`: Hugging Face's JSON. `num_tokens`: at least as many as the model or the tokenizer has."""

    tokenizer: str
    num_tokens: int
    eos_token_ids: list[int]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Vocabulary":
        tokenizer = checkpoint.tokenizer()
        num_tokens = max(checkpoint.config.vocab_size, tokenizer.get_vocab_size())  # either may have more
        return cls(tokenizer.to_str(), num_tokens, list(checkpoint.eos_token_ids))

    def tokens(self) -> LLTokenizer:
        """A fraction of a second for a large vocabulary."""
        return LLTokenizer(self.tokenizer, n_vocab=self.num_tokens, eos_token=self.eos_token_ids)


def compiled(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """Its copies know the first mask, which takes as long as compiling a small grammar. It may have an error."""
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def error_of(matcher: LLMatcher) -> str:
    """In a line. Empty if there is none."""
    return in_a_line(matcher.get_error()) if matcher.is_error() else ""


def in_a_line(error: str) -> str:
    """The first line and the one that names the cause; between them the library draws where it is."""
    first, *others = (line.strip() for line in error.strip().splitlines() or [""])
    causes = [line for line in others if line.startswith("error:")]
    said = " ".join([first, *causes])[:500]
    return _ADVICE.get(said, said)
