"""An answer in progress, as the dispatch knows it: where it runs, and whether it may run elsewhere."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from contracts.errors import Corrupt, Overloaded, PeerLost, TandemError, TransferError, Unavailable, by_code
from contracts.events import Event, Failed, Tokens
from contracts.ids import GatewayId, Incarnation, RequestId, WorkerId
from contracts.request import Job, Route, WorkerRef
from coordinator.request_states import RequestState
from gateway.generation.generation_state import GenerationState, OutputDelta

MAX_ATTEMPTS = 2
"""Before anything was shown."""
MAX_REPLAYS = 2
"""Of an answer that was shown in part: a request that kills its workers does not meet them all."""
HANDOFF_FAULTS = frozenset(error.code for error in (TransferError, PeerLost, Corrupt, Unavailable))
"""Of two workers that can't do it together; each may do it with another, or both later."""
HANDOFF_RETRY_S = 10.0
"""How long a request whose handoff failed may come back to the same two while both live: a link that was reset, or
whose network was away, is made anew within a second of its return."""

OnDelta = Callable[[OutputDelta], None]


@dataclass
class InflightRequest:
    """An answer in progress: where it runs, and who reads it. `end` once it has ended.

    `decoder`: who told a token after the first of this attempt. Once that came, too, nobody else is needed any more.
    `is_orphaned`: prefill was lost after its token; decode has it all, or the answer goes on elsewhere.
    `num_replays`: attempts that were lost, or left, behind which it goes on. `give_up_s`: until when it looks for the
    next place; later once it got ahead there. `unreached`: whom handoffs of it did not reach, though they may live;
    `retry_until_s`: until when they may be asked again.
    """

    request_id: RequestId
    answer: GenerationState
    on_delta: OnDelta
    deadline_s: float
    route: Route
    num_attempts: int = 1
    num_replays: int = 0
    give_up_s: float = 0.0
    refusers: list[WorkerId] = field(default_factory=list)
    unreached: list[WorkerRef] = field(default_factory=list)
    retry_until_s: float = 0.0
    is_moving: bool = False
    decoder: WorkerId | None = None
    is_orphaned: bool = False
    end: RequestState | None = None

    @property
    def workers(self) -> list[WorkerRef]:
        route = self.route
        return [route.prefill] if route.is_local else [route.prefill, route.decode]

    @property
    def is_begun(self) -> bool:
        return self.answer.sequencer.has_begun

    @property
    def may_move(self) -> bool:
        if self.is_begun:
            return self.num_replays <= MAX_REPLAYS and time.monotonic() < self.give_up_s
        return self.num_attempts < MAX_ATTEMPTS

    def may_retry(self, is_alive: Callable[[WorkerRef], bool]) -> bool:
        """Return whether nothing was shown yet, and only links failed, whose workers live and may be asked again.

        A request that kills who takes its pages does not come back to their successors.
        """
        is_early = not self.is_begun and time.monotonic() < self.retry_until_s
        return is_early and all(is_alive(ref) for ref in self.unreached)

    def note_handoff_fault(self, faults: Mapping[WorkerId, TandemError]) -> None:
        """Remember whom the handoff did not reach; the first one begins the time for trying again."""
        codes = {error.code for error in faults.values()}
        if codes and codes <= HANDOFF_FAULTS:
            self.unreached += [ref for ref in self.workers if ref.worker_id in faults]
            self.retry_until_s = self.retry_until_s or min(self.deadline_s, time.monotonic() + HANDOFF_RETRY_S)

    def count_replay(self, is_lost: bool, give_up_s: float) -> bool:
        """Whether leaving this attempt is one: a refusal, of which nothing came, is part of the search for a place."""
        is_ahead = self.answer.sequencer.has_first or not self.give_up_s
        is_replay = self.is_begun and (is_ahead or is_lost)
        self.num_replays += is_replay
        if is_replay and is_ahead:
            self.give_up_s = give_up_s
        return is_replay

    def faults(self, teller: WorkerId, event: Event) -> dict[WorkerId, TandemError]:
        """Without whom it is to go on elsewhere because of this event, and why; empty if it goes on here, or ends."""
        match event:
            case Tokens() if self._miscounts(teller, event):
                words = "a worker counts the tokens of the answer otherwise: it is of an older release"
                return {teller: by_code(TandemError.code, words)}
            case Failed(code=Overloaded.code) if self.is_begun:
                return {teller: by_code(event.code, event.message)}
            case Failed() if event.code in HANDOFF_FAULTS:
                # The teller knows of a dead peer before the registry does. One that has none ends the answer.
                others = [ref.worker_id for ref in self.workers if ref.worker_id != teller]
                return dict.fromkeys(others, by_code(event.code, event.message))
        return {}

    def _miscounts(self, teller: WorkerId, event: Tokens) -> bool:
        """One that does not know of `num_answered` takes the answer so far for prompt. Of two, decode tells none of the
        attempt's first tokens.
        """
        first_index = self.answer.sequencer.first_index
        is_second = not self.route.is_local and teller == self.route.decode.worker_id
        return first_index > 0 and any(token.index < first_index + is_second for token in event.tokens)

    def needs(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        """Not one whose part is done, nor one without which it goes on already."""
        here = any(ref.worker_id == worker_id and ref.incarnation == incarnation for ref in self.workers)
        is_done = self.decoder not in (None, worker_id) and self.answer.sequencer.has_first
        is_given_up = self.is_orphaned and worker_id != self.route.decode.worker_id
        return here and not self.is_moving and not is_done and not is_given_up

    def may_go_on_without(self, worker_id: WorkerId) -> bool:
        """Prefill has said its token and no other: its KV may all be at decode, which tells if it is not."""
        has_first = self.answer.sequencer.has_first
        return worker_id != self.route.decode.worker_id and has_first and self.decoder is None

    def job(self, gateway_id: GatewayId) -> Job:
        """The prompt, and what was answered to it: another worker goes on behind that, under the same draws."""
        ask, sampling = self.answer.request, self.answer.request.sampling
        if self.is_begun:  # and so the prompt's log-probabilities are here
            sampling = replace(sampling, prompt_logprobs=None)
        left_s = max(self.deadline_s - time.monotonic(), 0.001)
        head = (self.route, gateway_id, self.answer.all_token_ids, sampling, left_s)
        return Job(*head, ask.priority, ask.cache_salt, self.answer.num_tokens)
