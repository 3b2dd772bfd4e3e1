"""How often an answer may be tried, and until when: each fault that it meets uses some of that up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from contracts.errors import Corrupt, PeerLost, TandemError, TransferError, Unavailable
from contracts.ids import WorkerId
from contracts.request import WorkerRef

MAX_ATTEMPTS = 2
"""Before anything was shown."""
MAX_REPLAYS = 2
"""Attempts after an answer was shown in part: a request that kills its workers does not meet all."""
HANDOFF_FAULTS = frozenset(error.code for error in (TransferError, PeerLost, Corrupt, Unavailable))
"""Faults of two workers that can't do it together; each may do it with another, or both later."""
HANDOFF_RETRY_S = 10.0
"""How long a request whose handoff failed may come back to the same two while both live: a link that was reset, or
whose network was away, is made anew within a second of its return."""
REPLAY_WAIT_S = 30.0
"""How long an answer that was shown in part looks for another place: a worker that died may be there again."""


@dataclass
class AttemptBudget:
    """The tries of one answer. `now` is in seconds of the monotonic clock.

    `num_replays`: attempts that were lost, or left, behind which it goes on. `give_up_s`: until when it looks for the
    next place; later once it got ahead there. `refusers`: not to be asked next. `unreached`: workers that handoffs of
    it did not reach, though they may live; `retry_until_s`: until when they may be asked again. `lives`: whether a
    worker is the one that it was, and not its successor.
    """

    lives: Callable[[WorkerRef], bool]
    num_attempts: int = 1
    num_replays: int = 0
    give_up_s: float = 0.0
    refusers: list[WorkerId] = field(default_factory=list)
    unreached: list[WorkerRef] = field(default_factory=list)
    retry_until_s: float = 0.0

    def may_move(self, is_begun: bool, now: float) -> bool:
        """Return whether an answer may be tried elsewhere. `is_begun`: some of it may have been shown."""
        if is_begun:
            return self.num_replays <= MAX_REPLAYS and now < self.give_up_s
        return self.num_attempts < MAX_ATTEMPTS

    def may_retry(self, is_begun: bool, now: float) -> bool:
        """Return whether nothing was shown yet and only links failed, whose workers live.

        A request that kills who takes its pages does not come back to their successors.
        """
        is_early = not is_begun and now < self.retry_until_s
        return is_early and all(map(self.lives, self.unreached))

    def note_handoff_fault(
        self, faults: Mapping[WorkerId, TandemError], workers: Sequence[WorkerRef], now: float, deadline_s: float
    ) -> None:
        """Remember whom of these workers the handoff did not reach.

        The first one begins the time for trying again.
        """
        codes = {error.code for error in faults.values()}
        if codes and codes <= HANDOFF_FAULTS:
            self.unreached += [ref for ref in workers if ref.worker_id in faults]
            self.retry_until_s = self.retry_until_s or min(deadline_s, now + HANDOFF_RETRY_S)

    def count_replay(self, is_begun: bool, has_first: bool, is_lost: bool, now: float) -> bool:
        """Return whether leaving this attempt, which told a token if it `has_first`, is a replay.

        A refusal, of which nothing came, is part of the search.
        """
        is_ahead = has_first or not self.give_up_s
        is_replay = is_begun and (is_ahead or is_lost)
        self.num_replays += is_replay
        if is_replay and is_ahead:
            self.give_up_s = now + REPLAY_WAIT_S
        return is_replay
