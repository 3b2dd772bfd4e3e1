"""An engine and a node that only remember what a role told them, for tests of one role alone."""

from dataclasses import dataclass, field
from typing import Any

from contracts.errors import OutOfBlocks
from contracts.events import Token
from contracts.ids import BlockId, Epoch, GatewayId, RequestId, WorkerId
from contracts.layout import KVLayout
from contracts.request import Job, Route
from contracts.sampling import SamplingParams
from engine.cache.kv_groups import KVGroups, no_groups
from engine.fair_turns import Turn
from engine.messages import EngineRequest, Reservation, StepOutput
from testing.worker_twins import LAYOUT, worker_ref
from worker.core.attempt_table import AttemptTable
from worker.core.role_handler import Attempt

P, D = WorkerId("p"), WorkerId("d")
NOTHING = StepOutput((), (), (), (), (), 0, 0)


@dataclass
class Remembering:
    """Every method that is called is noted as (name, arguments)."""

    calls: list[tuple[str, tuple]] = field(default_factory=list)
    under_way: set[tuple] = field(default_factory=set)
    checks_chunks: bool = True

    def knows(self, *attempt: Any) -> bool:
        """(peer, request, epoch) is `under_way`."""
        return attempt in self.under_way

    def groups_with(self, peer_id: Any, sends: bool) -> tuple[int, ...]:
        """Only the model's layers move."""
        return (0,)

    def loss_from(self, peer_id: Any) -> str:
        """Nothing is compressed."""
        return ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **named: self.calls.append((name, (*arguments, *named.values())))

    def told(self, name: str) -> list[tuple]:
        return [arguments for found, arguments in self.calls if found == name]


@dataclass
class ScriptedEngine(Remembering):
    """`free` blocks to reserve; the first `skip_tokens` of every prompt are cached.

    If it `loads`, lower tiers fill pages of each reservation until `loaded` says how far.
    """

    layout: KVLayout = LAYOUT
    groups: KVGroups = field(default_factory=lambda: no_groups(LAYOUT.block_size))
    free: int = 100
    skip_tokens: int = 0
    loads: bool = False
    loaded: list[tuple[RequestId, int]] = field(default_factory=list)
    num_arrived: int = 0
    num_saved: int = 0

    def arrive(self, request: EngineRequest) -> Turn:
        self.num_arrived += 1
        return 0.0, self.num_arrived

    def give_up_turn(self, request: EngineRequest) -> None:
        """Forget that it arrived: nothing here counts."""

    def incoming_writer_ended(self, request_id: RequestId, num_checked: int = 0) -> int:
        """Keep all that was checked."""
        self.calls.append(("incoming_writer_ended", (request_id,)))
        self.num_saved += num_checked
        return num_checked

    def load_reserved(self, request_id: RequestId, tokens_per_s: float) -> bool:
        self.calls.append(("load_reserved", (request_id, tokens_per_s)))
        return self.loads

    def finished_loads(self) -> list[tuple[RequestId, int]]:
        loaded, self.loaded = self.loaded, []
        return loaded

    def reserve(self, request: EngineRequest, turn: Turn | None = None, num_tokens: int | None = None) -> Reservation:
        num_blocks = self.layout.num_blocks(len(request.token_ids))
        if num_blocks > self.free:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self.free} free")
        self.free -= num_blocks
        self.calls.append(("reserve", (request.request_id, turn)))
        blocks = [BlockId(number) for number in range(num_blocks)]
        return Reservation(request.request_id, blocks, [0] * num_blocks, self.skip_tokens)


def make_job(name: str, num_tokens: int, epoch: int = 1, priority: int = 0) -> Job:
    route = Route(RequestId(name), Epoch(epoch), worker_ref(P), worker_ref(D))
    sampling = SamplingParams(max_tokens=5, seed=0)
    return Job(route, GatewayId("g"), list(range(num_tokens)), sampling, 60.0, priority)


def opened(ledger: AttemptTable, role: Any, name: str, num_tokens: int, now: float = 0.0, priority: int = 0) -> Attempt:
    """A job that the ledger took and the role began."""
    live = ledger.open(make_job(name, num_tokens, priority=priority), now)
    assert live is not None
    live.role = role
    role.start(live, now)
    return live


def first_token() -> Token:
    return Token(0, 42)
