"""A worker process for the tests of death: a prefill that sends without end, one that says that a chunk is coming and
computes none, or a decode that grants what is offered.

    python -m tests.kv_transfer.kv_worker prefill|promising|decode TRANSPORT [ADDRESS INCARNATION]

Speaks on standard output, a line at a time: first `address incarnation`, then `moving` once chunks flow.
"""

import os
import sys
import threading

import msgspec
import numpy as np

from contracts.handoff import Commit, Grant, Offer
from contracts.ids import BlockId, Epoch, Incarnation, RequestId, WorkerId
from contracts.layout import KVLayout
from contracts.request import WorkerRef
from kv_transfer.events import ChunkLanded, MessageReceived
from kv_transfer.node import TransferNode
from kv_transfer.settings import TransferSettings
from tests.kv_transfer.kv_pair import PATIENT
from tests.kv_transfer.kv_pool import PoolOwner

LAYOUT = KVLayout.uniform(model="big", num_layers=8, num_kv_heads=4, head_dim=64, block_size=16, dtype="float32")
NUM_BLOCKS, NUM_GUARDED, SECRET = 64, 32, b"a secret of tests"
GRANTED = [BlockId(page) for page in range(NUM_GUARDED, NUM_BLOCKS)]
NUM_TOKENS = len(GRANTED) * LAYOUT.block_size


def make_pool() -> np.ndarray:
    """Every byte is the number of its block."""
    shape = (LAYOUT.only_group.num_planes, NUM_BLOCKS, LAYOUT.only_group.page_nbytes(1))
    return np.ascontiguousarray(np.broadcast_to(np.arange(NUM_BLOCKS, dtype=np.uint8)[None, :, None], shape))


class Worker(PoolOwner):
    """KV_TEST_PREFILL_TP and KV_TEST_DECODE_TP say in how many shards its pool lies, if it is a device's."""

    def __init__(self, name: str, transport: str) -> None:
        side = "DECODE" if name.startswith("decode") else "PREFILL"
        layout = msgspec.structs.replace(LAYOUT, tp_size=int(os.environ.get(f"KV_TEST_{side}_TP", "1")))
        pages, self.woken = make_pool(), threading.Event()
        super().__init__(name, [pages], layout, transport)
        self.incarnation = Incarnation(f"{name}-1")
        # Half of the silence of a worker: whoever stops a peer waits so long for its loss.
        settings = TransferSettings(
            secret=SECRET, transport=transport, slot_nbytes=1 << 18, heartbeat_misses=6, **PATIENT
        )
        self.node = TransferNode(settings, WorkerId(name), self.incarnation, layout, self.pools, self.woken.set)
        self.node.start()

    def events(self):
        while True:
            self.woken.wait()
            self.woken.clear()
            yield from self.node.poll()


def offer(worker: Worker, peer: WorkerRef, number: int) -> None:
    worker.node.offer(peer, Offer(RequestId(f"r{number}"), Epoch(1), NUM_TOKENS, LAYOUT.layout_id))


def promise(worker: Worker, peer_id: WorkerId, grant: Grant) -> None:
    early_planes = LAYOUT.only_group.num_planes - 2
    worker.node.chunk_scheduled(peer_id, grant.request_id, grant.epoch, 0, NUM_TOKENS, GRANTED, early_planes)


def send_all(worker: Worker, peer_id: WorkerId, grant: Grant) -> None:
    promise(worker, peer_id, grant)
    worker.node.chunks_launched(is_all=False)
    worker.node.chunks_launched(is_all=True)
    sums = worker.device.checksums(GRANTED).wait() if worker.device is not None else None
    worker.node.send_chunk(peer_id, grant.request_id, grant.epoch, 0, 0, NUM_TOKENS, GRANTED, sums)


def serve_prefill(worker: Worker, peer: WorkerRef) -> None:
    """One request after the other, each a chunk of 4 MiB, until the end."""
    offer(worker, peer, 0)
    for number, event in enumerate(_messages(worker, Grant | Commit)):
        if isinstance(event, Grant):
            send_all(worker, peer.worker_id, event)
        else:
            offer(worker, peer, number)


def serve_promises(worker: Worker, peer: WorkerRef) -> None:
    """The early planes of one chunk, and no more."""
    offer(worker, peer, 0)
    for grant in _messages(worker, Grant):
        assert isinstance(grant, Grant)
        promise(worker, peer.worker_id, grant)
        worker.node.chunks_launched(is_all=False)
        _say("moving")


def serve_decode(worker: Worker) -> None:
    moving = False
    for event in worker.events():
        moving = moving or _say_moving(event)
        answer_as_decode(worker, event)


def answer_as_decode(worker: Worker, event: object) -> None:
    match event:
        case MessageReceived(peer_id, Offer(request_id, epoch)):
            worker.node.grant(peer_id, Grant(request_id, epoch, [GRANTED], 0))
        case ChunkLanded(peer_id, header, _):
            worker.node.commit(peer_id, Commit(header.request_id, header.epoch, 1, header.nbytes))


def _messages(worker: Worker, kinds: type | object):
    said = False
    for event in worker.events():
        if isinstance(event, MessageReceived) and isinstance(event.message, kinds):  # type: ignore[arg-type]
            said = said or (isinstance(event.message, Commit) and _say("moving"))
            yield event.message


def _say_moving(event: object) -> bool:
    return isinstance(event, ChunkLanded) and _say("moving")


def _say(words: str) -> bool:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()
    return True


def main(role: str, transport: str, address: str = "", incarnation: str = "") -> None:
    worker = Worker(role, transport)
    _say(f"{worker.node.address} {worker.incarnation}")
    if role == "decode":
        serve_decode(worker)
    else:
        serve = serve_prefill if role == "prefill" else serve_promises
        serve(worker, WorkerRef(WorkerId("decode"), Incarnation(incarnation), "", address))


if __name__ == "__main__":
    main(*sys.argv[1:])
