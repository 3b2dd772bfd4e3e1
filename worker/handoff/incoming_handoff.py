"""One handoff on its way in: what of it has come, and whether that fits together."""

from dataclasses import dataclass, field

from contracts.errors import Corrupt
from contracts.handoff import ChunkHeader, Fin, Offer
from contracts.request import WorkerRef
from engine.fair_turns import Turn
from engine.messages import Reservation
from kv_transfer.events import PeerDisconnected
from worker.core.chunk_order import ChunkOrder
from worker.core.role_handler import Attempt, AttemptId


@dataclass
class IncomingHandoff:
    """The KV of one sequence on its way from `peer`: `num_tokens` tokens, then the token to go on after.

    In a migration these are the tokens of the job, and more come: Fin says how many in all.
    `chunks`: what has arrived and is checked, the last of it at `landed_s` (monotonic). `has_waited`: the peer was told
    that there are no pages yet. `is_contradictory`: the peer's messages did not fit each other.
    """

    attempt: Attempt
    peer: WorkerRef
    num_tokens: int
    offer: Offer | None = None
    reservation: Reservation | None = None
    turn: Turn = (0.0, 0)
    has_waited: bool = False
    chunks: ChunkOrder = field(default_factory=ChunkOrder)
    landed_s: float = 0.0
    fin: Fin | None = None
    is_contradictory: bool = False

    @property
    def id(self) -> AttemptId:
        return self.attempt.id

    @property
    def is_offered(self) -> bool:
        return self.offer is not None

    @property
    def is_migration(self) -> bool:
        return self.attempt.job.is_migration

    @property
    def is_complete(self) -> bool:
        chunks = self.chunks
        return self.fin is not None and (chunks.num_chunks, chunks.next_token) == (self.fin.num_chunks, self.num_tokens)

    def fits(self, offer: Offer) -> bool:
        """Return whether the offer is of the tokens that are expected; in a migration, of as many at least."""
        if self.is_migration:
            return offer.is_bound and offer.num_tokens >= self.num_tokens
        return not offer.is_bound and offer.num_tokens == self.num_tokens

    def on_fin(self, fin: Fin) -> None:
        """Learn how much comes. Raises Corrupt if it is not what was offered."""
        self.fin = fin
        if not self.is_migration:
            return
        assert self.offer is not None
        if fin.num_tokens is None or not self.num_tokens <= fin.num_tokens <= self.offer.num_tokens:
            offered = f"{self.num_tokens} to {self.offer.num_tokens} were offered"
            raise Corrupt(f"the KV of {fin.num_tokens} tokens came, {offered}")
        self.num_tokens = fin.num_tokens

    def was_lost_with(self, lost: PeerDisconnected) -> bool:
        """Return whether the handoff ended with the connection."""
        return self.is_offered and (self.peer.worker_id, self.peer.incarnation) == (lost.peer_id, lost.incarnation)

    def on_chunk(self, header: ChunkHeader, landed_s: float) -> None:
        """Count a chunk that has arrived. Raises Corrupt if it is not the next."""
        self.chunks.take(header)
        self.landed_s = landed_s

    def contradiction(self, block_size: int) -> str | None:
        """Return why the chunks that Fin claims can never be those that arrive, or None."""
        if self.fin is None:
            return None
        return self.chunks.contradiction(self.fin.num_chunks, self.num_tokens, block_size)
