"""Token ids to text, one at a time, never splitting a character."""

from collections.abc import Collection

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The pieces, joined, are the decoding of all ids at once.

    `shown_ids`: special tokens that show though special tokens are skipped. Each parts the text: what is before and
    what is behind it are decodings of their own.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._shown_ids = shown_ids if skip_special_tokens else ()
        self._begin()

    def _begin(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._ids: list[int] = []
        self._num_chars = 0
        self._pending = False

    def push(self, token_id: int) -> str:
        """Text that is certain now; empty in the middle of a character."""
        if token_id in self._shown_ids:
            text = self.flush() + self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._begin()
            return text
        self._ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id)
        self._pending = text is None
        if text is None:
            return ""
        self._num_chars += len(text)
        return text

    def flush(self) -> str:
        """The rest: a character that was never completed shows as U+FFFD."""
        if not self._pending:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        self._pending = False
        rest = whole[self._num_chars :]
        self._num_chars = len(whole)
        return rest
