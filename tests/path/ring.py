"""A prefill and a decode worker of twins on one network, and all that gateway and registry have heard. Not a test."""

# pyright: reportArgumentType=false
# The twins of engine, node and link have their methods, not their classes.

from dataclasses import dataclass, field

from contracts.events import Failed, Finished, Tokens
from contracts.ids import Epoch, GatewayId, RequestId, WorkerId
from contracts.request import Cancel, Job, Route
from contracts.sampling import SamplingParams
from coordinator.request_states import RequestState, TransitionCheck, check_transition
from decode_svc.decode_role import DecodeRole
from prefill_svc.prefill_role import PrefillRole
from testing.worker_twins import FakeEngine, FakeLink, FakeNetwork, FakeNode, expected_token, worker_ref
from worker.core.attempt_table import AttemptTable
from worker.core.engine_core import EngineCore
from worker.core.local_role import LocalRole
from worker.core.role_handler import RoleHandler
from worker.messages import CoreFrame, Work

GATEWAY = GatewayId("g")
P, D = WorkerId("p"), WorkerId("d")


@dataclass
class Side:
    core: EngineCore
    engine: FakeEngine
    node: FakeNode
    link: FakeLink
    roles: list[RoleHandler]
    ledger: AttemptTable


@dataclass
class Ring:
    """`events`: (worker, event) as the gateway hears them. `moves`: (worker, request, epoch, state)."""

    capacity: int = 64
    network: FakeNetwork = field(default_factory=FakeNetwork)
    events: list = field(default_factory=list)
    moves: list[tuple[WorkerId, RequestId, Epoch, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = self.network.clock
        self.sides = {name: self._side(name) for name in (P, D)}

    def _side(self, name: WorkerId) -> Side:
        engine, node, ledger, link = FakeEngine(self.capacity), FakeNode(name, self.network), AttemptTable(), FakeLink()
        role = PrefillRole(name, engine, node, ledger, 5.0) if name == P else DecodeRole(name, engine, node, ledger)
        roles = [LocalRole(engine, ledger), role]
        return Side(
            EngineCore(name, engine, node, roles, ledger, link, self.clock.read), engine, node, link, roles, ledger
        )

    def job(self, name: str, prompt: list[int], max_tokens: int, epoch: int = 1, timeout_s: float = 60.0) -> Job:
        route = Route(RequestId(name), Epoch(epoch), worker_ref(P), worker_ref(D))
        return Job(route, GATEWAY, prompt, SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0), timeout_s)

    def post(self, side: WorkerId, *messages: Job | Cancel) -> None:
        self.sides[side].link.inbox.append(Work(list(messages), self.clock.now))

    def turn(self, name: WorkerId) -> None:
        side = self.sides[name]
        self.clock.now += 0.03
        side.core.turn()
        for message in side.link.frames:
            if isinstance(message, CoreFrame):
                self.events += [(name, event) for event in message.events.get(GATEWAY, [])]
                self.moves += [(name, *move) for move in message.state_reports]
        side.link.frames.clear()

    def settle(self, turns: int = 60) -> None:
        for _ in range(turns):
            self.carry(P, D)
            self.carry(D, P)
            for name in self.sides:
                self.turn(name)

    def carry(self, source: WorkerId, target: WorkerId, most: int = 10**6) -> None:
        """Hand over up to `most` messages of one direction."""
        while self.network.queues.get((source, target)) and most:
            self.network.deliver((source, target))
            most -= 1

    def both(self, job: Job) -> None:
        self.post(P, job)
        self.post(D, job)

    def kill(self, name: WorkerId, fenced: bool = True) -> None:
        """The process is gone; whoever had a connection to it is told."""
        del self.sides[name]
        self.network.bury(name, fenced)

    def ends(self, name: str) -> list:
        return [event for _, event in self.events if event.request_id == name and isinstance(event, Finished | Failed)]

    def tokens(self, name: str) -> list[tuple[int, int]]:
        heard = [event for _, event in self.events if event.request_id == name and isinstance(event, Tokens)]
        return [(token.index, token.token_id) for event in heard for token in event.tokens]

    def verdicts(self) -> set[TransitionCheck]:
        """Return the verdicts on all that the registry was told, in that order, each attempt for itself."""
        at: dict[tuple[RequestId, Epoch], RequestState] = {}
        found: set[TransitionCheck] = set()
        for _, request_id, epoch, name in self.moves:
            before = at.get((request_id, epoch), RequestState.PLACED)
            found.add(verdict := check_transition(before, RequestState(name)))
            if verdict is TransitionCheck.LEGAL:
                at[request_id, epoch] = RequestState(name)
        return found

    def assert_clean(self) -> None:
        for side in self.sides.values():
            assert len(side.ledger) == 0
            assert all(role.is_idle() for role in side.roles)
            assert side.engine.held == 0 and not side.engine.sequences and not side.engine.writers


def answer(prompt: list[int], num_tokens: int) -> list[tuple[int, int]]:
    return [(index, expected_token(prompt, index)) for index in range(num_tokens)]
