"""What a role owes to its pool, in as few lines as will do: pages are held from Offer or Grant until the node says that
nothing touches them any more.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from contracts.errors import OutOfBlocks
from contracts.handoff import Abort, Commit, Grant, Offer, Refuse, Wait
from contracts.ids import BlockId, Epoch, RequestId, WorkerId
from contracts.layout import KVLayout
from contracts.request import WorkerRef
from engine.cache.block_pool import BlockPool
from kv_transfer.events import ChunkLanded, Drained, LinkStats, MessageReceived, PeerDisconnected, TransferEvent
from tests.kv_transfer.kv_pair import Peer, fin

LAYOUT = KVLayout.uniform(model="fault", num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32")
NUM_BLOCKS = 16
CHUNK_BLOCKS = 4
CHUNK_TOKENS = CHUNK_BLOCKS * LAYOUT.block_size
CHUNK_NBYTES = CHUNK_BLOCKS * LAYOUT.block_nbytes
MESSAGE_NBYTES = CHUNK_NBYTES // 4

Key = tuple[RequestId, Epoch]


def key_of(request_id: str, epoch: int = 1) -> Key:
    return RequestId(request_id), Epoch(epoch)


class Owner(Peer):
    """A node and the account of its blocks, as prefill or as decode. Chunks are of `CHUNK_BLOCKS` blocks."""

    def __init__(self, name: str, layout: KVLayout = LAYOUT, **settings: Any) -> None:
        super().__init__(name, NUM_BLOCKS, layout, slot_nbytes=MESSAGE_NBYTES, **settings)
        self.account = BlockPool(NUM_BLOCKS, layout.block_size, prefix_cache=False)
        self.held: dict[Key, tuple[WorkerId, list[BlockId]]] = {}

    def poll(self) -> list[TransferEvent]:
        events = super().poll()
        for event in events:
            self._settle(event)
        return events

    def is_clean(self) -> bool:
        """Every block accounted for, and none held."""
        self.poll()
        self.account.check()
        return not self.held and self.account.num_held == 0

    def digest_of(self, request_id: str, epoch: int = 1) -> str:
        """Return the digest of the bytes of the pages held for this attempt, in token order."""
        return self.digest_at(self.held[key_of(request_id, epoch)][1])

    def digest_at(self, pages: Sequence[BlockId]) -> str:
        """Not the bytes: on CI pytest takes minutes to print where pages differ."""
        return hashlib.blake2b(self.pool[:, list(pages)].tobytes()).hexdigest()

    def landed(self) -> list[int]:
        """Indices of chunks that nobody has waited for yet."""
        self.seen += self.poll()
        return [event.header.index for event in self.seen if isinstance(event, ChunkLanded)]

    def stats(self) -> list[LinkStats]:
        return self.node.stats()

    def abort(self, request_id: str, epoch: int = 1) -> None:
        """The pages go when Drained comes."""
        key = key_of(request_id, epoch)
        self.node.abort(self.held[key][0], Abort(*key, "cancelled", "a test says so"))

    # as prefill

    def offer(self, peer: WorkerRef, request_id: str, num_chunks: int = 2, epoch: int = 1) -> None:
        key = key_of(request_id, epoch)
        self.held[key] = peer.worker_id, self.account.allocate(num_chunks * CHUNK_BLOCKS)
        self.node.offer(peer, Offer(*key, num_chunks * CHUNK_TOKENS, self.layout.layout_id))

    def send(self, request_id: str, index: int, epoch: int = 1) -> None:
        """Nothing if the attempt is over."""
        key = key_of(request_id, epoch)
        if key in self.held:
            peer_id, blocks = self.held[key]
            pages = blocks[index * CHUNK_BLOCKS : (index + 1) * CHUNK_BLOCKS]
            place = (index, index * CHUNK_TOKENS, CHUNK_TOKENS)
            self.node.send_chunk(peer_id, *key, *place, pages, self.checksums(pages))

    def finish(self, request_id: str, num_chunks: int = 2, epoch: int = 1) -> None:
        self.node.finish(self.held[key_of(request_id, epoch)][0], fin(request_id, num_chunks, epoch))

    # as decode

    def grant(self, request_id: str, epoch: int = 1) -> bool:
        """Answer the offer of this attempt, seen already or to come: Grant, or Wait if there are no blocks."""
        return self.grant_to(self.offered(request_id, epoch))

    def offered(self, request_id: str, epoch: int = 1) -> MessageReceived:
        key = key_of(request_id, epoch)

        def fits(event: MessageReceived) -> bool:
            return isinstance(event.message, Offer) and (event.message.request_id, event.message.epoch) == key

        return self.wait(MessageReceived, fits)

    def grant_to(self, event: MessageReceived) -> bool:
        offer = event.message
        assert isinstance(offer, Offer)
        key = offer.request_id, offer.epoch
        try:
            blocks = self.account.allocate(self.layout.num_blocks(offer.num_tokens))
        except OutOfBlocks as error:
            self.node.wait(event.peer_id, Wait(*key, str(error)))
            return False
        self.held[key] = event.peer_id, blocks
        self.node.grant(event.peer_id, Grant(*key, [blocks], 0))
        return True

    def commit(self, request_id: str, num_chunks: int = 2, epoch: int = 1) -> None:
        key = key_of(request_id, epoch)
        self.node.commit(self.held[key][0], Commit(*key, num_chunks, num_chunks * CHUNK_NBYTES))
        self._release(key)

    def refuse(self, event: MessageReceived) -> None:
        assert isinstance(event.message, Offer)
        key = event.message.request_id, event.message.epoch
        self.node.refuse(event.peer_id, Refuse(*key, "overloaded", "a test says so"))

    def _settle(self, event: TransferEvent) -> None:
        match event:
            case MessageReceived(message=Commit(request_id, epoch) | Refuse(request_id, epoch)) | Drained(
                request_id, epoch
            ):
                self._release((request_id, epoch))
            case PeerDisconnected(peer_id=peer_id, fenced=True):
                for key in [key for key, (holder, _) in self.held.items() if holder == peer_id]:
                    self._release(key)

    def _release(self, key: Key) -> None:
        if key in self.held:
            self.account.release(self.held.pop(key)[1])
