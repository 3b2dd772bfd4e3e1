"""The reuse of KV between workers.

Prompts whose route names a source pull their prefix from there, and other workers pull from here.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from contracts.errors import TandemError
from contracts.hashing import chain_hashes
from contracts.ids import WorkerId
from contracts.request import Job
from engine.engine import Engine
from engine.messages import ChunkScheduled, StepOutput
from kv_transfer.events import TransferEvent
from kv_transfer.node import TransferNode
from worker.core.attempt_table import AttemptTable
from worker.core.kv_tiers import KVTiers
from worker.core.prefix_puller import DEVICE_PACE, HOST_PACE, PrefixPuller
from worker.core.prefix_server import PrefixServer
from worker.core.role_handler import Attempt, RoleHandler

MEET_PERIOD_S = 0.1


class PeerPrefixes:
    """The role before those that compute prompts, `roles`: it hands an attempt on when its pull has ended.

    `tokens_per_s`: see PrefixPuller. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        me: WorkerId,
        engine: Engine,
        node: TransferNode,
        attempts: AttemptTable,
        roles: Sequence[RoleHandler],
        tokens_per_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._me, self._engine, self._node, self._attempts, self._roles = me, engine, node, attempts, roles
        self._clock, self._meet_s = clock, 0.0
        pace = HOST_PACE if isinstance(engine.transfer_pool, np.ndarray | list) else DEVICE_PACE
        self._puller = PrefixPuller(engine, node, tokens_per_s, pace)
        self._server = PrefixServer(engine, node)

    def use_tiers(self, tiers: KVTiers) -> None:
        """Give other workers what these tiers hold, too."""
        self._server.tiers = tiers

    def accepts(self, job: Job) -> bool:
        """Return whether another worker may hold more of a prompt that is computed here.

        A prompt that is to be scored is computed as a whole.
        """
        computes = job.route.source is not None and job.route.prefill.worker_id == self._me
        return computes and job.sampling.prompt_logprobs is None and self._next_role(job) is not None

    def start(self, attempt: Attempt, now: float) -> None:
        """Pull what pays; then the next role that accepts the job starts it."""
        job, size = attempt.job, self._engine.layout.block_size
        try:
            digests = chain_hashes(job.token_ids, size, (len(job.token_ids) - 1) // size, job.chain_start)
        except OverflowError:  # of 32 bits: the engine refuses such tokens in words
            digests = []
        if not self._puller.begin(attempt, digests, now, lambda saved_s: self._resume(attempt, now, saved_s)):
            self._hand_on(attempt, now)

    def drop(self, attempt: Attempt, reason: str, now: float) -> None:
        self._puller.drop(*attempt.id)

    def takes(self, event: TransferEvent, now: float) -> bool:
        """Handle an event if it belongs to a pull; return whether it does, and no other role gets it."""
        takers = self._puller.takes(event, now), self._server.takes(event, now)
        return any(takers)

    def advance(self, now: float) -> None:
        """Do what time alone brings: called at every turn of the core."""
        if self._puller.is_waiting:
            self._puller.on_tick(now)
        self._server.advance()

    def seconds_to_deadline(self, now: float) -> float:
        """Return when `advance` is to be called next at the latest; infinite if no prompt waits for a pull."""
        return self._puller.seconds_to_deadline(now)

    def on_started(self, attempt: Attempt, now: float) -> None:
        """Do nothing: whoever computes the prompt has the attempt by then."""

    def on_chunk_scheduled(self, attempt: Attempt, chunk: ChunkScheduled) -> None:
        """Do nothing: whoever computes the prompt has the attempt by then."""

    def on_step(self, output: StepOutput, now: float) -> None:
        """Do nothing: a pull needs no step."""

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        """Do nothing: `takes` has seen it."""

    def on_tick(self, now: float) -> None:
        self._puller.on_tick(now)
        self._server.on_tick(now)
        if now >= self._meet_s:
            self._meet_s = now + MEET_PERIOD_S
            self._meet_readers()

    def counters(self) -> dict[str, float]:
        server = self._server
        sent = {"kv_peer_sent_blocks": server.num_blocks_sent, "kv_peer_sent_tier_blocks": server.num_blocks_loaded}
        return self._puller.counters() | {name: float(count) for name, count in sent.items()}

    def is_idle(self) -> bool:
        return self._puller.is_idle and self._server.is_idle

    def _meet_readers(self) -> None:
        """Connect to the workers whose prompts are answered here: the next turn may pull from here.

        A pull would not wait for as long as a connection takes.
        """
        # Of an answer that moved here the route names its source, which is about to leave.
        routes = (attempt.job.route for attempt in self._attempts if not attempt.job.is_migration)
        readers = {r.prefill.worker_id: r.prefill for r in routes if r.decode.worker_id == self._me and not r.is_local}
        for reader in readers.values():
            self._node.ensure_link(reader)

    def _next_role(self, job: Job) -> RoleHandler | None:
        return next((role for role in self._roles if role.accepts(job)), None)

    def _resume(self, attempt: Attempt, began_s: float, saved_s: float) -> None:
        """Hand on an attempt whose pull has ended, unless it is over itself."""
        if self._attempts.of(attempt.key) is not attempt:
            return
        attempt.late_s = max(0.0, self._clock() - began_s - saved_s)
        try:
            self._hand_on(attempt, self._clock())
        except TandemError as error:
            if attempt.role is not None:
                attempt.role.drop(attempt, f"{error.code}: {error}", self._clock())
            self._attempts.fail(attempt, error)

    def _hand_on(self, attempt: Attempt, now: float) -> None:
        attempt.role = self._next_role(attempt.job)
        assert attempt.role is not None
        attempt.role.start(attempt, now)
