"""Whether a compiled grammar takes a text, told by llguidance itself."""

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer


def is_accepted(wrapped: LLTokenizer, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Return whether the grammar takes the text to its end, and may end there.

    `wrapped`: the same vocabulary as `tokenizer`, for llguidance.
    """
    matcher, ids = LLMatcher(wrapped, grammar), tokenizer.encode(text, add_special_tokens=False).ids
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
