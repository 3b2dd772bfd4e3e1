"""The giving side of a pull.

A worker asks for blocks that the prefix cache here may hold. It is offered those that it does, and those behind them
that tiers in this machine hold, all at once. What a GPU still computes, and what tiers load, is sent as it is there.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.handoff import Abort, Commit, Grant, Offer, PrefixRequest, Refuse
from contracts.ids import BlockId, WorkerId
from contracts.request import WorkerRef
from engine.cache.load_plan import PrefixLoad
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


@dataclass
class _Part:
    """Blocks `[first, last)` of a pull, which are sent once their `checksums` are done."""

    first: int
    last: int
    checksums: PageChecksums | None


@dataclass
class _PrefixReader:
    """A worker that reads `blocks`, those of the tokens from `first_token` on.

    The first `num_held` were in the cache. The first `num_ready` have their KV, or a device computes it; tiers fill the
    others while it `is_loading`. `num_offered`: tokens, at first. `next`: the first block that no part has yet; None
    before Grant. `skips`: of each group that moves, the first token whose pages are sent.
    """

    peer: WorkerRef
    first_token: int
    blocks: list[BlockId]
    num_held: int
    num_ready: int
    deadline_s: float
    is_loading: bool = False
    num_offered: int = 0
    next: int | None = None
    skips: list[int] = field(default_factory=list[int])
    num_chunks: int = 0
    parts: deque[_Part] = field(default_factory=deque)


class PrefixServer:
    """The pulls of other workers that are under way.

    It holds what they read until they end, one way or another.
    """

    def __init__(self, engine: Engine, node: TransferNode) -> None:
        self._engine, self._node, self._exports = engine, node, engine.prefix_exports
        self._open: dict[AttemptId, _PrefixReader] = {}
        self._draining: dict[AttemptId, _PrefixReader] = {}
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
                self._stop_loading(id_, self._open[id_])
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
        """Send what has been loaded and computed by now."""
        if self.tiers is not None and any(reader.is_loading for reader in self._open.values()):
            self._count_loaded(self.tiers)
        for id_, reader in list(self._open.items()):
            if reader.next is None:
                continue
            self._cut_part(reader, reader.next)
            # While nothing is being computed, they are done in a moment.
            while reader.parts and (_is_done(reader.parts[0].checksums) or not self._engine.has_work()):
                self._send(id_, reader, reader.parts.popleft())
            if not reader.is_loading and reader.num_ready < len(reader.blocks):  # tiers gave less than was thought
                del reader.blocks[reader.num_ready :]
                self._node.lower_offer(reader.peer.worker_id, self._offer_of(id_, reader))

    @property
    def is_idle(self) -> bool:
        return not self._open and not self._draining

    def _on_request(self, peer_id: WorkerId, request: PrefixRequest, now: float) -> None:
        id_ = request.request_id, request.epoch
        if reason := self._refusal(peer_id, request):
            self._refuse(peer_id, id_, reason)
            return
        digests = _digests(request)
        blocks = self._exports.hold(attempt_key(*id_), digests, request.first_token)
        count, deadline_s = len(blocks), now + READER_TIMEOUT_S
        reader = _PrefixReader(request.reader, request.first_token, blocks, count, count, deadline_s)
        self._begin_to_load(id_, reader, digests[len(blocks) :])
        self._offer(id_, reader)

    def _begin_to_load(self, id_: AttemptId, reader: _PrefixReader, missing: Sequence[bytes]) -> None:
        """Let tiers fill the blocks that are missing in the cache, as far as that pays."""
        num_held = self.tiers.count_held(missing) if self.tiers is not None and missing else 0
        lent = self._exports.lend(attempt_key(*id_), num_held)
        if self.tiers is None or not lent:
            return
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
        if self.tiers.begin_for_peer(load):
            reader.blocks.extend(lent)
            reader.is_loading = True

    def _count_loaded(self, tiers: KVTiers) -> None:
        """Note how far the loads of all readers are, and which have ended."""
        ended = {each.request_id: each.num_blocks for each in tiers.finished_for_peers()}
        for id_, reader in self._open.items():
            if not reader.is_loading:
                continue
            key, num_before = attempt_key(*id_), reader.num_ready
            reader.is_loading = key not in ended
            num_loaded = tiers.num_loaded(key) if reader.is_loading else ended[key]
            reader.num_ready = reader.num_held + num_loaded
            self.num_blocks_loaded += reader.num_ready - num_before

    def _offer(self, id_: AttemptId, reader: _PrefixReader) -> None:
        """Offer what is held for a reader; refuse if that is nothing."""
        self._open[id_] = reader
        if not reader.blocks:
            self._end(id_)
            self._refuse(reader.peer.worker_id, id_, "none of these blocks is here")
            return
        offer = self._offer_of(id_, reader)
        reader.num_offered = offer.num_tokens
        self._node.offer(reader.peer, offer)

    def _offer_of(self, id_: AttemptId, reader: _PrefixReader) -> Offer:
        request_id, epoch = id_
        size, layout_id = self._engine.layout.block_size, self._engine.layout.layout_id
        num_tokens, num_ready = (reader.first_token + count * size for count in (len(reader.blocks), reader.num_ready))
        return Offer(request_id, epoch, num_tokens, layout_id, num_ready=num_ready if num_ready < num_tokens else None)

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
        first, size = request.first_token, self._engine.layout.block_size
        if first < 0 or first % size or len(request.digests) % DIGEST_NBYTES:
            return "first_token or digests are not those of whole blocks"
        id_ = request.request_id, request.epoch
        if id_ in self._open or id_ in self._draining:
            return "request_id is that of a pull under way"
        is_busy = len(self._open) >= MAX_READERS
        return f"{MAX_READERS} pulls are under way" if is_busy else ""

    def _on_grant(self, id_: AttemptId, grant: Grant) -> None:
        """Send what the peer has pages for, once it is computed; it has the tokens before in its own cache."""
        reader, size = self._open[id_], self._engine.layout.block_size
        num_have = (grant.skip_tokens - reader.first_token) // size
        if not 0 <= num_have < len(reader.blocks) or grant.skip_tokens % size:
            self._abort(id_, "corrupt", f"skip_tokens is {grant.skip_tokens}; {reader.first_token} was asked for")
            return
        skips = self._engine.layout.skips(grant.skip_tokens, reader.num_offered)
        reader.skips = [skips[group] for group in self._node.groups_with(reader.peer.worker_id, sends=True)]
        if grant.skips() != reader.skips:
            self._abort(id_, "corrupt", f"group_skips are {grant.skips()}; {reader.skips} are expected")
            return
        reader.next = num_have
        self.advance()

    def _cut_part(self, reader: _PrefixReader, first: int) -> None:
        """Make a part of what is ready: after the first, a chunk at least while more is to come."""
        num_new, is_first = reader.num_ready - first, not (reader.num_chunks or reader.parts)
        if num_new >= (CHUNK_BLOCKS if reader.is_loading and not is_first else 1):
            checksums = self._exports.checksums(reader.blocks[first : reader.num_ready])
            reader.parts.append(_Part(first, reader.num_ready, checksums))
            reader.next = reader.num_ready

    def _send(self, id_: AttemptId, reader: _PrefixReader, part: _Part) -> None:
        size, sums = self._engine.layout.block_size, None if part.checksums is None else part.checksums.wait()
        groups = self._node.groups_with(reader.peer.worker_id, sends=True)
        for first in range(part.first, part.last, CHUNK_BLOCKS):
            blocks = reader.blocks[first : min(first + CHUNK_BLOCKS, part.last)]
            first_token = reader.first_token + first * size
            those = None if sums is None else sums[first - part.first : first - part.first + len(blocks)]
            for group, skip in zip(groups, reader.skips, strict=True):
                skipped = max(0, skip - first_token) // size
                if skipped >= len(blocks):
                    continue
                pages = self._engine.groups.pages(group, blocks[skipped:])
                place = reader.num_chunks, first_token + skipped * size, len(pages) * size
                own = None if those is None else those[skipped:]
                self._node.send_chunk(reader.peer.worker_id, *id_, *place, pages, own, group=group)
                reader.num_chunks += 1
            self.num_blocks_sent += len(blocks)

    def _abort(self, id_: AttemptId, code: str, reason: str) -> None:
        reader = self._draining[id_] = self._open.pop(id_)
        self._stop_loading(id_, reader)
        log.warning("pull %s by %s is ended: %s", id_[0], reader.peer.worker_id, reason)
        self._node.abort(reader.peer.worker_id, Abort(request_id=id_[0], epoch=id_[1], code=code, reason=reason))

    def _on_peer_lost(self, lost: PeerDisconnected) -> None:
        """Let go what the peer read, unless the pull came over a newer link than the one that was lost."""
        for id_, reader in [*self._open.items(), *self._draining.items()]:
            is_with = (reader.peer.worker_id, reader.peer.incarnation) == (lost.peer_id, lost.incarnation)
            if is_with and not self._node.knows(lost.peer_id, *id_):
                self._end(id_)

    def _end(self, id_: AttemptId) -> None:
        if reader := self._open.pop(id_, None) or self._draining.pop(id_, None):
            self._stop_loading(id_, reader)
        self._exports.reader_ended(attempt_key(*id_))

    def _stop_loading(self, id_: AttemptId, reader: _PrefixReader) -> None:
        """Let no tier write to the blocks any more."""
        if reader.is_loading and self.tiers is not None:
            reader.is_loading = False
            self.tiers.cancel(attempt_key(*id_))


def _is_done(checksums: PageChecksums | None) -> bool:
    return checksums is None or checksums.is_done


def _digests(request: PrefixRequest) -> list[bytes]:
    data = request.digests
    return [data[start : start + DIGEST_NBYTES] for start in range(0, len(data), DIGEST_NBYTES)]
