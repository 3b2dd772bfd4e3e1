"""The loop of the engine core: messages in, one engine step, one frame out."""

import logging
import time
from collections.abc import Callable, Sequence

from contracts.errors import ConfigError, DeadlineExceeded, RequestError, TandemError, by_code
from contracts.events import Token
from contracts.ids import RequestId, WorkerId
from contracts.request import Cancel, CancelMigration, Job, JobMessage
from engine.engine import Engine
from engine.messages import ChunkScheduled, Sampled, Started, StepObserver, StepOutput
from kv_transfer.node import TransferNode
from worker.core.attempt_table import AttemptTable
from worker.core.front_link import FrontLink
from worker.core.kv_tiers import KVTiers
from worker.core.peer_prefixes import PeerPrefixes
from worker.core.role_handler import Attempt, RoleHandler
from worker.core.status import StatusReporter
from worker.messages import (
    AdapterReply,
    CoreFrame,
    GatewayGone,
    KnownPeers,
    LoadAdapter,
    Stop,
    ToCore,
    UnloadAdapter,
    Work,
)

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05  # also the latest that a deadline is noticed when nothing else happens
ALERT_WAIT_S = 0.001
"""The longest wait in seconds while a handoff is on its way to an idle engine. After a longer sleep its first step
would begin 0.1 ms later.
"""
TICK_S = 0.02


class EngineCore(StepObserver):
    """The core of one worker: an engine, a transfer node and the roles.

    Single-threaded: everything from other threads comes through `link`.
    """

    def __init__(
        self,
        me: WorkerId,
        engine: Engine,
        node: TransferNode,
        roles: Sequence[RoleHandler],
        attempts: AttemptTable,
        link: FrontLink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._me = me
        self._engine = engine
        self._node = node
        self._roles = roles = [*roles]
        self._prefixes: PeerPrefixes | None = None
        self._attempts = attempts
        self._link = link
        self._clock = clock
        self._status = StatusReporter(me, engine, node, attempts, roles)
        self._stopping = self._is_stuck = False
        self._next_tick_s = 0.0
        self._tiers: KVTiers | None = None

    @property
    def prefill_rate(self) -> float:
        """Return the tokens of prompts that are computed per second; 0.0 while unknown."""
        return self._status.prefill_rate

    def measure_prefill_rate(self) -> None:
        """Find out how fast prompts are computed: a load is planned by that before the first one is."""
        tokens_per_s = self._engine.measure_prefill_rate()
        log.info("prompts are computed at %.0f tokens/s, as measured at the start", tokens_per_s)
        self._status.start_at(tokens_per_s)

    def use_tiers(self, tiers: KVTiers) -> None:
        """Keep KV in tiers below the pool as well, and load it from there."""
        self._engine.use_lower_tiers(tiers)
        self._tiers = self._status.tiers = tiers
        if self._prefixes is not None:
            self._prefixes.use_tiers(tiers)

    def use_peers(self, prefixes: PeerPrefixes) -> None:
        """Pull prefixes from other workers, and give them those that are cached here."""
        self._prefixes = prefixes
        self._roles.insert(0, prefixes)

    def run(self) -> None:
        """Run until the front sends Stop. Raises FrontDisconnected when the front is gone."""
        while not self._stopping:
            self.turn()

    def turn(self) -> None:
        for message in self._link.receive(self._poll_timeout_s()):
            self._on_message(message)
        self._on_transfer()
        self._on_time()
        if self._engine.has_work() and not self._launch_slack_s():
            self._step()
        self._send()
        if not self._engine.has_work():
            self._node.rested()

    def _poll_timeout_s(self) -> float:
        if self._engine.has_work():
            return self._stuck_timeout_s() if self._is_stuck else self._launch_slack_s()
        if self._engine.has_reserved:
            return ALERT_WAIT_S
        return IDLE_WAIT_S if self._prefixes is None else self._wait_for_pulls_s(self._prefixes)

    def _wait_for_pulls_s(self, prefixes: PeerPrefixes) -> float:
        """Return how long an idle core may wait: a pull that falls behind is given up on time."""
        return min(IDLE_WAIT_S, prefixes.seconds_to_deadline(self._clock()))

    def _stuck_timeout_s(self) -> float:
        """Return how long an engine that can't go on waits: a load from lower tiers is given up on time."""
        deadline_s = None if self._tiers is None else self._tiers.seconds_to_deadline()
        return IDLE_WAIT_S if deadline_s is None else min(deadline_s, IDLE_WAIT_S)

    def _launch_slack_s(self) -> float:
        """Return how many seconds a launch may wait for a reserved handoff to join the next batch."""
        return self._engine.slack_s if self._engine.has_reserved else 0.0

    def _step(self) -> None:
        output = self._engine.step(self)
        self._is_stuck = output == StepOutput()  # no waiting request finds pages; a message or an event may change that
        self._status.stepped(output.num_prefill_tokens, output.num_decode_tokens, output.span_s)
        self._on_transfer()  # a grant that came during the step lets its chunk leave at once
        self._publish(output)

    # Inputs.

    def _on_message(self, message: ToCore) -> None:
        match message:
            case Work(jobs, taken_s):
                for job in jobs:
                    self._on_work(job, taken_s)
            case GatewayGone(gateway_id, broken_s):
                for attempt in self._attempts:
                    if attempt.job.gateway_id == gateway_id and attempt.taken_s < broken_s:
                        self._drop(attempt, "its gateway is gone")
            case KnownPeers(workers):
                self._node.meet(workers)
            case LoadAdapter() | UnloadAdapter():
                self._link.send(self._change_adapters(message))
            case Stop():
                self._stopping = True

    def _change_adapters(self, message: LoadAdapter | UnloadAdapter) -> AdapterReply:
        """Load or forget a LoRA adapter between two steps."""
        adapters, error = self._engine.adapters, ""
        try:
            if isinstance(message, LoadAdapter):
                adapters.load(message.name, message.path)
            else:
                adapters.unload(message.name)
        except ConfigError as refused:
            error = str(refused)
        return AdapterReply(message.number, adapters.refs, error)

    def _on_work(self, message: JobMessage, taken_s: float) -> None:
        match message:
            case Cancel():
                self._cancel(message)
            case CancelMigration():
                self._cancel_migration(message)
            case Job() if message.is_migration and message.route.prefill.worker_id == self._me:
                self._migrate(message, taken_s)
            case Job():
                self._accept(message, taken_s)

    def _migrate(self, job: Job, taken_s: float) -> None:
        """Begin to move an answer that is decoded here; it goes on, also if the migration is refused."""
        migration = None
        try:
            migration = self._attempts.open_migration(job, taken_s)
            migration.role = self._role(job)
            migration.role.start(migration, self._clock())
        except TandemError as error:
            self._attempts.fail(migration or Attempt(job, taken_s, taken_s), error)

    def _cancel_migration(self, cancel: CancelMigration) -> None:
        migration = self._attempts.migration(cancel.request_id, cancel.epoch)
        if migration is not None:
            self._drop(migration, cancel.reason)

    def _accept(self, job: Job, taken_s: float) -> None:
        known = self._attempts.get(job.request_id)
        if known is not None and known.job.epoch < job.epoch:
            self._drop(known, f"superseded by epoch {job.epoch}")
        attempt = self._attempts.open(job, taken_s)
        if attempt is None:
            return
        try:
            if job.adapter is not None:
                self._engine.adapters.find(job.adapter)  # before anything is moved for it
            attempt.role = self._role(job)
            attempt.role.start(attempt, self._clock())
        except TandemError as error:
            self._fail(attempt, error)

    def _role(self, job: Job) -> RoleHandler:
        for role in self._roles:
            if role.accepts(job):
                return role
        raise RequestError(f"worker {self._me} has no role in the route of request {job.request_id}")

    def _cancel(self, cancel: Cancel) -> None:
        attempt = self._attempts.get(cancel.request_id)
        if attempt is None:
            self._attempts.cancelled(cancel.request_id, cancel.epoch)
        elif attempt.job.epoch <= cancel.epoch:
            self._drop(attempt, cancel.reason)

    def _on_transfer(self) -> None:
        events = self._node.poll()
        now = self._clock()
        for event in events:
            if self._prefixes is not None and self._prefixes.takes(event, now):
                continue
            for role in self._roles:
                role.on_transfer(event, now)
        for role in self._roles:
            role.advance(now)

    def _on_time(self) -> None:
        now = self._clock()
        if now < self._next_tick_s:
            return
        self._next_tick_s = now + TICK_S
        for attempt in self._attempts.overdue(now):
            self._fail(attempt, DeadlineExceeded(f"not done within {attempt.job.timeout_s:.1f} s"))
        for role in self._roles:
            role.on_tick(now)

    def started(self, started: Started) -> None:
        """Let the role send its offer while the step is computed."""
        now = self._clock()
        attempt = self._attempts.of(started.request_id)
        if attempt is None or attempt.role is None:
            return
        attempt.stage("queue", now - started.load_s)
        if started.load_s:
            attempt.stage("load", now)
        attempt.cached_tokens = started.cached_tokens
        attempt.role.on_started(attempt, now)

    def chunk_scheduled(self, chunk: ChunkScheduled) -> None:
        attempt = self._attempts.of(chunk.request_id)
        if attempt is not None and attempt.role is not None:
            attempt.role.on_chunk_scheduled(attempt, chunk)

    def chunks_launched(self, is_all: bool) -> None:
        self._node.chunks_launched(is_all)

    # Outputs.

    def _publish(self, output: StepOutput) -> None:
        now = self._clock()
        self._count_step(output)
        for scored in output.scored:
            if attempt := self._attempts.of(scored.request_id):
                self._attempts.scored(attempt, scored.first_index, scored.tokens)
        verified = {each.request_id: each for each in output.verified}
        for request_id, tokens in _by_request(output.sampled).items():
            attempt = self._attempts.of(request_id)
            if attempt is None:
                continue
            if attempt.is_first(tokens[0]):
                attempt.stage("prefill", now)
                self._attempts.prefilled(attempt)
            draft = verified.get(request_id)
            counts = (draft.num_tokens, draft.num_accepted) if draft else (0, 0)
            self._attempts.tokens(attempt, tokens, *counts)
        for role in self._roles:
            role.on_step(output, now)
        self._end(output, now)

    def _count_step(self, output: StepOutput) -> None:
        """Account the step to each answer that goes on by it, or that waits while prompts alone are computed."""
        if not output.num_decode_tokens:
            for attempt in self._attempts:
                if attempt.has_sent_stages:  # it has a token
                    attempt.count_step("prefill", output.span_s)
            return
        kind = "mixed" if output.num_prefill_tokens else "decode"
        for sampled in output.sampled:
            attempt = self._attempts.of(sampled.request_id)
            if attempt is not None and not attempt.is_first(sampled.token):
                attempt.count_step(kind, output.span_s)

    def _end(self, output: StepOutput, now: float) -> None:
        for ended in output.ended:
            attempt = self._attempts.of(ended.request_id)
            if attempt is not None:
                attempt.stage("decode", now)
                self._attempts.finish(attempt, ended.num_tokens, ended.reason)
        for failed in output.failed:
            attempt = self._attempts.of(failed.request_id)
            if attempt is not None:
                self._fail(attempt, by_code(failed.code, failed.message))

    def _fail(self, attempt: Attempt, error: TandemError) -> None:
        if attempt.role is not None:
            attempt.role.drop(attempt, f"{error.code}: {error}", self._clock())
        self._attempts.fail(attempt, error)

    def _drop(self, attempt: Attempt, reason: str) -> None:
        log.info("request %s epoch %d dropped: %s", attempt.job.request_id, attempt.job.epoch, reason)
        if attempt.role is not None:
            attempt.role.drop(attempt, reason, self._clock())
        self._attempts.leave(attempt)

    def _send(self) -> None:
        events, reports = self._attempts.take()
        status = self._status.due(self._clock())
        if events or reports or status is not None:
            held = self._tiers.take_changes() if self._tiers is not None and status is not None else []
            self._link.send(CoreFrame(events, [(m.request_id, m.epoch, m.state) for m in reports], status, held))


def _by_request(sampled: Sequence[Sampled]) -> dict[RequestId, list[Token]]:
    """Return the tokens of a step by request, in order: more than one where a draft was right."""
    found: dict[RequestId, list[Token]] = {}
    for each in sampled:
        found.setdefault(each.request_id, []).append(each.token)
    return found
