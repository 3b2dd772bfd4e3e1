"""Text to token ids, and what a request says of single tokens."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Annotated, Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from checkpoint import Checkpoint
from contracts.errors import RequestError
from gateway.tokenization.detokenizer import Detokenizer
from gateway.tokenization.token_bytes import REPLACEMENT, raw_bytes

T = TypeVar("T")

LONG_CHARS = 20_000  # above, tokenizing takes longer than handing it to a thread
HUGE_CHARS = 1_000_000
"""Above, one at a time: tokenizing takes more than 100 bytes of memory for each of its characters."""


class PromptTokenizer:
    """The tokenizer of one model, and what a request may say of its tokens."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.tokenizer: Tokenizer = checkpoint.tokenizer()
        self.vocab_size, self.advice = checkpoint.config.vocab_size, checkpoint.advice
        self._token_texts: dict[int, str] = {}
        self._huge = ThreadPoolExecutor(1, "huge-prompt")
        self._longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)
        added = self.tokenizer.get_added_tokens_decoder().items()
        self._special_ids = {token.content: token_id for token_id, token in added if token.special}
        self._grammar_ids = {
            token.content: token_id for token_id, token in added if token.special or _is_bracketed(token.content)
        }

    @property
    def special_tokens(self) -> Collection[str]:
        return self._special_ids.keys()

    def close(self) -> None:
        self._huge.shutdown(wait=False, cancel_futures=True)

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens than which no fewer can spell `text`: none is longer than the longest."""
        return -(-len(text) // self._longest_token)

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return await self._aside(texts, lambda: [self._encode(text, add_special_tokens) for text in texts])

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Return each pair of texts as one prompt, joined as the tokenizer joins pairs."""
        lengths = [first + second for first, second in pairs]
        return await self._aside(lengths, lambda: [each.ids for each in self.tokenizer.encode_batch(list(pairs))])

    async def decode(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of token ids, special tokens included."""
        return await self._aside(prompts, lambda: self.tokenizer.decode_batch(prompts, skip_special_tokens=False))

    async def offsets(self, prompts: Sequence[Sequence[int]], texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return where the text of each token begins in its prompt's text.

        That is the tokens' own text but for what begins every prompt.
        """
        return await self._aside(texts, lambda: list(map(self._offsets, prompts, texts)))

    def special_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Return the ids of those texts that are special tokens."""
        return {text: self._special_ids[text] for text in texts if text in self._special_ids}

    @property
    def marker_ids(self) -> Mapping[str, int]:
        """Return the ids of all texts that `grammar_ids` knows."""
        return self._grammar_ids

    def grammar_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Return the ids of those texts that no text in a grammar matches, since they are tokens.

        They are special tokens, and for llguidance also those in angle brackets that a tokenizer adds as plain ones,
        such as Qwen 3's tags.
        """
        return {text: self._grammar_ids[text] for text in texts if text in self._grammar_ids}

    def token_text(self, token_id: int) -> str:
        """Return the text of a token amid others: SentencePiece hides the space of one that begins a text."""
        text = self._token_texts.get(token_id)
        if text is None:
            alone, twice = (self.tokenizer.decode([token_id] * times, skip_special_tokens=False) for times in (1, 2))
            text = self._token_texts[token_id] = alone if REPLACEMENT in alone else twice[len(alone) :]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return what the token adds to the text; its own bytes only where a character spans tokens."""
        text = self.token_text(token_id)
        raw = self.tokenizer.id_to_token(token_id)
        return raw_bytes(raw) if REPLACEMENT in text and raw is not None else text.encode()

    async def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return each word as the tokens that begin a text with it, and those that follow a space."""
        both = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
        return tuple(dict.fromkeys(tuple(ids) for ids in await self.encode(both, add_special_tokens=False) if ids))

    def require_known(self, token_ids: Sequence[int], param: str) -> None:
        """Raise RequestError on an id outside of the vocabulary."""
        if token_ids and not 0 <= max(token_ids) < self.vocab_size:
            raise RequestError(f"{param}: token id {max(token_ids)} is not below {self.vocab_size}", param)

    def known_ids(self, value: Any) -> list[int] | None:
        """Return token ids of the vocabulary; None for all else, and for what needs a closer look, as 1.0.

        One pass does it: to look at the types and bounds of 8192 ids one after the other held all other answers up by
        more than a millisecond.
        """
        try:
            return msgspec.convert(value, list[Annotated[int, msgspec.Meta(ge=0, lt=self.vocab_size)]])
        except msgspec.ValidationError:
            return None

    async def _aside(self, prompts: Sequence[Sized], work: Callable[[], T]) -> T:
        """Do the work, on a thread if the prompts are long together."""
        length = sum(map(len, prompts))
        if length < LONG_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._huge if length > HUGE_CHARS else None, work)

    def _offsets(self, token_ids: Sequence[int], text: str) -> tuple[int, ...]:
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=False)
        lengths = [len(detokenizer.push(token_id)) for token_id in token_ids]
        whole = sum(lengths) + len(detokenizer.flush())
        starts = accumulate(lengths, initial=min(len(text) - whole, 0))
        return tuple(max(start, 0) for start, _ in zip(starts, lengths, strict=False))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # As a batch: only so the tokenizer lets go of the interpreter, and others' streams go on; as with decode.
        return self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids


def _is_bracketed(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")
