"""Twins of engine, transfer node and front link, which make a ring of workers in one process.

A test can bend the network between them. FakeEngine accounts for pages as the real one does (a request's hold, a
writer's hold) and samples tokens that are a pure function of the prompt, so that a wrong token is seen. FakeNetwork
delivers each link's messages in order, but when the test likes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from contracts.errors import OutOfBlocks, Overloaded
from contracts.events import FinishReason, Token
from contracts.handoff import Abort, AbortAck, ChunkHeader, Commit, Fin, Grant, Offer, Refuse, Wait
from contracts.ids import BlockId, Epoch, Incarnation, RequestId, WorkerId
from contracts.layout import KVLayout
from contracts.request import WorkerRef
from engine.cache.kv_groups import no_groups
from engine.messages import (
    ChunkDone,
    Ended,
    EngineRequest,
    EngineStats,
    Reservation,
    Sampled,
    Started,
    StepObserver,
    StepOutput,
)
from kv_transfer.events import ChunkBad, ChunkLanded, Drained, MessageReceived, PeerDisconnected, TransferEvent

LAYOUT = KVLayout.uniform(model="fake", num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, dtype="float32")


def expected_token(prompt: list[int], index: int) -> int:
    return (sum(prompt) * 31 + index * 7) % 1000


@dataclass
class FakeSequence:
    request: EngineRequest
    prompt: list[int]
    num_blocks: int
    computed: int = 0
    num_out: int = 0
    started: bool = False
    state: str = "waiting"  # waiting, held (handoff done), reserved, decoding, preempted

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.num_out


@dataclass
class FakeEngine:
    """`capacity` blocks of 4 tokens; a step computes 8 tokens of each prompt and one token of each answer.

    An answer that finds no block for its next token takes those of the youngest, which is computed again later.
    """

    capacity: int = 64
    max_waiting: int = 64
    layout: KVLayout = LAYOUT
    groups = no_groups(LAYOUT.block_size)
    bounds_gaps: bool = False
    slack_s: float = 0.0
    span_s: float = 0.0
    sequences: dict[RequestId, FakeSequence] = field(default_factory=dict)
    writers: dict[RequestId, int] = field(default_factory=dict)
    preempted: list[RequestId] = field(default_factory=list)
    transfer_pool: np.ndarray = field(default_factory=lambda: np.empty((1, 0, 0), np.uint8))  # pages in host memory

    def prompt_tokens_beside(self, num_answers: int) -> int:
        return 16

    @property
    def held(self) -> int:
        own = sum(s.num_blocks for key, s in self.sequences.items() if s.state != "waiting" or s.started)
        return own + sum(n for key, n in self.writers.items() if key not in self.sequences)

    def submit(self, request: EngineRequest) -> None:
        if len(self.sequences) >= self.max_waiting:
            raise Overloaded("queue full")
        assert request.request_id not in self.sequences
        prompt = list(request.token_ids)
        self.sequences[request.request_id] = FakeSequence(request, prompt, self.layout.num_blocks(len(prompt)))

    def arrive(self, request: EngineRequest) -> tuple[float, int]:
        return 0.0, 0

    give_up_turn = arrive  # turns count nothing here

    def reserve(self, request: EngineRequest, turn: object = None, num_tokens: int | None = None) -> Reservation:
        prompt = list(request.token_ids)
        if self.held + (num_blocks := self.layout.num_blocks(len(prompt))) > self.capacity:
            raise OutOfBlocks("no pages")
        if any(sequence.state == "preempted" for sequence in self.sequences.values()):
            raise OutOfBlocks("preempted requests come first")
        assert request.request_id not in self.sequences and request.request_id not in self.writers
        self.sequences[request.request_id] = FakeSequence(request, prompt, num_blocks, state="reserved")
        self.writers[request.request_id] = num_blocks
        return Reservation(request.request_id, [BlockId(i) for i in range(num_blocks)], [0] * num_blocks, 0)

    def prepare(self, request_id: RequestId) -> None:
        assert self.sequences[request_id].state == "reserved"

    @property
    def has_reserved(self) -> bool:
        return any(s.state == "reserved" for s in self.sequences.values())

    def adopt(self, request_id: RequestId, first: Token) -> None:
        sequence = self.sequences[request_id]
        assert sequence.state == "reserved" and first.token_id == expected_token(sequence.prompt, 0)
        sequence.state, sequence.num_out = "decoding", 1

    def incoming_writer_ended(self, request_id: RequestId, num_checked: int = 0) -> int:
        del self.writers[request_id]
        return 0

    def release(self, request_id: RequestId) -> None:
        self.sequences.pop(request_id, None)

    def keep_local(self, request_id: RequestId) -> None:
        assert self.sequences[request_id].state == "held"
        self.sequences[request_id].state = "decoding"

    def has_work(self) -> bool:
        return any(s.state in ("waiting", "decoding", "preempted") for s in self.sequences.values())

    def step(self, watcher: StepObserver) -> StepOutput:
        started, chunks, sampled, ended = [], [], [], []
        num_prefill = num_decode = 0
        for key, sequence in list(self.sequences.items()):
            if sequence.state in ("waiting", "decoding") and not sequence.started:
                if sequence.state == "waiting" and self.held + sequence.num_blocks > self.capacity:
                    continue
                sequence.started = True
                started.append(Started(key, 0))
                watcher.started(started[-1])
        self._restore()
        for key, sequence in list(self.sequences.items()):
            if sequence.state == "waiting" and sequence.started:
                num_prefill += self._prefill(key, sequence, chunks, sampled)
            elif sequence.state == "decoding" and self._make_room(sequence):
                sampled.append(self._sample(key, sequence))
                num_decode += 1
            if sampled and sampled[-1].request_id == key and sequence.num_out >= sequence.request.sampling.max_tokens:
                ended.append(Ended(key, sequence.num_out, FinishReason.LENGTH))
                del self.sequences[key]
        return StepOutput(
            started=tuple(started),
            chunks=tuple(chunks),
            sampled=tuple(sampled),
            ended=tuple(ended),
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decode,
            span_s=self.span_s,
        )

    def _prefill(self, key: RequestId, sequence: FakeSequence, chunks: list, sampled: list) -> int:
        first = sequence.computed
        sequence.computed = min(len(sequence.prompt), first + 8)
        blocks = [BlockId(i) for i in range(first // 4, self.layout.num_blocks(sequence.computed))]
        if sequence.request.handoff:
            chunks.append(ChunkDone(key, first, sequence.computed - first, blocks))
        if sequence.computed == len(sequence.prompt):
            sampled.append(self._sample(key, sequence))
            sequence.state = "held" if sequence.request.handoff else "decoding"
        return sequence.computed - first

    def _restore(self) -> None:
        for sequence in self.sequences.values():
            num_blocks = self.layout.num_blocks(sequence.num_tokens)
            if sequence.state == "preempted" and self.held + num_blocks <= self.capacity:
                sequence.state, sequence.num_blocks = "decoding", num_blocks

    def _make_room(self, sequence: FakeSequence) -> bool:
        """False if it was itself the youngest."""
        num_blocks = self.layout.num_blocks(sequence.num_tokens)
        while self.held + num_blocks - sequence.num_blocks > self.capacity and sequence.state == "decoding":
            youngest, victim = [item for item in self.sequences.items() if item[1].state == "decoding"][-1]
            victim.state, victim.num_blocks = "preempted", 0
            self.preempted.append(youngest)
        if sequence.state == "decoding":
            sequence.num_blocks = num_blocks
        return sequence.state == "decoding"

    def _sample(self, key: RequestId, sequence: FakeSequence) -> Sampled:
        token = Token(sequence.num_out, expected_token(sequence.prompt, sequence.num_out))
        sequence.num_out += 1
        return Sampled(key, token)

    def stats(self) -> EngineStats:
        counts: dict = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        free = self.capacity_tokens - self.held * self.layout.block_size
        return EngineStats(**counts | {"free_tokens": free, "num_accepted_by_place": ()})

    @property
    def capacity_tokens(self) -> int:
        return self.capacity * self.layout.block_size

    def check(self) -> None:
        assert self.held >= 0


class FakeNetwork:
    """Links between nodes.

    Each direction is a queue; `deliver()` hands over one message of one chosen link.
    """

    def __init__(self) -> None:
        self.nodes: dict[WorkerId, FakeNode] = {}
        self.queues: dict[tuple[WorkerId, WorkerId], deque[object]] = {}
        self.dead: set[WorkerId] = set()
        self.clock = clock()

    def send(self, source: WorkerId, target: WorkerId, message: object) -> None:
        if target in self.dead:
            self.nodes[source].lose(target)
            return
        self.queues.setdefault((source, target), deque()).append(message)

    def waiting(self) -> list[tuple[WorkerId, WorkerId]]:
        return sorted(key for key, queue in self.queues.items() if queue)

    def deliver(self, link: tuple[WorkerId, WorkerId]) -> None:
        source, target = link
        self.nodes[target].arrive(source, self.queues[link].popleft())

    def spoil(self, source: WorkerId, target: WorkerId) -> None:
        """The next chunk on this link arrives broken."""
        queue = self.queues[source, target]
        index, header = next((i, message) for i, message in enumerate(queue) if isinstance(message, ChunkHeader))
        queue[index] = ChunkBad(source, header, "wrong checksum")

    def bury(self, name: WorkerId, fenced: bool) -> None:
        self.dead.add(name)
        for link in list(self.queues):
            if name in link:
                del self.queues[link]
        for other in self.nodes.values():
            if other.me not in self.dead:
                other.lose(name, fenced)

    def cut(self, one: WorkerId, other: WorkerId) -> None:
        """The link breaks: what is under way is lost, and both ends are told."""
        for source, target in ((one, other), (other, one)):
            self.queues.pop((source, target), None)
            self.nodes[target].lose(source)


class FakeNode:
    """A TransferNode whose bytes are counts. A chunk without a grant is thrown away."""

    def __init__(self, me: WorkerId, network: FakeNetwork) -> None:
        self.me = me
        self._network = network
        self._events: list[TransferEvent] = []
        self._grants: dict[tuple[RequestId, Epoch], Grant] = {}
        self.drains_at_once = True
        self.transfer_rate = 0.0
        self.bad_paths: tuple[Incarnation, ...] = ()
        self.broken = ""
        self.checks_chunks = True
        self.groups: tuple[int, ...] = (0,)
        self._undrained: list[Drained] = []
        self.met: list[WorkerRef] = []
        network.nodes[me] = self

    def poll(self) -> list[TransferEvent]:
        events, self._events = self._events, []
        return events

    def meet(self, peers: Sequence[WorkerRef]) -> None:
        self.met += peers

    def offer(self, peer: WorkerRef, offer: Offer) -> None:
        self._network.send(self.me, peer.worker_id, offer)

    def send_chunk(
        self,
        peer_id: WorkerId,
        request_id,
        epoch,
        index,
        first_token,
        num_tokens,
        src_pages,
        checksums=None,
        group=0,
        loss="",
    ) -> None:
        assert len(src_pages) == LAYOUT.num_blocks(num_tokens)
        header = ChunkHeader(request_id, epoch, index, first_token, num_tokens, LAYOUT.layout_id, num_tokens, 0, group)
        self._network.send(self.me, peer_id, header)

    def chunk_scheduled(
        self, peer_id: WorkerId, request_id, epoch, first_token, num_tokens, src_pages, early_planes, group=0
    ) -> None:
        """A hint."""

    def chunks_launched(self, is_all: bool) -> None:
        """Nothing waits for it."""

    def rested(self) -> None:
        """Nor does a thread care."""

    def finish(self, peer_id: WorkerId, fin: Fin) -> None:
        self._network.send(self.me, peer_id, fin)

    def knows(self, peer_id: WorkerId, request_id, epoch) -> bool:
        """What is lost here is told at once."""
        return False

    def abort(self, peer_id: WorkerId, abort: Abort) -> None:
        self._network.send(self.me, peer_id, abort)
        self._drain(abort)

    def grant(self, peer_id: WorkerId, grant: Grant) -> None:
        self._grants[grant.request_id, grant.epoch] = grant
        self._network.send(self.me, peer_id, grant)

    def groups_with(self, peer_id: WorkerId, sends: bool) -> tuple[int, ...]:
        return self.groups

    def loss_from(self, peer_id: WorkerId) -> str:
        """Nothing is compressed."""
        return ""

    def wait(self, peer_id: WorkerId, message: Wait) -> None:
        self._network.send(self.me, peer_id, message)

    def refuse(self, peer_id: WorkerId, message: Refuse) -> None:
        self._network.send(self.me, peer_id, message)

    def commit(self, peer_id: WorkerId, message: Commit) -> bool:
        self._grants.pop((message.request_id, message.epoch), None)
        self._network.send(self.me, peer_id, message)
        return True

    def arrive(self, source: WorkerId, message: object) -> None:
        if isinstance(message, ChunkHeader):
            if (message.request_id, message.epoch) in self._grants:
                self._events.append(ChunkLanded(source, message, self._network.clock.read()))
            return
        if isinstance(message, ChunkBad):
            self._events.append(message)
            return
        self._events.append(MessageReceived(source, message))  # type: ignore[arg-type]
        if isinstance(message, Abort):
            self._network.send(self.me, source, AbortAck(message.request_id, message.epoch))
            self._drain(message)

    def _drain(self, abort: Abort) -> None:
        self._grants.pop((abort.request_id, abort.epoch), None)
        self._undrained.append(Drained(abort.request_id, abort.epoch))
        if self.drains_at_once:
            self.drain_all()

    def drain_all(self) -> None:
        """Every writer and reader of an aborted attempt has ended by now."""
        self._events += self._undrained
        self._undrained.clear()

    def lose(self, peer_id: WorkerId, fenced: bool = True) -> None:
        self._events.append(PeerDisconnected(peer_id, Incarnation("1"), "cut by the test", fenced))

    def stats(self) -> list:
        return []


class FakeLink:
    """The front's end: what the test puts in, and the frames that came out."""

    def __init__(self) -> None:
        self.inbox: list[object] = []
        self.frames: list = []

    def receive(self, timeout_s: float) -> list:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: object) -> None:
        self.frames.append(message)


def worker_ref(name: str) -> WorkerRef:
    return WorkerRef(WorkerId(name), Incarnation("1"), f"http://{name}", f"{name}:1")


def clock() -> SimpleNamespace:
    """A clock that a test moves: `clock.now += 1`; call `clock.read`."""
    (fake := SimpleNamespace(now=0.0)).read = lambda: fake.now
    return fake
