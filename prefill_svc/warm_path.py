"""The rehearsal of a prompt in the engine core's loop, as a part of kv_transfer.warm_path's.

The loop, the role and the table of attempts are the real ones; engine, transfer and front are stand-ins.
"""

import time
from collections.abc import Callable
from typing import cast

from contracts import codec
from contracts.events import Token
from contracts.handoff import Commit, Fin, Grant, Offer
from contracts.ids import BlockId, Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.layout import KVLayout
from contracts.request import Job, Route, WorkerRef
from contracts.sampling import SamplingParams
from engine.engine import Engine
from engine.messages import ChunkDone, ChunkScheduled, EngineStats, Sampled, Started, StepObserver, StepOutput
from kv_transfer.events import MessageReceived, TransferEvent
from kv_transfer.node import TransferNode
from prefill_svc.role import PrefillRole
from worker.core.attempt_table import AttemptTable
from worker.core.engine_core import EngineCore
from worker.core.front_link import FrontLink
from worker.core.role import attempt_key
from worker.messages import ToCore, ToFront, Work

_REQUEST_ID, _EPOCH = RequestId("rehearsal"), Epoch(1)
_ME, _PEER = (WorkerRef(WorkerId(name), Incarnation(name), "", "") for name in ("rehearsal", "rehearsal-peer"))
_PAGES = [BlockId(0)]


class EngineCoreRehearsal:
    """The loop of prefill's engine core, in which a prompt of one block is computed and handed over."""

    def __init__(self, layout: KVLayout) -> None:
        self._link, self._node = _Link(), _Node()
        self._engine = _Engine(layout)
        engine, node = cast(Engine, self._engine), cast(TransferNode, self._node)
        attempts = AttemptTable()
        role = PrefillRole(_ME.worker_id, engine, node, attempts)
        self._core = EngineCore(_ME.worker_id, engine, node, [role], attempts, cast(FrontLink, self._link))
        prompt, sampling = [0] * layout.block_size, SamplingParams(max_tokens=2, seed=0)
        self._job = Job(
            Route(request_id=_REQUEST_ID, epoch=_EPOCH, prefill=_ME, decode=_PEER),
            GatewayId("rehearsal"),
            prompt,
            sampling,
            timeout_s=60.0,
        )

    def run(self) -> int:
        """Run one prompt; return how many were handed over so far, one more each time."""
        self._link.messages.append(Work([self._job], time.monotonic()))
        self._core.turn()
        self._core.turn()
        return self._engine.num_released


def keeper(node: TransferNode, layout: KVLayout) -> Callable[[], None]:
    """Return the function that EngineCore calls when idle.

    It runs both rehearsals whenever the transfer's is due.
    """
    rehearsal = EngineCoreRehearsal(layout)

    def keep_warm() -> None:
        if node.keep_warm():
            rehearsal.run()

    return keep_warm


class _Link:
    """A stand-in for worker.core.front_link.FrontLink."""

    def __init__(self) -> None:
        self.messages: list[ToCore] = []

    def receive(self, timeout_s: float) -> list[ToCore]:
        messages, self.messages = self.messages, []
        return messages

    def send(self, message: ToFront) -> None:
        codec.frame(message)


class _Engine:
    """A stand-in that computes whatever was submitted in its next step."""

    has_reserved, slack_s = False, 0.0
    capacity_tokens = 0

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.num_released = 0
        self._is_waiting = False

    def prompt_tokens_beside(self, num_answers: int) -> int:
        return 0

    def submit(self, request: object) -> None:
        self._is_waiting = True

    def has_work(self) -> bool:
        return self._is_waiting

    def step(self, watcher: StepObserver) -> StepOutput:
        self._is_waiting = False
        key, num_tokens = attempt_key(_REQUEST_ID, _EPOCH), self.layout.block_size
        watcher.started(Started(key, 0))
        watcher.chunk_scheduled(ChunkScheduled(key, 0, num_tokens, _PAGES, 0))
        watcher.chunks_launched(is_all=True)
        chunk = ChunkDone(key, 0, num_tokens, _PAGES)
        return StepOutput((), (chunk,), (Sampled(key, Token(0, 0)),), num_prefill_tokens=num_tokens)

    def release(self, key: RequestId) -> None:
        self.num_released += 1

    def stats(self) -> EngineStats:
        return EngineStats(**dict.fromkeys(EngineStats.__dataclass_fields__, 0))

    def check(self) -> None:
        """Do nothing: there are no blocks."""


class _Node:
    """A stand-in for the transfer whose decode grants at once, and commits."""

    transfer_rate, bad_paths, broken = 0.0, (), ""

    def __init__(self) -> None:
        self._events: list[TransferEvent] = []

    def poll(self) -> list[TransferEvent]:
        events, self._events = self._events, []
        return events

    def offer(self, peer: WorkerRef, offer: Offer) -> None:
        grant = Grant(request_id=_REQUEST_ID, epoch=_EPOCH, pages=[_PAGES], skip_tokens=0)
        self._events.append(MessageReceived(peer.worker_id, grant))

    def chunk_scheduled(self, *chunk: object) -> None:
        """Do nothing: kv_transfer.warm_path rehearses the rest."""

    send_chunk = chunk_scheduled

    def chunks_launched(self, is_all: bool) -> None:
        """Do nothing: no kernel is launched."""

    def rested(self) -> None:
        """Do nothing: there is no link."""

    def finish(self, peer_id: WorkerId, fin: Fin) -> None:
        commit = Commit(request_id=_REQUEST_ID, epoch=_EPOCH, num_chunks=fin.num_chunks, nbytes=0)
        self._events.append(MessageReceived(peer_id, commit))

    def stats(self) -> list[object]:
        return []
