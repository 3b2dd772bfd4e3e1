"""A node in a network namespace whose interface is taken away and comes back, for the tests of that. Not a test.

    python -m tests.kv_transfer.kv_moved prefill|decode HOST [ADDRESS]

Says `ADDRESS` first. A prefill node offers once for each line on standard input, and says how that went: `granted` or
`lost`, and behind it, as decode does for every line, why UCX in it needs a new process, if it does.
"""

import sys
import threading

from contracts.handoff import Grant, Offer
from contracts.ids import BlockId, Epoch, Incarnation, RequestId, WorkerId
from contracts.request import WorkerRef
from kv_transfer.events import MessageReceived, PeerDisconnected
from kv_transfer.node import TransferNode
from kv_transfer.settings import TransferSettings
from tests.kv_transfer.kv_worker import LAYOUT, SECRET, make_pool


class MovedNode:
    """`answer` grants what is offered, in a thread of its own."""

    def __init__(self, name: str, host: str) -> None:
        self.woken = threading.Event()
        settings = TransferSettings(
            secret=SECRET, transport="ucx", host=host, heartbeat_misses=6,
            # One that is gone ends it at once; to one that is new the first tries are lost, the next ever later.
            connect_timeout_s=5.0,
        )  # fmt: skip
        self.node = TransferNode(settings, WorkerId(name), Incarnation("1"), LAYOUT, make_pool(), self.woken.set)
        self.node.start()

    def events(self):
        while True:
            self.woken.wait()
            self.woken.clear()
            yield from self.node.poll()

    def answer(self) -> None:
        for page, event in enumerate(self.events()):
            match event:
                case MessageReceived(peer_id, Offer(request_id, epoch)):
                    self.node.grant(peer_id, Grant(request_id, epoch, [[BlockId(page)]], 0))

    def ask(self, address: str, number: int) -> str:
        peer = WorkerRef(WorkerId("decode"), Incarnation("1"), "", address)
        self.node.offer(peer, Offer(RequestId(f"r{number}"), Epoch(1), LAYOUT.block_size, LAYOUT.layout_id))
        for event in self.events():
            match event:
                case MessageReceived(_, Grant()):
                    return "granted"
                case PeerDisconnected(error=error):
                    return f"lost {error}"
        raise AssertionError


def main(role: str, host: str, address: str = "") -> None:
    moved = MovedNode(role, host)
    print(moved.node.address, flush=True)
    if role == "decode":
        threading.Thread(target=moved.answer, daemon=True).start()
    for number, _ in enumerate(sys.stdin):
        words = moved.ask(address, number) if role == "prefill" else ""
        print(f"{words} | {getattr(moved.node, 'broken', '')}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
