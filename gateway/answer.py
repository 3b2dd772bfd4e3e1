"""One answer in the making: events in, pieces of text out."""

import time
from dataclasses import dataclass, field

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
    """What is new of an answer. `finish` on the last piece of a complete one, `failed` on the last of a broken one."""

    index: int
    text: str = ""
    shown: tuple[Shown, ...] = ()
    num_tokens: int = 0
    finish: FinishReason | None = None
    failed: Failed | None = None


@dataclass
class Answer:
    """Owned by the event loop. After the first piece with `finish` or `failed` there is no other."""

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

    def __post_init__(self) -> None:
        sampling = self.ask.sampling
        self._text = Detokenizer(
            self.prompting.tokenizer, self.ask.skip_special_tokens, self.ask.shown_ids, self.ask.before
        )
        self._stops = StopFinder(self.ask.stops, self.ask.include_stop)
        self._ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)}
        self._shown: list[Shown] = []
        self._num_chars = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def restart(self, epoch: Epoch) -> None:
        """At another place; raises ValueError if a token was accepted already."""
        self.sequencer.restart(epoch)
        self.prompt_tokens.clear()

    def feed(self, event: Event) -> Piece | None:
        """What the client may see because of this event, if anything."""
        if self.ended:
            return None
        parts: list[str] = []
        for ready in self.sequencer.feed(event):
            match ready:
                case Token() if not 0 <= ready.token_id < self.prompting.vocab_size:
                    return self.fail("internal", f"a worker sent token id {ready.token_id}, outside of the vocabulary")
                case Token():
                    parts.append(self._token(ready))
                    if self._stops.hit is not None:
                        return self._end("".join(parts), FinishReason.STOP)
                case PromptScored():
                    self.prompt_tokens += ready.tokens
                case Prefilled() if self._lacks_scores:
                    return self.fail("internal", "the log-probabilities of the prompt did not come whole")
                case Prefilled():
                    parts.append(self._echo())
                    self.cached_tokens = ready.cached_tokens
                    self.stages_s |= {f"prefill_{stage}": value for stage, value in ready.stages_s.items()}
                case Finished():
                    self.stages_s |= ready.stages_s
                    parts.append(self._stops.push(self._text.flush()))
                    parts.append(self._stops.flush())
                    reason = FinishReason.STOP if self._stops.hit is not None else ready.reason
                    return self._end("".join(parts), reason)
                case Failed():
                    self.ended = True
                    return Piece(self.ask.index, failed=ready)
        return self._piece("".join(parts))

    def fail(self, code: str, message: str) -> Piece | None:
        """End it from this side."""
        if self.ended:
            return None
        self.ended = True
        return Piece(self.ask.index, failed=Failed("", self.sequencer.epoch, code, message))  # type: ignore[arg-type]

    @property
    def _lacks_scores(self) -> bool:
        is_scored = self.ask.sampling.prompt_logprobs is not None
        return is_scored and len(self.prompt_tokens) != len(self.ask.token_ids) - 1

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
        if self.num_tokens <= self.ask.sampling.min_tokens:
            return text
        return self._stops.push(text)

    def _is_end(self, token: Token) -> bool:
        """A token that stops the answer is not part of its text."""
        at_end = token.token_id in self._ends and token.index + 1 >= self.ask.sampling.min_tokens
        return at_end and not self.ask.include_stop

    def _clock(self) -> None:
        now = time.monotonic()
        if self.last_s is None:
            self.first_s = now
        else:
            self.gaps_s.append(now - self.last_s)
        self.last_s = now

    def _piece(self, text: str) -> Piece | None:
        if not text:
            return None
        return Piece(self.ask.index, text, self._take_shown(), self.num_tokens)

    def _end(self, text: str, reason: FinishReason) -> Piece:
        self.ended, self.finish = True, FinishReason.LENGTH if self.ask.is_echo_only else reason
        return Piece(self.ask.index, text, self._take_shown(), self.num_tokens, self.finish)

    def _take_shown(self) -> tuple[Shown, ...]:
        shown, self._shown = tuple(self._shown), []
        return shown


def _as_token(token: PromptToken, count: int | None) -> Token:
    return Token(0, token.token_id, token.logprob, token.top_logprobs[: count or 0])
