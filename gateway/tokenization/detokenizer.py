"""Token ids to text, one at a time, never splitting a character."""

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from gateway.tokenization.token_bytes import REPLACEMENT


class Detokenizer:
    """The pieces, joined, are the decoding of all ids at once.

    But SentencePiece makes no character of bytes in a row if one of them is part of none: what was shown of them stays.

    `before`: the token that the text goes on from. Without it the text is one of its own, and SentencePiece begins that
    without a space.
    `shown_ids`: special tokens that show even if special tokens are skipped. Each parts the text: what is before and
    what is behind it are decodings of their own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        shown_ids: Collection[int] = (),
        before: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._shown_ids = shown_ids
        self._begin(() if self._decoded(before).endswith(REPLACEMENT) else before)

    def _begin(self, before: Sequence[int] = ()) -> None:
        self._stream = DecodeStream(list(before), self._skip)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that is certain now; empty in the middle of a character."""
        if token_id in self._shown_ids:
            text = self.flush() + self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._begin()
            return text
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # it has no type of its own
            if "prefix" not in str(error):  # else what was shown is no beginning of the text any more
                raise
            text = self._decoded(self._pending)
            self._begin(self._pending)
        if text is None:
            return ""
        self._pending = []
        return text

    def flush(self) -> str:
        """The rest: a character that was never completed shows as U+FFFD."""
        rest, self._pending = self._decoded(self._pending), []
        return rest

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
