"""The giving side of a pull.

A worker asks for blocks that the prefix cache here may hold, and gets those that it does.
"""

import logging
from dataclasses import dataclass

from contracts.handoff import Abort, Commit, Grant, Offer, PrefixRequest, Refuse
from contracts.ids import BlockId, WorkerId
from contracts.request import WorkerRef
from engine.engine import Engine
from kv_transfer.events import Drained, MessageReceived, PeerDisconnected, TransferEvent
from kv_transfer.node import TransferNode
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


class PrefixServer:
    """The pulls of other workers that are under way.

    It holds what they read until they end, one way or another.
    """

    def __init__(self, engine: Engine, node: TransferNode) -> None:
        self._engine, self._node, self._exports = engine, node, engine.prefix_exports
        self._open: dict[AttemptId, _PrefixReader] = {}
        self._draining: dict[AttemptId, _PrefixReader] = {}
        self.num_blocks_sent = 0

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

    @property
    def is_idle(self) -> bool:
        return not self._open and not self._draining

    def _on_request(self, peer_id: WorkerId, request: PrefixRequest, now: float) -> None:
        id_, size = (request.request_id, request.epoch), self._engine.layout.block_size
        if reason := self._refusal(peer_id, request):
            self._refuse(peer_id, id_, reason)
            return
        blocks = self._exports.hold(attempt_key(*id_), _digests(request))
        if not blocks:
            self._end(id_)
            self._refuse(peer_id, id_, "none of these blocks is here")
            return
        self._open[id_] = _PrefixReader(request.reader, request.first_token, blocks, now + READER_TIMEOUT_S)
        num_tokens = request.first_token + len(blocks) * size
        self._node.offer(request.reader, Offer(id_[0], id_[1], num_tokens, self._engine.layout.layout_id))

    def _refuse(self, peer_id: WorkerId, id_: AttemptId, reason: str) -> None:
        request_id, epoch = id_
        self._node.refuse(peer_id, Refuse(request_id=request_id, epoch=epoch, code="unavailable", reason=reason))

    def _refusal(self, peer_id: WorkerId, request: PrefixRequest) -> str:
        """Return why a request is not served, whatever is cached; empty if it may be."""
        if request.shared_id != self._engine.layout.shared_id:
            return "shared_id differs: the KV of this worker is of another model, format or block size"
        if request.reader.worker_id != peer_id:
            return f"reader is {request.reader.worker_id}; the request came from {peer_id}"
        if not self._node.ensure_link(request.reader):
            return "there is no link to the reader yet"
        if request.first_token % self._engine.layout.block_size or len(request.digests) % DIGEST_NBYTES:
            return "first_token or digests are not those of whole blocks"
        if (request.request_id, request.epoch) in self._open or (request.request_id, request.epoch) in self._draining:
            return "request_id is that of a pull under way"
        return f"{MAX_READERS} pulls are under way" if len(self._open) >= MAX_READERS else ""

    def _on_grant(self, id_: AttemptId, grant: Grant) -> None:
        """Send what the peer has pages for; it has the tokens before in its own cache."""
        reader, size = self._open[id_], self._engine.layout.block_size
        num_have = (grant.skip_tokens - reader.first_token) // size
        if not 0 <= num_have < len(reader.blocks) or grant.skip_tokens % size:
            self._abort(id_, "corrupt", f"skip_tokens is {grant.skip_tokens}; {reader.first_token} was asked for")
            return
        for index, first in enumerate(range(num_have, len(reader.blocks), CHUNK_BLOCKS)):
            blocks = reader.blocks[first : first + CHUNK_BLOCKS]
            place = reader.first_token + first * size, len(blocks) * size
            self._node.send_chunk(reader.peer.worker_id, *id_, index, *place, blocks)
            self.num_blocks_sent += len(blocks)

    def _abort(self, id_: AttemptId, code: str, reason: str) -> None:
        reader = self._draining[id_] = self._open.pop(id_)
        log.warning("pull %s by %s is ended: %s", id_[0], reader.peer.worker_id, reason)
        self._node.abort(reader.peer.worker_id, Abort(request_id=id_[0], epoch=id_[1], code=code, reason=reason))

    def _on_peer_lost(self, lost: PeerDisconnected) -> None:
        """Let go what the peer read, unless the pull came over a newer link than the one that was lost."""
        for id_, reader in [*self._open.items(), *self._draining.items()]:
            is_with = (reader.peer.worker_id, reader.peer.incarnation) == (lost.peer_id, lost.incarnation)
            if is_with and not self._node.knows(lost.peer_id, *id_):
                self._end(id_)

    def _end(self, id_: AttemptId) -> None:
        self._open.pop(id_, None)
        self._draining.pop(id_, None)
        self._exports.reader_ended(attempt_key(*id_))


def _digests(request: PrefixRequest) -> list[bytes]:
    data = request.digests
    return [data[start : start + DIGEST_NBYTES] for start in range(0, len(data), DIGEST_NBYTES)]
