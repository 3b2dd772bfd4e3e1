"""The role of a worker that serves a request whole: prefill and decode on the same pages, nothing moved."""

from contracts.request import Job
from engine.engine import Engine
from engine.messages import ChunkComing, StepOutput
from kv_transfer.events import TransferEvent
from worker.core.attempt_table import Ledger, Live


class LocalRole:
    """Part of every core, so that any worker can serve a request alone; a mixed worker does little else."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        self._engine = engine
        self._ledger = ledger
        self._num_requests = 0

    def takes(self, job: Job) -> bool:
        return job.route.is_local

    def start(self, live: Live, now: float) -> None:
        self._engine.submit(live.request())
        self._num_requests += 1
        self._ledger.move(live, "QUEUED")

    def drop(self, live: Live, reason: str, now: float) -> None:
        self._engine.release(live.key)

    def on_started(self, live: Live, now: float) -> None:
        """Nobody to tell: the pages are already where they are needed."""

    def on_coming(self, live: Live, chunk: ChunkComing) -> None:
        """Nothing is handed over."""

    def on_step(self, output: StepOutput, now: float) -> None:
        for sampled in output.sampled:
            live = self._ledger.of(sampled.request_id)
            if live is not None and live.role is self and live.is_first(sampled.token):
                self._ledger.move(live, "LOCAL_DECODE")

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        """Nothing is moved for a local request."""

    def on_tick(self, now: float) -> None:
        """No waits of its own: the request's deadline is the core's."""

    def counters(self) -> dict[str, float]:
        return {"local_requests": self._num_requests}

    def hands_over_alone(self) -> bool:
        return False

    def is_idle(self) -> bool:
        return True
