"""A load of a prompt's blocks that is under way, and who may write to its pages."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from contracts.errors import TransferError
from contracts.kv_loss import EXACT
from contracts.kv_store import BlockKey, KVStore
from engine.cache.load_plan import LoadBudget, PrefixLoad

STOP_TIMEOUT_S = 10.0
"""How long a copy into pages may take to end; a GPU that takes longer has failed."""

MAX_LOOKUPS = 3
"""How often a tier is asked for exact blocks and then for others, where the two alternate in a prompt."""


def ignore() -> None:
    """Nobody waits for a part of a load."""


class LoadPurpose(Enum):
    """The use of a load: for a prompt that is computed here, a peer that reads, or a handoff to here."""

    PROMPT = auto()
    PEER = auto()
    HANDOFF = auto()


@dataclass(eq=False)
class BlockLoad:
    """A load under way.

    `keys` are of the exact blocks, `lossy_keys` of those with the loss that the prompt takes, if it takes any.
    `asked`: the tiers that were asked, in order; the last has it now. `num_done`: the blocks that are in their pages;
    `first_lossy`: of these. `on_progress` is called as they become more, by any thread.
    """

    wanted: PrefixLoad
    keys: list[BlockKey]
    lossy_keys: list[BlockKey]
    budget: LoadBudget
    start_s: float
    purpose: LoadPurpose = LoadPurpose.PROMPT
    on_progress: Callable[[], None] = ignore
    asked: list[str] = field(default_factory=list)
    num_done: int = 0
    first_lossy: int | None = None
    is_over: bool = False
    _num_writing: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def deadline_s(self) -> float:
        """Return when it is given up, unless it has come further by then."""
        return self.start_s + self.budget.limit_s(self.num_done)

    @property
    def next_token(self) -> int:
        return self.wanted.first_token + self.num_done * self.budget.block_size

    @property
    def num_exact(self) -> int:
        """Return how many of the blocks that are done come before the first that has lost something."""
        return self.num_done if self.first_lossy is None else self.first_lossy

    def held_by(self, tier: KVStore) -> list[BlockKey]:
        """Return the keys of the missing blocks that a tier holds, from the first without a gap.

        Exact ones come before those that have lost something.
        """
        held: list[BlockKey] = []
        for turn, keys in enumerate((self.keys, self.lossy_keys) * MAX_LOOKUPS):
            missing = keys[self.num_done + len(held) :]
            num_held = tier.lookup(missing) if missing else 0
            if turn and not num_held:
                break
            held += missing[:num_held]
        return held

    def loss_of(self, index: int, key: BlockKey) -> str:
        """Return what the KV of a block may have lost that was found under a key."""
        return EXACT if key == self.keys[index] else self.wanted.loss

    def begin_writing(self) -> bool:
        """Return whether pages may be written to, until `end_writing`."""
        with self._changed:
            self._num_writing += not self.is_over
            return not self.is_over

    def end_writing(self, first: int, done: Sequence[BlockKey]) -> None:
        """Note that what was begun writes no more, and that blocks from `first` on, of these keys, are right.

        They count if all before them do, and the load is not over.
        """
        with self._changed:
            self._num_writing -= 1
            if not self.is_over and first == self.num_done:
                self.num_done += len(done)
                if self.first_lossy is None and self.lossy_keys:
                    lossy = (first + index for index, key in enumerate(done) if key != self.keys[first + index])
                    self.first_lossy = next(lossy, None)
            self._changed.notify_all()
        self.on_progress()

    def stop(self) -> None:
        """Let nothing be written to its pages once this returns. Raises TransferError if that does not end."""
        with self._changed:
            self.is_over = True
            if not self._changed.wait_for(lambda: self._num_writing == 0, STOP_TIMEOUT_S):
                name = self.wanted.request_id
                raise TransferError(f"copies into the pages of request {name} do not end in {STOP_TIMEOUT_S:.0f} s")
