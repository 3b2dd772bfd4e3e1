"""The compilation of grammars by llguidance over a model's tokens.

It is the same in the gateway, which checks a grammar, and in the engine, which applies it.
"""

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from checkpoint.checkpoint import Checkpoint

# Its error texts go to users and into logs, and its state would show them the tokens of an answer. `log_level` keeps
# the library from writing the same to standard error.
_LIMITS = LLParserLimits(verbose_errors=False)
_ADVICE = {
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "oneOf is not supported where a value may fit two of its schemas; use anyOf"
    )
}
"""Texts that replace the library's advice to set an option, which no client can do."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens of a model, in a form that can be sent to another process.

    `tokenizer` is Hugging Face's JSON. `num_tokens` is at least as many as the model or the tokenizer has.
    """

    tokenizer: str
    num_tokens: int
    eos_token_ids: list[int]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Vocabulary":
        tokenizer = checkpoint.tokenizer()
        num_tokens = max(checkpoint.config.vocab_size, tokenizer.get_vocab_size())  # either may have more
        return cls(tokenizer.to_str(), num_tokens, list(checkpoint.eos_token_ids))

    def tokens(self) -> LLTokenizer:
        """Return the tokens for llguidance, which takes a fraction of a second for a large vocabulary."""
        return LLTokenizer(self.tokenizer, n_vocab=self.num_tokens, eos_token=self.eos_token_ids)


def compiled(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """Return the compiled grammar, which may have an error.

    Its copies have the first mask, which takes as long to compute as a small grammar to compile.
    """
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def error_of(matcher: LLMatcher) -> str:
    """Return the error in one line, or an empty text."""
    return in_a_line(matcher.get_error()) if matcher.is_error() else ""


def in_a_line(error: str) -> str:
    """Return the first line of an error and the one with the cause, without the drawing between them."""
    first, *others = (line.strip() for line in error.strip().splitlines() or [""])
    causes = [line for line in others if line.startswith("error:")]
    said = " ".join([first, *causes])[:500]
    return _ADVICE.get(said, said)
