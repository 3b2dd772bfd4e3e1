"""Two engine cores in one process, as worker.core.main makes them, with real engines and real transports: all of a
pair but its fronts. Not a test.
"""

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from checkpoint import open_checkpoint
from contracts.events import Failed, Finished, Tokens
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.layout import KVGroup
from contracts.node import WorkerRole
from contracts.request import Job, Route, WorkerRef
from contracts.sampling import SamplingParams
from engine.engine import Engine
from engine.loader import load_device_engine, load_engine
from engine.settings import EngineSettings
from kv_transfer.node import TransferNode
from mixed_svc.core import make_roles
from tests.kv_transfer.kv_pair import PATIENT
from tests.path.beside import put_beside
from worker.core.attempt_table import AttemptTable
from worker.core.engine_core import EngineCore
from worker.core.main import engine_settings, transfer_settings
from worker.messages import CoreFrame, ToCore, ToFront, Work
from worker.settings import WorkerSettings

GATEWAY = GatewayId("g")
DEADLINE_S = 60.0
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_batched_tokens": 32, "kv_cache_mib": 64, "num_threads": 1}
_TURN_S = 0.001


class Front:
    """Stands where front_link.FrontLink does; a core that has nothing to do waits a millisecond, then it is the
    other one's turn.
    """

    def __init__(self) -> None:
        self.inbox: list[ToCore] = []
        self.heard: list[ToFront] = []
        self._bell = threading.Event()
        self.wake = self._bell.set

    def receive(self, timeout_s: float) -> list[ToCore]:
        self._bell.wait(min(timeout_s, _TURN_S))
        self._bell.clear()
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: ToFront) -> None:
        self.heard.append(message)


class Worker:
    """`device_dtype`: its engine is the GPU's adapter on the reference kernels. `beside`: groups of layers that it has
    with the model's. `changes`: of its settings.
    """

    def __init__(
        self,
        role: WorkerRole,
        model: str,
        transfer: str,
        secret: str,
        device_dtype: str = "",
        beside: Sequence[KVGroup] = (),
        **changes: Any,
    ) -> None:
        given = {"role": role, "model": model, "transfer": transfer, "secret": secret, **changes}
        settings = WorkerSettings(**{**SETTINGS, **given})
        me, incarnation = WorkerId(settings.worker_id or role.value), Incarnation(secrets.token_hex(4))
        self.front, ledger = Front(), AttemptTable()
        wanted = engine_settings(settings)
        self.engine = _device_engine(wanted, device_dtype) if device_dtype else load_engine(wanted)
        if beside:
            put_beside(self.engine, beside, seed=len(me))
        pool = self.engine.transfer_pool
        patient = replace(transfer_settings(settings), **PATIENT)
        self.node = TransferNode(patient, me, incarnation, self.engine.layout, pool, self.front.wake)
        self.node.start()
        self.roles = make_roles(settings, me, self.engine, self.node, ledger)
        self.ledger = ledger
        self.core = EngineCore(me, self.engine, self.node, self.roles, ledger, self.front)  # type: ignore[arg-type]
        self.ref = WorkerRef(me, incarnation, "", self.node.address)

    def counters(self) -> dict[str, float]:
        return {name: value for role in self.roles for name, value in role.counters().items()}

    def is_idle(self) -> bool:
        return not self.engine.has_work() and all(role.is_idle() for role in self.roles)


def _device_engine(settings: EngineSettings, dtype: str) -> Engine:
    """Its prompts are cut into whole blocks, of 64 tokens."""
    wanted, checkpoint = replace(settings, dtype=dtype, max_batched_tokens=128), open_checkpoint(settings.model)
    return load_device_engine(wanted, checkpoint, lambda *_: None, device=torch.device("cpu"))


class Cores:
    """A pair. `device_dtypes`, `besides`: see Worker. `changes`: of the settings of both; `of_prefill`: of its own."""

    def __init__(
        self,
        model: str,
        transfer: str,
        device_dtypes: tuple[str, str] = ("", ""),
        besides: tuple[Sequence[KVGroup], Sequence[KVGroup]] = ((), ()),
        of_prefill: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        secret, own = secrets.token_hex(8), {**changes, **(of_prefill or {})}
        self.prefill = Worker(WorkerRole.PREFILL, model, transfer, secret, device_dtypes[0], besides[0], **own)
        self.decode = Worker(WorkerRole.DECODE, model, transfer, secret, device_dtypes[1], besides[1], **changes)
        self._num_asked = 0

    def __enter__(self) -> "Cores":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.prefill.node.close()
        self.decode.node.close()

    def answers(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[list[int]]:
        """Token ids by prompt, all asked at once. Raises AssertionError for one that fails or does not come."""
        jobs = [self._job(prompt, sampling) for prompt in prompts]
        for worker in (self.prefill, self.decode):
            worker.front.inbox.append(Work(list(jobs), time.monotonic()))
        tokens: dict[RequestId, dict[int, int]] = {job.request_id: {} for job in jobs}
        num_open, deadline = len(jobs), time.monotonic() + DEADLINE_S
        while num_open or not (self.prefill.is_idle() and self.decode.is_idle()):
            assert time.monotonic() < deadline, f"{num_open} answers did not come to an end"
            for event in self._turn():
                match event:
                    case Tokens():
                        tokens[event.request_id] |= {token.index: token.token_id for token in event.tokens}
                    case Failed():
                        raise AssertionError(event.message)
                    case Finished():
                        num_open -= 1
        return [[token for _, token in sorted(tokens[job.request_id].items())] for job in jobs]

    def _job(self, prompt: list[int], sampling: SamplingParams) -> Job:
        self._num_asked += 1
        name = RequestId(f"r{self._num_asked}")
        return Job(Route(name, Epoch(1), self.prefill.ref, self.decode.ref), GATEWAY, prompt, sampling, DEADLINE_S)

    def _turn(self) -> list:
        events = []
        for worker in (self.prefill, self.decode):
            worker.core.turn()
            frames = [message for message in worker.front.heard if isinstance(message, CoreFrame)]
            events += [event for frame in frames for event in frame.events.get(GATEWAY, [])]
            worker.front.heard.clear()
        return events
