"""The requests that an engine knows, by id."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from contracts.ids import BlockId, RequestId
from engine.page_lease import PageLease
from engine.sequence import Sequence, Status


@dataclass(frozen=True)
class IncomingWriter:
    """A transfer that may still write to `blocks`, those of its `sequence` that had no KV at first."""

    sequence: Sequence
    blocks: list[BlockId]
    lease: PageLease


@dataclass(frozen=True)
class OutgoingReader:
    """A peer that may still read `blocks`, and of groups of short life what `lease` holds."""

    blocks: list[BlockId]
    lease: PageLease


class SequenceTable:
    """The sequences of the requests that are here.

    `incoming_writers[request]`: who may still write to its blocks; it holds them beside the request, and longer if the
    request goes first. `outgoing_readers[request]`: likewise, the blocks that a peer may still read while
    the request moves there.
    """

    def __init__(self) -> None:
        self._sequences: dict[RequestId, Sequence] = {}
        self.incoming_writers: dict[RequestId, IncomingWriter] = {}
        self.outgoing_readers: dict[RequestId, OutgoingReader] = {}

    def __getitem__(self, request_id: RequestId) -> Sequence:
        return self._sequences[request_id]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.request_id] = sequence

    def get(self, request_id: RequestId) -> Sequence | None:
        return self._sequences.get(request_id)

    def pop(self, request_id: RequestId) -> Sequence | None:
        return self._sequences.pop(request_id, None)

    def knows(self, request_id: RequestId) -> bool:
        """Return whether a request of this id would be mistaken for another."""
        holders = self._sequences, self.incoming_writers, self.outgoing_readers
        return any(request_id in known for known in holders)

    def is_present(self, sequence: Sequence) -> bool:
        """Return whether it has neither ended nor been released since its batch was launched."""
        return self._sequences.get(sequence.request_id) is sequence

    def count(self, status: Status) -> int:
        return sum(sequence.status is status for sequence in self._sequences.values())

    def holds(self) -> Counter[int]:
        """Return how often each block is held by sequences, writers and readers."""
        holds = Counter(block for sequence in self for block in sequence.blocks)
        holds.update(block for writer in self.incoming_writers.values() for block in writer.blocks)
        holds.update(block for reader in self.outgoing_readers.values() for block in reader.blocks)
        return holds

    def leases(self) -> set[PageLease]:
        """Return the leases of sequences, writers and readers."""
        holders = *self, *self.incoming_writers.values(), *self.outgoing_readers.values()
        return {holder.lease for holder in holders if holder.lease is not None}
