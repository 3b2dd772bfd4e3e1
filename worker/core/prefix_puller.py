"""The asking side of a pull.

Before a prompt is computed, its blocks that another worker holds are fetched. They come as a handoff does, into pages
of their own, and enter the prefix cache, where the prompt finds them. What is late, wrong or lost is computed.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from contracts.errors import Corrupt, OutOfBlocks, RequestError
from contracts.handoff import Abort, ChunkHeader, Commit, Offer, PrefixRequest, Refuse
from contracts.ids import Epoch, RequestId, WorkerId
from contracts.request import AdapterRef, WorkerRef
from contracts.sampling import SamplingParams
from engine.cache.load_plan import LoadBudget, TierOffer, TierRate, plan_load
from engine.engine import Engine
from engine.messages import EngineRequest, Reservation
from kv_transfer.events import ChunkBad, ChunkLanded, Drained, MessageReceived, PeerDisconnected, TransferEvent
from kv_transfer.node import TransferNode
from worker.core.chunk_order import ChunkOrder
from worker.core.granting import granted
from worker.core.role_handler import Attempt, AttemptId, attempt_key

log = logging.getLogger(__name__)

MAX_PULLS = 8
MAX_BLOCKS = 2048
"""The blocks that one pull asks for at most: their digests fit a message."""
MAX_OVER = 256
MAX_RATED = 256
"""The sources whose rates are remembered: one that was not asked for longer is taken for a new one."""
DRAIN_WAIT_S = 0.05
"""How long a prompt waits for the end of a writer here, so that what came before a pull was given up is of use."""


@dataclass(frozen=True)
class PullPace:
    """What is thought of pulls until they are measured.

    `nbytes_per_s`, and the seconds before the first byte. One may be behind computing by `min_slack_s` at least,
    however short its prompt.
    """

    nbytes_per_s: float
    latency_s: float
    min_slack_s: float


HOST_PACE = PullPace(1e9, 0.004, 0.02)
"""Between CPUs, where a core gets to look at deadlines this often."""
DEVICE_PACE = PullPace(2e10, 0.004, 0.005)
"""Between GPUs: what is a tenth of NVLink's rate, and several times that of a socket, is tried by a pull or two."""


@dataclass
class Pull:
    """The blocks of a prompt that were asked for, from `first_token` on.

    `chunks`: how much of them is here. `saved_s`: how long computing those that entered the cache would have taken.
    `is_timed`: the time of what the peer had at once has been counted; the rest comes as its tiers give it.
    """

    id: AttemptId
    peer: WorkerRef
    first_token: int
    began_s: float
    budget: LoadBudget
    token_ids: Sequence[int]
    cache_salt: str
    adapter: AdapterRef | None
    priority: int
    loss: str
    then: Callable[[float], None] | None
    saved_s: float = 0.0
    offer: Offer | None = None
    reservation: Reservation | None = None
    chunks: ChunkOrder = field(default_factory=ChunkOrder)
    answered_s: float = 0.0
    is_timed: bool = False
    ended_s: float = 0.0

    @property
    def key(self) -> RequestId:
        """Return the engine's id of the pages."""
        return attempt_key(*self.id)

    @property
    def ready_end(self) -> int:
        """Return up to which token the KV comes at the pace of the link, as far as that is known."""
        assert self.offer is not None
        return self.offer.num_tokens if self.offer.num_ready is None else self.offer.num_ready


class PrefixPuller:
    """The pulls of this worker.

    `tokens_per_s` returns how fast it computes prompts, 0.0 while that is unknown: then nothing is pulled. A pull ends
    by its budget at the latest, see LoadBudget: then loading and computing take little longer than computing alone.
    """

    def __init__(
        self, engine: Engine, node: TransferNode, tokens_per_s: Callable[[], float], pace: PullPace = HOST_PACE
    ) -> None:
        self._engine, self._node, self._tokens_per_s, self._pace = engine, node, tokens_per_s, pace
        self._open: dict[AttemptId, Pull] = {}
        self._draining: dict[AttemptId, Pull] = {}
        self._over: OrderedDict[AttemptId, None] = OrderedDict()
        self._rates: OrderedDict[WorkerId, TierRate] = OrderedDict()
        names = ("loads", "hit_blocks", "bytes_out", "load_seconds", "refused", "given_up", "failed", "quarantined")
        self._counters = {f"kv_peer_{name}": 0.0 for name in names}

    def begin(self, attempt: Attempt, digests: Sequence[bytes], now: float, then: Callable[[float], None]) -> bool:
        """Ask the route's source for the blocks of `digests` that are not cached here, if that pays.

        Returns whether it was asked; then `then` is called once, when the pull has ended, unless it is dropped. It is
        told how many seconds of computing were saved.
        """
        job, size = attempt.job, self._engine.layout.block_size
        source, held = job.route.source, self._engine.prefix_exports.count(digests, attempt.loss)
        missing = digests[held : held + MAX_BLOCKS]
        tokens_per_s = self._tokens_per_s()
        if source is None or len(self._open) >= MAX_PULLS or not missing or not self._node.checks_chunks:
            return False
        if not tokens_per_s:  # whether a pull pays, and when it is late, is told by what computing takes
            return False
        rate = self._rate_of(source.worker_id)
        best = TierOffer("peer", len(missing), rate.latency_s, self._engine.layout.block_nbytes / rate.nbytes_per_s)
        if not plan_load([best], held * size, size, tokens_per_s).parts:
            rate.passed_over()
            return False
        if not self._node.ensure_link(source):  # a prompt waits for no connection: the next one finds it
            return False
        id_ = RequestId(f"pull:{job.request_id}"), job.epoch
        budget = LoadBudget(held * size, len(job.token_ids), size, tokens_per_s)
        facts = held * size, now, budget, job.token_ids, job.cache_salt, job.adapter, job.priority, attempt.loss
        self._open[id_] = Pull(id_, source, *facts, then)
        request = PrefixRequest(
            request_id=id_[0],
            epoch=id_[1],
            reader=job.route.prefill,
            shared_id=self._engine.layout.shared_id,
            first_token=held * size,
            digests=b"".join(missing),
        )
        self._node.request_prefix(source, request)
        return True

    def drop(self, request_id: RequestId, epoch: Epoch) -> None:
        """End the pull of an attempt that is over; nothing to do if there is none."""
        if pull := self._open.get((RequestId(f"pull:{request_id}"), epoch)):
            pull.then = None
            self._give_up(pull, "the request is over", 0.0)

    def takes(self, event: TransferEvent, now: float) -> bool:
        """Handle an event if it belongs to a pull of this worker; return whether it does."""
        match event:
            case MessageReceived(peer_id, Offer() as offer) if self._knows(id_ := (offer.request_id, offer.epoch)):
                pull = self._open.get(id_)
                if pull is None or pull.peer.worker_id != peer_id:
                    self._send_refusal(peer_id, id_, "cancelled", "the pull is over")
                elif pull.offer is None:
                    self._on_offer(pull, offer, now)
                else:
                    self._on_lower_offer(pull, pull.offer, offer.num_tokens, now)
            case MessageReceived(message=Refuse() | Abort() as end) if self._knows(id_ := (end.request_id, end.epoch)):
                if pull := self._open.get(id_):
                    self._counters["kv_peer_refused"] += 1
                    self._settle(pull, now, is_drained=pull.reservation is None)
            case ChunkLanded(_, header, _) if self._knows(id_ := (header.request_id, header.epoch)):
                if (pull := self._open.get(id_)) and pull.reservation is not None:
                    self._on_chunk(pull, header, now)
            case ChunkBad(_, header, reason) if self._knows(id_ := (header.request_id, header.epoch)):
                if pull := self._open.get(id_):
                    self._fail(pull, reason, now)
            case Drained(request_id, epoch) if self._knows((request_id, epoch)):
                if pull := self._draining.pop((request_id, epoch), None):
                    self._writer_ended(pull)
            case PeerDisconnected():
                self._on_peer_lost(event, now)
                return False
            case _:
                return False
        return True

    def _limit_s(self, pull: Pull) -> float:
        """Return after how many seconds a pull is given up, unless it has come further by then."""
        size = self._engine.layout.block_size
        num_loaded = max(0, pull.chunks.next_token - pull.first_token) // size if pull.reservation else 0
        return pull.budget.limit_s(num_loaded) + max(0.0, self._pace.min_slack_s - pull.budget.slack_s)

    def seconds_to_deadline(self, now: float) -> float:
        """Return when `on_tick` has something to give up at the soonest; infinite if no pull is open."""
        deadlines = [pull.began_s + self._limit_s(pull) for pull in self._open.values()]
        deadlines += [pull.ended_s + DRAIN_WAIT_S for pull in self._draining.values() if pull.then is not None]
        return max(0.0, min(deadlines) - now) if deadlines else math.inf

    def on_tick(self, now: float) -> None:
        """Give up the pulls that fall behind computing."""
        for pull in list(self._open.values()):
            if now - pull.began_s > self._limit_s(pull):
                self._counters["kv_peer_given_up"] += 1
                self._rate_of(pull.peer.worker_id).add(max(pull.chunks.nbytes, 1), now - pull.began_s)
                self._give_up(pull, "computing is faster", now)
        for pull in [pull for pull in self._draining.values() if now - pull.ended_s > DRAIN_WAIT_S]:
            self._go_on(pull)

    @property
    def is_waiting(self) -> bool:
        """Return whether a prompt waits for a pull."""
        return bool(self._open) or any(pull.then is not None for pull in self._draining.values())

    @property
    def is_idle(self) -> bool:
        return not self._open and not self._draining

    def counters(self) -> dict[str, float]:
        """Return all that counts up, by metric names."""
        return self._counters

    def _rate_of(self, source: WorkerId) -> TierRate:
        """Return what was measured of this source: its link and its host may be slower than others'."""
        rate = self._rates.setdefault(source, TierRate(self._pace.nbytes_per_s, self._pace.latency_s))
        self._rates.move_to_end(source)
        if len(self._rates) > MAX_RATED:
            self._rates.popitem(last=False)
        return rate

    def _knows(self, id_: AttemptId) -> bool:
        return id_ in self._open or id_ in self._draining or id_ in self._over

    def _on_offer(self, pull: Pull, offer: Offer, now: float) -> None:
        """Grant pages for what the peer has, if there is room."""
        size = self._engine.layout.block_size
        pull.offer, pull.answered_s = offer, now
        first, ready, end = pull.first_token, pull.ready_end, offer.num_tokens
        is_whole = end % size == ready % size == 0 and first <= ready <= end and first < end < len(pull.token_ids)
        try:
            if not is_whole:
                raise Corrupt(f"{end} tokens are offered, {ready} ready, of a prompt of {len(pull.token_ids)}")
            reservation = self._engine.reserve(_request(pull, offer.num_tokens))
        except (OutOfBlocks, RequestError, Corrupt) as error:
            self._refuse(pull, str(error), now)
            return
        pull.is_timed = pull.ready_end <= reservation.skip_tokens
        groups = self._node.groups_with(pull.peer.worker_id, sends=False)
        grant = granted(pull.id, self._engine, reservation, groups, reservation.skip_tokens, offer.num_tokens)
        pull.reservation, pull.chunks = reservation, ChunkOrder(grant.group_skips)
        if reservation.skip_tokens < pull.first_token:  # evicted meanwhile: the peer was not asked for these
            self._engine.release(pull.key)
            self._engine.incoming_writer_ended(pull.key)
            self._refuse(pull, "the blocks before those that were asked for are gone", now)
            return
        self._node.grant(pull.peer.worker_id, grant)

    def _refuse(self, pull: Pull, reason: str, now: float) -> None:
        """End a pull that was offered and has no pages."""
        log.debug("pull %s from %s is refused: %s", pull.id[0], pull.peer.worker_id, reason)
        self._engine.release(pull.key)  # else the scheduler keeps room for it
        self._counters["kv_peer_failed"] += 1
        pull.reservation = None
        self._send_refusal(pull.peer.worker_id, pull.id, "unavailable", reason)
        self._settle(pull, now, is_drained=True)

    def _send_refusal(self, peer_id: WorkerId, id_: AttemptId, code: str, reason: str) -> None:
        request_id, epoch = id_
        self._node.refuse(peer_id, Refuse(request_id=request_id, epoch=epoch, code=code, reason=reason))

    def _on_chunk(self, pull: Pull, header: ChunkHeader, now: float) -> None:
        try:
            pull.chunks.take(header)
        except Corrupt as error:
            pull.chunks = ChunkOrder()
            self._fail(pull, str(error), now)
            return
        if header.loss:
            self._engine.incoming_lost(pull.key, header.first_token, header.loss)
        chunks = pull.chunks
        if not pull.is_timed and chunks.next_token >= pull.ready_end:
            pull.is_timed = True
            self._rate_of(pull.peer.worker_id).add(chunks.nbytes, now - pull.answered_s)
        self._end_if_whole(pull, now)

    def _on_lower_offer(self, pull: Pull, offer: Offer, num_tokens: int, now: float) -> None:
        """Expect less than was offered: the peer's tiers did not give the rest."""
        is_lower = pull.ready_end <= num_tokens < offer.num_tokens and num_tokens % self._engine.layout.block_size == 0
        if pull.reservation is None or not is_lower:
            self._fail(pull, f"{num_tokens} tokens are offered after {offer.num_tokens}", now)
            return
        pull.offer = msgspec.structs.replace(offer, num_tokens=num_tokens)
        self._end_if_whole(pull, now)

    def _end_if_whole(self, pull: Pull, now: float) -> None:
        """Commit a pull all of which has come."""
        chunks = pull.chunks
        if pull.offer is not None and chunks.next_token >= pull.offer.num_tokens:
            self._counters["kv_peer_load_seconds"] += now - pull.began_s
            is_drained = self._node.commit(
                pull.peer.worker_id,
                Commit(request_id=pull.id[0], epoch=pull.id[1], num_chunks=chunks.num_chunks, nbytes=chunks.nbytes),
            )
            self._settle(pull, now, is_drained)

    def _fail(self, pull: Pull, reason: str, now: float) -> None:
        self._counters["kv_peer_failed"] += 1
        log.warning("pull %s from %s failed: %s", pull.id[0], pull.peer.worker_id, reason)
        self._give_up(pull, reason, now)

    def _give_up(self, pull: Pull, reason: str, now: float) -> None:
        """End a pull here and at the peer; what came before is kept once its writer has ended."""
        self._settle(pull, now, is_drained=pull.reservation is None)
        if pull.offer is not None:
            self._node.abort(
                pull.peer.worker_id, Abort(request_id=pull.id[0], epoch=pull.id[1], code="cancelled", reason=reason)
            )

    def _settle(self, pull: Pull, now: float, is_drained: bool) -> None:
        """End a pull; unless it `is_drained`, pages of it may still be written to."""
        del self._open[pull.id]
        self._over[pull.id] = None
        if len(self._over) > MAX_OVER:
            self._over.popitem(last=False)
        self._engine.release(pull.key)
        pull.ended_s = now
        if is_drained:
            self._writer_ended(pull)
        else:
            self._draining[pull.id] = pull

    def _writer_ended(self, pull: Pull) -> None:
        """Enter what has come into the prefix cache, and go on with the prompt."""
        if pull.reservation is not None:
            num_saved = self._engine.incoming_writer_ended(pull.key, pull.chunks.next_token)
            pull.saved_s = pull.budget.compute_s(num_saved)
            self._counters["kv_peer_loads"] += num_saved > 0
            self._counters["kv_peer_hit_blocks"] += num_saved // self._engine.layout.block_size
            self._counters["kv_peer_bytes_out"] += pull.chunks.nbytes
        self._go_on(pull)

    def _on_peer_lost(self, lost: PeerDisconnected, now: float) -> None:
        """End the pulls from this peer, unless they came over a newer link than the one that was lost."""
        for pull in [*self._open.values(), *self._draining.values()]:
            is_with = (pull.peer.worker_id, pull.peer.incarnation) == (lost.peer_id, lost.incarnation)
            if not is_with or self._node.knows(lost.peer_id, *pull.id):
                continue
            if pull.id in self._open:
                self._counters["kv_peer_failed"] += 1
                self._settle(pull, now, is_drained=pull.reservation is None)
            if self._draining.pop(pull.id, None) is None:
                continue
            if lost.fenced:
                self._writer_ended(pull)
            else:
                log.error("pull %s: its writer could not be fenced; its pages stay out of use", pull.id[0])
                self._counters["kv_peer_quarantined"] += 1
                self._go_on(pull)

    def _go_on(self, pull: Pull) -> None:
        then, pull.then = pull.then, None
        if then is not None:
            then(pull.saved_s)


def _request(pull: Pull, num_tokens: int) -> EngineRequest:
    """Return the request for which the pages of a pull are reserved: nothing of it is ever computed."""
    return EngineRequest(
        request_id=pull.key,
        token_ids=pull.token_ids[:num_tokens],
        sampling=SamplingParams(max_tokens=1, seed=0),
        priority=pull.priority,
        cache_salt=pull.cache_salt,
        adapter=pull.adapter,
        loss=pull.loss,
    )
