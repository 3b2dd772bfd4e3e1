"""One answer in the making: events in, pieces of text out."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from contracts.errors import TandemError, by_code
from contracts.events import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Prefilled,
    PromptScored,
    PromptToken,
    Token,
    Tokens,
)
from contracts.ids import Epoch
from gateway.generation.time_account import MIGRATE, REPLAY, decode_s
from gateway.generation.token_sequencer import Sequencer
from gateway.prompting.chat_template import Prompting
from gateway.prompting.generation_request import GenerationRequest
from gateway.tokenization.detokenizer import Detokenizer
from gateway.tokenization.stop_strings import StopFinder


@dataclass(frozen=True)
class ShownToken:
    """A token for the `logprobs` of a response; `offset`: the characters that are shown before its text."""

    token: Token
    offset: int


@dataclass(frozen=True)
class OutputDelta:
    """What is new of an answer.

    `finish` on the last piece of a complete one, `failed` on the last of a broken one.

    `marks`: where markers are in the text that were tokens of their own, in order. `stop_reason`: what the client named
    and the answer ended with, the stop string or the stop token. `embedding`: on the last piece, if it was asked for.
    """

    index: int
    text: str = ""
    marks: tuple[slice, ...] = ()
    shown: tuple[ShownToken, ...] = ()
    num_tokens: int = 0
    finish: FinishReason | None = None
    failed: TandemError | None = None
    stop_reason: str | int | None = None
    embedding: bytes = b""


@dataclass(frozen=True)
class AttemptSpan:
    """What one attempt gave of an answer: from its first token to its last, on the gateway's clock.

    `is_migrated`: the answer then moved, and was not replayed.
    """

    servers: Mapping[str, str]
    begin_s: float
    end_s: float
    is_migrated: bool = False

    @property
    def span_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass
class GenerationState:
    """Owned by the event loop.

    After the first piece with `finish` or `failed` there is no other. `servers`: who has it now, prefill and decode.
    `num_drafted`: tokens that were guessed for it by speculative decoding, of which `num_accepted` were right.
    """

    request: GenerationRequest
    prompting: Prompting
    eos_token_ids: tuple[int, ...]
    sequencer: Sequencer = field(default_factory=lambda: Sequencer())
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: list[PromptToken] = field(default_factory=list)
    cached_tokens: int = 0
    ended: bool = False
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    servers: dict[str, str] = field(default_factory=dict)
    num_drafted: int = 0
    num_accepted: int = 0

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self._text = Detokenizer(
            self.prompting.tokenizer, self.request.skip_special_tokens, self.request.markers, self.request.answer_prefix
        )
        self._stops = StopFinder(self.request.stops, self.request.include_stop)
        self._ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)}
        self._shown: list[ShownToken] = []
        self._marks: list[slice] = []
        self._is_header = False
        self._num_chars = 0
        self._attempt_s: float | None = None  # when its first token came
        self._lost: list[AttemptSpan] = []
        self._embedding = b""
        self._told_s: dict[str, float] = {}  # of the first stint, by its workers

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        """The prompt, and what was answered to it."""
        return [*self.request.token_ids, *self.token_ids] if self.token_ids else self.request.token_ids

    @property
    def known_end(self) -> FinishReason | None:
        """Why no token follows those that came, though nobody has said so."""
        is_stop = bool(self.token_ids) and self._ends_with(self.token_ids[-1], self.num_tokens)
        if is_stop:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.sequencer.next_index >= self.request.sampling.max_tokens else None

    @property
    def spans(self) -> list[AttemptSpan]:
        """One of each attempt that a token came from, in order."""
        if self._attempt_s is None or self.last_s is None:
            return self._lost
        return [*self._lost, AttemptSpan(self.servers, self._attempt_s, self.last_s)]

    @property
    def stages_s(self) -> dict[str, float]:
        """The seconds of each stage, under the names of time_account.

        They are what the workers reported, and what none of them could, since the answer ended here or went on
        elsewhere.
        """
        told, stints = dict(self._told_s), self.spans
        if len(stints) > 1:
            told |= _between(stints)
        if len(stints) > 1 or (stints and stints[0].span_s > 0.0 and "decode" not in told):
            told["decode"] = decode_s(told, stints[0].span_s) + sum(stint.span_s for stint in stints[1:])
        return told

    def restart(self, epoch: Epoch) -> None:
        """At another place, behind the tokens that came. Raises ValueError if it has ended."""
        if not self.sequencer.has_begun:
            self.prompt_tokens.clear()
            self._told_s.clear()
        self._lost, self._attempt_s = self.spans, None
        self.sequencer.restart(epoch)

    def migrate(self, epoch: Epoch) -> None:
        """Go on with the tokens of the destination of a migration. Raises ValueError if it has ended."""
        self.restart(epoch)
        self._lost = [*self._lost[:-1], *(replace(span, is_migrated=True) for span in self._lost[-1:])]

    def feed(self, event: Event) -> OutputDelta | None:
        """What the client may see because of this event, if anything."""
        if self.ended:
            return None
        if isinstance(event, Tokens) and event.epoch == self.sequencer.epoch:
            self._hear_of(event.stages_s)
            self.num_drafted += event.num_drafted
            self.num_accepted += event.num_accepted
        parts: list[str] = []
        for ready in self.sequencer.feed(event):
            match ready:
                case Token() if not 0 <= ready.token_id < self.prompting.vocab_size:
                    return self.fail(TandemError(f"a worker sent token id {ready.token_id}, outside of the vocabulary"))
                case Token():
                    parts.append(self._token(ready))
                    self._mark(ready.token_id, parts)
                    if self._stops.hit is not None:
                        return self._end("".join(parts), FinishReason.STOP)
                case PromptScored():
                    self.prompt_tokens += ready.tokens
                case Prefilled() if self._lacks_scores:
                    return self.fail(TandemError("the log-probabilities of the prompt did not come whole"))
                case Prefilled():
                    parts.append(self._echo())
                    self.cached_tokens = ready.cached_tokens
                    self._hear_of({f"prefill_{stage}": value for stage, value in ready.stages_s.items()})
                case Finished():
                    self._hear_of(ready.stages_s)
                    parts.append(self._stops.push(self._text.flush()))
                    parts.append(self._stops.flush())
                    reason = FinishReason.STOP if self._stops.hit is not None else ready.reason
                    return self._end("".join(parts), reason)
                case Failed():
                    return self.fail(by_code(ready.code, ready.message))
        return self._delta("".join(parts))

    def fail(self, error: TandemError) -> OutputDelta | None:
        """End it, unless it has ended."""
        if self.ended:
            return None
        self.ended = True
        return OutputDelta(self.request.index, failed=error)

    @property
    def _lacks_scores(self) -> bool:
        is_scored = self.request.sampling.prompt_logprobs is not None
        return is_scored and len(self.prompt_tokens) != len(self.request.token_ids) - 1

    def _hear_of(self, stages_s: Mapping[str, float]) -> None:
        """Take up what a worker reports of its part of the answer; that of a lost one is known here alone."""
        if not self._lost:
            self._told_s |= stages_s

    def _echo(self) -> str:
        """The prompt, with its tokens if they are to be shown; nothing foretold the first of them."""
        ask = self.request
        if ask.echo_offsets:
            scored = (_as_token(token, ask.sampling.logprobs) for token in self.prompt_tokens)
            self._shown += map(ShownToken, [Token(0, ask.token_ids[0]), *scored], ask.echo_offsets)
        self._num_chars = len(ask.echo)
        return ask.echo

    def _token(self, token: Token) -> str:
        self._clock()
        self._embedding = token.embedding or self._embedding
        if self.request.is_echo_only:
            return ""
        self.token_ids.append(token.token_id)
        if token.logprob is not None:
            self._shown.append(ShownToken(token, self._num_chars))
        if self._is_end(token):
            return ""
        text = self._text.push(token.token_id)
        self._num_chars += len(text)
        marker = self.request.markers.get(token.token_id)
        if marker is not None:
            self._is_header = marker in self.request.headers
        if marker is not None or self._is_header:
            return self._stops.flush() + text  # no text that a stop string could be in
        return self._stops.push(text, may_end=self.num_tokens > self.request.sampling.min_tokens)

    def _mark(self, token_id: int, parts: list[str]) -> None:
        """The marker that the last of `parts` ends with, if the token is one and shows."""
        if (marker := self.request.markers.get(token_id)) is not None and parts[-1].endswith(marker):
            end = sum(map(len, parts))
            self._marks.append(slice(end - len(marker), end))

    def _is_end(self, token: Token) -> bool:
        """A token that stops the answer is not part of its text."""
        return self._ends_with(token.token_id, token.index + 1) and not self.request.include_stop

    def _ends_with(self, token_id: int, num_tokens: int) -> bool:
        """An answer of `num_tokens`, of which this is the last."""
        return token_id in self._ends and num_tokens >= self.request.sampling.min_tokens

    def _clock(self) -> None:
        now = time.monotonic()
        if self.last_s is None:
            self.first_s = now
        else:
            self.gaps_s.append(now - self.last_s)
        if self._attempt_s is None:
            self._attempt_s = now
        self.last_s = now

    def _delta(self, text: str) -> OutputDelta | None:
        if not text:
            return None
        return OutputDelta(self.request.index, text, self._take_marks(), self._take_shown(), self.num_tokens)

    def _end(self, text: str, reason: FinishReason) -> OutputDelta:
        self.ended, self.finish = True, FinishReason.LENGTH if self.request.is_echo_only else reason
        stop_reason = self._stop_reason() if self.finish == FinishReason.STOP else None
        marks, shown = self._take_marks(), self._take_shown()
        return OutputDelta(
            self.request.index,
            text,
            marks,
            shown,
            self.num_tokens,
            self.finish,
            stop_reason=stop_reason,
            embedding=self._embedding,
        )

    def _stop_reason(self) -> str | int | None:
        """Return what the client named and the answer ended with; as with vLLM, None for the end of text."""
        if self._stops.hit is not None or not self.token_ids:
            return self._stops.hit
        last, sampling = self.token_ids[-1], self.request.sampling
        is_end_of_text = last in self.eos_token_ids and not sampling.ignore_eos
        return last if last in sampling.stop_token_ids and not is_end_of_text else None

    def _take_marks(self) -> tuple[slice, ...]:
        marks, self._marks = tuple(self._marks), []
        return marks

    def _take_shown(self) -> tuple[ShownToken, ...]:
        shown, self._shown = tuple(self._shown), []
        return shown


def _between(spans: Sequence[AttemptSpan]) -> dict[str, float]:
    """Return the seconds between two attempts each, by what they were spent on."""
    found: dict[str, float] = {}
    for before, after in pairwise(spans):
        stage = MIGRATE if before.is_migrated else REPLAY
        found[stage] = found.get(stage, 0.0) + after.begin_s - before.end_s
    return found


def _as_token(token: PromptToken, count: int | None) -> Token:
    return Token(0, token.token_id, token.logprob, token.top_logprobs[: count or 0])
