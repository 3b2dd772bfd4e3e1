"""The giving side of a pull.

A worker asks for blocks that the prefix cache here may hold, and gets those that it does, and those behind them that
tiers in this machine hold. A GPU may still compute some: they are offered at once, and sent when they are computed.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from contracts.handoff import Abort, Commit, Grant, Offer, PrefixRequest, Refuse
from contracts.ids import BlockId, RequestId, WorkerId
from contracts.request import WorkerRef
from engine.cache.load_plan import EndedLoad, PrefixLoad
from engine.engine import Engine
from engine.messages import PageChecksums
from kv_transfer.events import Drained, MessageReceived, PeerDisconnected, TransferEvent
from kv_transfer.node import TransferNode
from worker.core.kv_tiers import KVTiers
from worker.core.role_handler import AttemptId, attempt_key

log = logging.getLogger(__name__)

DIGEST_NBYTES = 16
MAX_READERS = 16
"""Pulls that are served at once; blocks that are read can't be evicted."""
READER_TIMEOUT_S = 20.0
"""The longest that blocks are held for a reader, who gives up long before."""
CHUNK_BLOCKS = 8
"""The blocks of a chunk: as many are lost at most when the reader gives up."""


@dataclass(frozen=True)
class _PrefixReader:
    """A worker that reads `blocks`, those of the tokens from `first_token` on."""

    peer: WorkerRef
    first_token: int
    blocks: list[BlockId]
    deadline_s: float


@dataclass(frozen=True)
class _Loading:
    """A pull whose last blocks, `lent`, are being filled from tiers."""

    id: AttemptId
    reader: _PrefixReader
    lent: list[BlockId]


@dataclass(frozen=True)
class _Granted:
    """The blocks of a pull from `first` on, which are sent once their `checksums` are done."""

    first: int
    checksums: PageChecksums | None


class PrefixServer:
    """The pulls of other workers that are under way.

    It holds what they read until they end, one way or another.
    """

    def __init__(self, engine: Engine, node: TransferNode) -> None:
        self._engine, self._node, self._exports = engine, node, engine.prefix_exports
        self._open: dict[AttemptId, _PrefixReader] = {}
        self._draining: dict[AttemptId, _PrefixReader] = {}
        self._loading: dict[RequestId, _Loading] = {}
        self._granted: dict[AttemptId, _Granted] = {}
        self.tiers: KVTiers | None = None
        self.num_blocks_sent = self.num_blocks_loaded = 0

    def takes(self, event: TransferEvent, now: float) -> bool:
        """Handle an event if it belongs to a pull that is served here; return whether it does."""
        match event:
            case MessageReceived(peer_id, PrefixRequest() as request):
                self._on_request(peer_id, request, now)
            case MessageReceived(message=Grant() as grant) if (id_ := (grant.request_id, grant.epoch)) in self._open:
                self._on_grant(id_, grant)
            case MessageReceived(message=Commit() | Refuse() as end) if (end.request_id, end.epoch) in self._open:
                self._end((end.request_id, end.epoch))
            case MessageReceived(message=Abort() as abort) if (id_ := (abort.request_id, abort.epoch)) in self._open:
                self._granted.pop(id_, None)
                self._draining[id_] = self._open.pop(id_)  # the node drains it by itself
            case Drained(request_id, epoch) if (request_id, epoch) in self._draining:
                self._end((request_id, epoch))
            case PeerDisconnected():
                self._on_peer_lost(event)
                return False
            case _:
                return False
        return True

    def on_tick(self, now: float) -> None:
        """End the pulls of readers that did not end them."""
        for id_ in [id_ for id_, reader in self._open.items() if reader.deadline_s < now]:
            self._abort(id_, "deadline_exceeded", "the pull took too long")

    def advance(self) -> None:
        """Offer what has been loaded by now, and send what has been computed."""
        if self._loading and self.tiers is not None:
            for ended in self.tiers.finished_for_peers():
                self._on_loaded(ended)
        for id_, granted in list(self._granted.items()):
            # While nothing is being computed, they are done in a moment.
            if granted.checksums is None or granted.checksums.is_done or not self._engine.has_work():
                self._send(id_, granted)

    @property
    def is_idle(self) -> bool:
        return not self._open and not self._draining and not self._loading

    def _on_request(self, peer_id: WorkerId, request: PrefixRequest, now: float) -> None:
        id_ = request.request_id, request.epoch
        if reason := self._refusal(peer_id, request):
            self._refuse(peer_id, id_, reason)
            return
        digests = _digests(request)
        blocks = self._exports.hold(attempt_key(*id_), digests)
        reader = _PrefixReader(request.reader, request.first_token, blocks, now + READER_TIMEOUT_S)
        if not self._begins_to_load(id_, reader, digests[len(blocks) :]):
            self._offer(id_, reader)

    def _begins_to_load(self, id_: AttemptId, reader: _PrefixReader, missing: Sequence[bytes]) -> bool:
        """Return whether tiers fill blocks now that are missing in the cache; they are offered then."""
        num_held = self.tiers.count_held(missing) if self.tiers is not None and missing else 0
        lent = self._exports.lend(attempt_key(*id_), num_held)
        if self.tiers is None or not lent:
            return False
        size, count = self._engine.layout.block_size, len(lent)
        first_token = reader.first_token + len(reader.blocks) * size
        load = PrefixLoad(
            request_id=attempt_key(*id_),
            first_token=first_token,
            num_tokens=first_token + count * size,
            parent=None,
            digests=missing[:count],
            blocks=lent,
        )
        if not self.tiers.begin_for_peer(load):
            return False
        self._loading[attempt_key(*id_)] = _Loading(id_, reader, lent)
        return True

    def _on_loaded(self, ended: EndedLoad) -> None:
        loading = self._loading.pop(ended.request_id)
        loading.reader.blocks.extend(loading.lent[: ended.num_blocks])
        self.num_blocks_loaded += ended.num_blocks
        self._offer(loading.id, loading.reader)

    def _offer(self, id_: AttemptId, reader: _PrefixReader) -> None:
        """Offer what is held for a reader; refuse if that is nothing."""
        if not reader.blocks:
            self._end(id_)
            self._refuse(reader.peer.worker_id, id_, "none of these blocks is here")
            return
        self._open[id_] = reader
        num_tokens = reader.first_token + len(reader.blocks) * self._engine.layout.block_size
        self._node.offer(reader.peer, Offer(id_[0], id_[1], num_tokens, self._engine.layout.layout_id))

    def _refuse(self, peer_id: WorkerId, id_: AttemptId, reason: str) -> None:
        request_id, epoch = id_
        self._node.refuse(peer_id, Refuse(request_id=request_id, epoch=epoch, code="unavailable", reason=reason))

    def _refusal(self, peer_id: WorkerId, request: PrefixRequest) -> str:
        """Return why a request is not served, whatever is cached; empty if it may be."""
        if request.shared_id != self._engine.layout.shared_id:
            return "shared_id differs: the KV of this worker is of another model, number format or block size"
        if request.reader.worker_id != peer_id:
            return f"reader is {request.reader.worker_id}; the request came from {peer_id}"
        if not self._node.ensure_link(request.reader):
            return "there is no link to the reader yet"
        if request.first_token % self._engine.layout.block_size or len(request.digests) % DIGEST_NBYTES:
            return "first_token or digests are not those of whole blocks"
        id_ = request.request_id, request.epoch
        if id_ in self._open or id_ in self._draining or attempt_key(*id_) in self._loading:
            return "request_id is that of a pull under way"
        is_busy = len(self._open) + len(self._loading) >= MAX_READERS
        return f"{MAX_READERS} pulls are under way" if is_busy else ""

    def _on_grant(self, id_: AttemptId, grant: Grant) -> None:
        """Send what the peer has pages for, once it is computed; it has the tokens before in its own cache."""
        reader, size = self._open[id_], self._engine.layout.block_size
        num_have = (grant.skip_tokens - reader.first_token) // size
        if not 0 <= num_have < len(reader.blocks) or grant.skip_tokens % size:
            self._abort(id_, "corrupt", f"skip_tokens is {grant.skip_tokens}; {reader.first_token} was asked for")
            return
        self._granted[id_] = _Granted(num_have, self._exports.checksums(reader.blocks[num_have:]))
        self.advance()

    def _send(self, id_: AttemptId, granted: _Granted) -> None:
        del self._granted[id_]
        reader, size, num_have = self._open[id_], self._engine.layout.block_size, granted.first
        sums = None if granted.checksums is None else granted.checksums.wait()
        groups, num_sent = self._node.groups_with(reader.peer.worker_id, sends=True), 0
        for first in range(num_have, len(reader.blocks), CHUNK_BLOCKS):
            blocks = reader.blocks[first : first + CHUNK_BLOCKS]
            place = reader.first_token + first * size, len(blocks) * size
            those = None if sums is None else sums[first - num_have : first - num_have + len(blocks)]
            for group in groups:
                self._node.send_chunk(reader.peer.worker_id, *id_, num_sent, *place, blocks, those, group=group)
                num_sent += 1
            self.num_blocks_sent += len(blocks)

    def _abort(self, id_: AttemptId, code: str, reason: str) -> None:
        self._granted.pop(id_, None)
        reader = self._draining[id_] = self._open.pop(id_)
        log.warning("pull %s by %s is ended: %s", id_[0], reader.peer.worker_id, reason)
        self._node.abort(reader.peer.worker_id, Abort(request_id=id_[0], epoch=id_[1], code=code, reason=reason))

    def _on_peer_lost(self, lost: PeerDisconnected) -> None:
        """Let go what the peer read, unless the pull came over a newer link than the one that was lost."""
        loading = [(each.id, each.reader) for each in self._loading.values()]
        for id_, reader in [*self._open.items(), *self._draining.items(), *loading]:
            is_with = (reader.peer.worker_id, reader.peer.incarnation) == (lost.peer_id, lost.incarnation)
            if is_with and not self._node.knows(lost.peer_id, *id_):
                self._end(id_)

    def _end(self, id_: AttemptId) -> None:
        if self._loading.pop(attempt_key(*id_), None) and self.tiers is not None:
            self.tiers.cancel(attempt_key(*id_))
        self._granted.pop(id_, None)
        self._open.pop(id_, None)
        self._draining.pop(id_, None)
        self._exports.reader_ended(attempt_key(*id_))


def _digests(request: PrefixRequest) -> list[bytes]:
    data = request.digests
    return [data[start : start + DIGEST_NBYTES] for start in range(0, len(data), DIGEST_NBYTES)]
