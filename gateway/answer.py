"""One answer in the making: events in, pieces of text out."""

import time
from dataclasses import dataclass, field

from contracts.errors import TandemError, by_code
from contracts.events import Event, Failed, Finished, FinishReason, Prefilled, PromptScored, PromptToken, Token
from contracts.ids import Epoch
from gateway.asking import Ask
from gateway.detokenizer import Detokenizer
from gateway.prompting import Prompting
from gateway.sequencer import Sequencer
from gateway.stops import StopFinder


@dataclass(frozen=True)
class Shown:
    """A token for the `logprobs` of a response; `offset` is where its text begins, in characters of what is shown."""

    token: Token
    offset: int


@dataclass(frozen=True)
class Piece:
    """What is new of an answer. `finish` on the last piece of a complete one, `failed` on the last of a broken one.

    `marks`: where markers are in the text that were tokens of their own, in order.
    """

    index: int
    text: str = ""
    marks: tuple[slice, ...] = ()
    shown: tuple[Shown, ...] = ()
    num_tokens: int = 0
    finish: FinishReason | None = None
    failed: TandemError | None = None


@dataclass
class Answer:
    """Owned by the event loop. After the first piece with `finish` or `failed` there is no other. `servers`: who has it
    now, prefill and decode.
    """

    ask: Ask
    prompting: Prompting
    eos_token_ids: tuple[int, ...]
    sequencer: Sequencer = field(default_factory=lambda: Sequencer())
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: list[PromptToken] = field(default_factory=list)
    cached_tokens: int = 0
    ended: bool = False
    stages_s: dict[str, float] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    servers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sampling = self.ask.sampling
        self._text = Detokenizer(
            self.prompting.tokenizer, self.ask.skip_special_tokens, self.ask.markers, self.ask.before
        )
        self._stops = StopFinder(self.ask.stops, self.ask.include_stop)
        self._ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)}
        self._shown: list[Shown] = []
        self._marks: list[slice] = []
        self._is_header = False
        self._num_chars = 0
        self._attempt_s: float | None = None  # when its first token came
        self._decoded_s = 0.0  # by attempts that were lost

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        """The prompt, and what was answered to it."""
        return [*self.ask.token_ids, *self.token_ids] if self.token_ids else self.ask.token_ids

    @property
    def known_end(self) -> FinishReason | None:
        """Why no token follows those that came, though nobody has said so."""
        is_stop = bool(self.token_ids) and self._ends_with(self.token_ids[-1], self.num_tokens)
        if is_stop:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.sequencer.next_index >= self.ask.sampling.max_tokens else None

    def restart(self, epoch: Epoch) -> None:
        """At another place, behind the tokens that came. Raises ValueError if it has ended."""
        if not self.sequencer.has_begun:
            self.prompt_tokens.clear()
        self._decoded_s += self._attempt_span_s
        self._attempt_s = None
        self.sequencer.restart(epoch)

    def feed(self, event: Event) -> Piece | None:
        """What the client may see because of this event, if anything."""
        if self.ended:
            return None
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
                    self.stages_s |= {f"prefill_{stage}": value for stage, value in ready.stages_s.items()}
                case Finished():
                    self._account(ready)
                    parts.append(self._stops.push(self._text.flush()))
                    parts.append(self._stops.flush())
                    reason = FinishReason.STOP if self._stops.hit is not None else ready.reason
                    return self._end("".join(parts), reason)
                case Failed():
                    return self.fail(by_code(ready.code, ready.message))
        return self._piece("".join(parts))

    def fail(self, error: TandemError) -> Piece | None:
        """End it, unless it has ended."""
        if self.ended:
            return None
        self.ended = True
        return Piece(self.ask.index, failed=error)

    @property
    def _attempt_span_s(self) -> float:
        return 0.0 if self._attempt_s is None or self.last_s is None else self.last_s - self._attempt_s

    @property
    def _lacks_scores(self) -> bool:
        is_scored = self.ask.sampling.prompt_logprobs is not None
        return is_scored and len(self.prompt_tokens) != len(self.ask.token_ids) - 1

    def _account(self, finished: Finished) -> None:
        """Of an answer that several workers decoded each knows its part; that of a lost one is known here alone."""
        if "replay" in self.stages_s:
            self.stages_s["decode"] = self._decoded_s + self._attempt_span_s
        else:
            self.stages_s |= finished.stages_s

    def _echo(self) -> str:
        """The prompt, with its tokens if they are to be shown; nothing foretold the first of them."""
        ask = self.ask
        if ask.echo_offsets:
            scored = (_as_token(token, ask.sampling.logprobs) for token in self.prompt_tokens)
            self._shown += map(Shown, [Token(0, ask.token_ids[0]), *scored], ask.echo_offsets)
        self._num_chars = len(ask.echo)
        return ask.echo

    def _token(self, token: Token) -> str:
        self._clock()
        if self.ask.is_echo_only:
            return ""
        self.token_ids.append(token.token_id)
        if token.logprob is not None:
            self._shown.append(Shown(token, self._num_chars))
        if self._is_end(token):
            return ""
        text = self._text.push(token.token_id)
        self._num_chars += len(text)
        marker = self.ask.markers.get(token.token_id)
        if marker is not None:
            self._is_header = marker in self.ask.headers
        if marker is not None or self._is_header:
            return self._stops.flush() + text  # no text that a stop string could be in
        return self._stops.push(text, may_end=self.num_tokens > self.ask.sampling.min_tokens)

    def _mark(self, token_id: int, parts: list[str]) -> None:
        """The marker that the last of `parts` ends with, if the token is one and shows."""
        if (marker := self.ask.markers.get(token_id)) is not None and parts[-1].endswith(marker):
            end = sum(map(len, parts))
            self._marks.append(slice(end - len(marker), end))

    def _is_end(self, token: Token) -> bool:
        """A token that stops the answer is not part of its text."""
        return self._ends_with(token.token_id, token.index + 1) and not self.ask.include_stop

    def _ends_with(self, token_id: int, num_tokens: int) -> bool:
        """An answer of `num_tokens`, of which this is the last."""
        return token_id in self._ends and num_tokens >= self.ask.sampling.min_tokens

    def _clock(self) -> None:
        now = time.monotonic()
        if self.last_s is None:
            self.first_s = now
        else:
            self.gaps_s.append(now - self.last_s)
        if self._attempt_s is None:
            self._attempt_s = now
            if self.last_s is not None:
                self.stages_s["replay"] = self.stages_s.get("replay", 0.0) + now - self.last_s
        self.last_s = now

    def _piece(self, text: str) -> Piece | None:
        if not text:
            return None
        return Piece(self.ask.index, text, self._take_marks(), self._take_shown(), self.num_tokens)

    def _end(self, text: str, reason: FinishReason) -> Piece:
        self.ended, self.finish = True, FinishReason.LENGTH if self.ask.is_echo_only else reason
        return Piece(self.ask.index, text, self._take_marks(), self._take_shown(), self.num_tokens, self.finish)

    def _take_marks(self) -> tuple[slice, ...]:
        marks, self._marks = tuple(self._marks), []
        return marks

    def _take_shown(self) -> tuple[Shown, ...]:
        shown, self._shown = tuple(self._shown), []
        return shown


def _as_token(token: PromptToken, count: int | None) -> Token:
    return Token(0, token.token_id, token.logprob, token.top_logprobs[: count or 0])
