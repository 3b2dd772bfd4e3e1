"""The one place that decides which tokens of an answer count, and in which order."""

from dataclasses import dataclass, field

from contracts.events import Event, Failed, Finished, Moved, Prefilled, PromptScored, Token, Tokens
from contracts.ids import Epoch

MAX_GAP = 256
"""The most tokens that may wait for an earlier one. An attempt's first token is prefill's to tell, over a stream
that may be late by seconds before it is given up; decode tells as many as it can meanwhile.
"""

Ready = PromptScored | Prefilled | Token | Finished | Failed


@dataclass
class Sequencer:
    """Accepts `(epoch == current and index == next)`; keeps what came early; ends exactly once. Pure.

    `feed` returns what became acceptable, in order: PromptScored, Prefilled, Token, then one Finished or Failed. The
    current attempt begins at `first_index`; of the Prefilled of all attempts the first one counts.
    """

    epoch: Epoch = 1  # type: ignore[assignment]
    next_index: int = 0
    first_index: int = 0
    next_prompt_index: int = 1
    num_stale: int = 0
    num_duplicates: int = 0
    ended: bool = False
    _early: dict[int, Token] = field(default_factory=dict)
    _finish: Finished | None = None
    _prefilled: Epoch = 0  # type: ignore[assignment]

    def feed(self, event: Event) -> list[Ready]:
        if event.epoch != self.epoch:
            self.num_stale += 1
            return []
        if self.ended:
            self.num_duplicates += 1
            return []
        match event:
            case Tokens():
                return self._tokens(event)
            case PromptScored():
                return self._scored(event)
            case Prefilled():
                return self._once_prefilled(event)
            case Finished():
                return self._finished(event)
            case Failed():
                self.ended = True
                return [event]
            case Moved():  # says where the answer goes on, and nothing of it
                return []

    @property
    def has_begun(self) -> bool:
        """Something of the answer may have been shown."""
        return self._prefilled > 0 or self.next_index > 0

    @property
    def has_first(self) -> bool:
        """The first token of this attempt came."""
        return self.next_index > self.first_index

    def restart(self, epoch: Epoch) -> None:
        """A new attempt, which goes on behind what was accepted.

        Raises ValueError if it has ended, or is no newer.
        """
        if self.ended or epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} after {self.epoch}, ended: {self.ended}")
        if not self.has_begun:
            self.next_prompt_index = 1
        self.epoch, self._finish, self.first_index = epoch, None, self.next_index
        self._early.clear()

    def _tokens(self, event: Tokens) -> list[Ready]:
        ready: list[Ready] = []
        for token in event.tokens:
            if token.index < self.next_index or token.index in self._early or self._is_past_end(token.index):
                self.num_duplicates += 1
            elif token.index == self.next_index:
                ready.append(token)
                self.next_index += 1
                self._drain(ready)
            elif self.has_first and token.index - self.next_index > MAX_GAP:
                self.ended = True
                reason = f"token {token.index} came while token {self.next_index} is missing"
                return [*ready, Failed(event.request_id, event.epoch, "internal", reason)]
            else:
                self._early[token.index] = token
        return ready + self._end()

    def _drain(self, ready: list[Ready]) -> None:
        while self._early and (token := self._early.pop(self.next_index, None)) is not None:
            ready.append(token)
            self.next_index += 1

    def _is_past_end(self, index: int) -> bool:
        return self._finish is not None and index >= self._finish.num_tokens

    def _scored(self, event: PromptScored) -> list[Ready]:
        if self.has_begun or event.first_index < self.next_prompt_index:
            self.num_duplicates += 1
            return []
        if event.first_index > self.next_prompt_index:
            self.ended = True
            reason = f"log-probability {event.first_index} of the prompt came, {self.next_prompt_index} is missing"
            return [Failed(event.request_id, event.epoch, "internal", reason)]
        self.next_prompt_index += len(event.tokens)
        return [event]

    def _once_prefilled(self, event: Prefilled) -> list[Ready]:
        before, self._prefilled = self._prefilled, event.epoch
        self.num_duplicates += before == event.epoch
        return [] if before else [event]

    def _finished(self, event: Finished) -> list[Ready]:
        if self._finish is not None:
            self.num_duplicates += 1
            return []
        if event.num_tokens < self.next_index:
            self.ended = True
            reason = f"the answer is said to have {event.num_tokens} tokens, {self.next_index} came"
            return [Failed(event.request_id, event.epoch, "internal", reason)]
        self._finish = event
        return self._end()

    def _end(self) -> list[Ready]:
        if self._finish is None or self.next_index < self._finish.num_tokens:
            return []
        self.ended = True
        return [self._finish]
