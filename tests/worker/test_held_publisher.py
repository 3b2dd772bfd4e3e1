"""A worker tells the registry what its tiers hold, again before it is forgotten, and all of it where it was lost."""

from collections.abc import Sequence

import pytest

from contracts.errors import RegistryError
from contracts.held_prefixes import HeldChange
from contracts.ids import Incarnation, WorkerId
from testing.memory_store import MemoryStore
from tests.worker.fronts import make_state
from worker.front.held_publisher import MAX_NEWS, MAX_RENEWED, RENEW_S, HeldPublisher
from worker.front.worker_state import WorkerState


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def change(number: int, is_held: bool = True, tier: str = "host") -> HeldChange:
    return HeldChange(tier, key_of(number), is_held)


class HeldStore(MemoryStore):
    """Remembers the changes of each call; `is_away`: it does not answer. `during` is called in each."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: 0.0)
        self.told: list[list[HeldChange]] = []
        self.is_away, self.during = False, lambda: None

    async def publish_held(self, worker_id: WorkerId, incarnation: Incarnation, changes: Sequence[HeldChange]) -> bool:
        self.during()
        if self.is_away:
            raise RegistryError("Redis does not answer", "does not answer")
        self.told.append([*changes])
        return await super().publish_held(worker_id, incarnation, changes)

    async def held(self, count: int) -> set[int]:
        """Return which of the first blocks somebody holds."""
        lines = await self.prefix_holders([], [key_of(number) for number in range(count)])
        return {number for number, line in enumerate(lines) if line}


class Rig:
    def __init__(self) -> None:
        self.now, self.store, self.state = 0.0, HeldStore(), make_state()
        self.publisher = HeldPublisher(self.store, self.state, lambda: self.now)

    async def join(self) -> WorkerState:
        await self.store.join(self.state.info)
        self.state.num_joins += 1
        return self.state

    async def all_told(self) -> None:
        """Publish until there is nothing to tell."""
        before = -1
        while before != len(self.store.told):
            before = len(self.store.told)
            await self.publisher.publish()


async def test_what_changed_is_told_once_a_part_at_a_time() -> None:
    rig = Rig()
    await rig.join()
    rig.publisher.add(change(number) for number in range(MAX_NEWS + 10))
    rig.publisher.add([change(0, False)])
    await rig.all_told()
    assert [len(changes) for changes in rig.store.told] == [MAX_NEWS, 9]
    assert await rig.store.held(MAX_NEWS + 10) == {*range(1, MAX_NEWS + 10)}


async def test_marks_are_told_again_before_they_are_forgotten() -> None:
    """Some a call, the oldest first; not those of a shared store, which may have forgotten them."""
    rig = Rig()
    await rig.join()
    rig.publisher.add([change(number) for number in range(MAX_RENEWED + 8)] + [change(500, tier="store")])
    await rig.all_told()
    rig.now = RENEW_S - 1
    await rig.all_told()
    assert len(rig.store.told) == 1
    rig.now = RENEW_S + 1
    rig.publisher.add([change(3, False)])
    await rig.all_told()
    again = {c.key for changes in rig.store.told[1:] for c in changes if c.is_held}
    assert again == {key_of(number) for number in range(MAX_RENEWED + 8) if number != 3}
    assert max(len(changes) for changes in rig.store.told[1:]) <= MAX_RENEWED + 1


async def test_a_registry_that_lost_this_worker_is_told_all_anew() -> None:
    rig = Rig()
    await rig.join()
    rig.publisher.add([change(1), change(2)])
    await rig.all_told()
    rig.store = rig.publisher._store = HeldStore()  # another server, which knows nothing
    rig.publisher.add([change(3)])
    await rig.publisher.publish()
    assert await rig.store.held(9) == set()  # it does not know the worker yet
    await rig.join()
    await rig.all_told()
    assert await rig.store.held(9) == {1, 2, 3}


async def test_a_registry_that_is_away_is_told_later() -> None:
    rig = Rig()
    await rig.join()
    rig.publisher.add([change(1), change(2)])
    rig.store.is_away = True
    await rig.publisher.publish()
    rig.publisher.add([change(2, False)])
    rig.store.is_away = False
    await rig.all_told()
    assert await rig.store.held(9) == {1}


async def test_what_goes_before_it_was_told_is_not_told() -> None:
    """A tier that is full forgets one mark for each new one; a shared store may have it from another worker."""
    rig = Rig()
    await rig.join()
    rig.publisher.add([change(1), change(2), change(3, tier="store")])
    rig.publisher.add([change(1, False), change(3, False, tier="store"), change(4, False)])
    await rig.all_told()
    assert {(c.key, c.is_held) for c in rig.store.told[0]} == {(key_of(2), True), (key_of(3), False)}
    assert len(rig.store.told) == 1


async def test_what_may_have_been_told_is_taken_back() -> None:
    """The registry may have noted a call whose answer was lost."""
    rig = Rig()
    await rig.join()
    rig.publisher.add([change(1)])
    rig.store.is_away = True
    await rig.publisher.publish()
    rig.store.is_away = False
    rig.publisher.add([change(1, False)])
    await rig.all_told()
    assert rig.store.told == [[change(1, False)]]


async def test_news_are_bounded_and_what_is_held_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.front.held_publisher.MAX_WAITING", 10)
    rig = Rig()
    await rig.join()
    rig.publisher.add(change(number) for number in range(25))
    assert len(rig.publisher._news) == 10
    await rig.all_told()
    assert await rig.store.held(30) == set(range(25))
    rig.publisher.add(change(number, False) for number in range(25))
    assert len(rig.publisher._news) == 10
    await rig.all_told()
    assert await rig.store.held(30) == set(range(15))  # until the registry forgets them
    rig.now = RENEW_S + 1
    before = len(rig.store.told)
    await rig.all_told()
    assert len(rig.store.told) == before, "what is held no more was told again"
    assert not rig.publisher._sent and not rig.publisher._told_s


async def test_what_went_while_it_was_told_and_found_no_room_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.front.held_publisher.MAX_WAITING", 2)
    rig = Rig()
    await rig.join()
    rig.publisher.add([change(1)])
    rig.store.during = lambda: rig.publisher.add([change(1, False), change(2), change(3)])
    await rig.publisher.publish()
    rig.store.during = lambda: None
    await rig.all_told()
    rig.now = RENEW_S + 1
    rig.store.told.clear()
    await rig.all_told()
    assert {c.key for changes in rig.store.told for c in changes} == {key_of(2), key_of(3)}


async def test_what_changes_while_it_is_told_is_told_after() -> None:
    rig = Rig()
    await rig.join()
    rig.publisher.add([change(1), change(2)])
    rig.store.during = lambda: rig.publisher.add([change(1, False)])
    await rig.publisher.publish()
    rig.store.during = lambda: None
    await rig.all_told()
    assert await rig.store.held(9) == {2}
    rig.now = RENEW_S + 1
    await rig.all_told()
    assert await rig.store.held(9) == {2}
