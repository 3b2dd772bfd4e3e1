"""Two nodes on one machine, and what a role does with them, small enough to read."""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from contracts.events import Token
from contracts.handoff import Fin, Grant, Offer
from contracts.ids import BlockId, Epoch, Incarnation, RequestId, WorkerId
from contracts.layout import KVLayout
from contracts.request import WorkerRef
from kv_transfer.events import MessageReceived, TransferEvent
from kv_transfer.node import TransferNode
from kv_transfer.settings import TransferSettings
from testing.loopback_transport import LoopbackTransport
from tests.kv_transfer.kv_pool import PoolOwner

SECRET = b"a secret of tests"
LAYOUT = KVLayout.uniform(model="tiny", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
DEADLINE_S = 60.0
PATIENT: dict[str, Any] = {"connect_timeout_s": DEADLINE_S, "handshake_timeout_s": DEADLINE_S}
"""Settings under which two ends wait for each other on a busy machine, too."""

Kind = TypeVar("Kind")


class Peer(PoolOwner):
    """A node with a pool of random bytes, or this `pool` of a device, and the events it has seen."""

    def __init__(
        self,
        name: str,
        num_blocks: int = 64,
        layout: KVLayout = LAYOUT,
        transports: Any = None,
        pool: Any = None,
        **settings: Any,
    ) -> None:
        self.name, self.layout = WorkerId(name), layout
        self.incarnation = Incarnation(secrets.token_hex(4))
        shapes = [(group.num_planes, num_blocks, group.page_nbytes(1)) for group in layout.groups]
        rng = np.random.default_rng(len(name))
        pages = [rng.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]
        super().__init__(name, pages, layout, settings.get("transport"), pool)
        self.woken = threading.Event()
        self.seen: list[TransferEvent] = []
        options = {"secret": SECRET, "transport": "tcp", **PATIENT, **settings}
        if options["transport"] == "loopback":
            options["transport"], transports = "tcp", {"tcp": LoopbackTransport()} | (transports or {})
        self.transport = options["transport"]
        self.node = TransferNode(
            TransferSettings(**options),
            self.name,
            self.incarnation,
            layout,
            self.pools,
            self.woken.set,
            transports,
        )
        self.node.start()

    def checksums(self, blocks: Sequence[BlockId], group: int = 0) -> np.ndarray | None:
        """Return the checksums as an engine has them made."""
        return self.devices[group].checksums(blocks).wait() if self.devices else None

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.name, self.incarnation, "", self.node.address)

    def poll(self) -> list[TransferEvent]:
        return self.node.poll()

    def wait(
        self, kind: type[Kind], where: Callable[[Any], bool] = lambda event: True, timeout_s: float = DEADLINE_S
    ) -> Kind:
        """The first event of this kind, seen already or to come; it is taken out."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.seen += self.poll()
            for event in self.seen:
                if isinstance(event, kind) and where(event):
                    self.seen.remove(event)
                    return event
            self.woken.clear()
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name}: no {kind.__name__}; saw {self.seen}; links {self.node.stats()}")
            self.woken.wait(0.02)

    def message(self, kind: type[Kind], request_id: str) -> Kind:
        def fits(event: MessageReceived) -> bool:
            return isinstance(event.message, kind) and event.message.request_id == request_id

        message: Any = self.wait(MessageReceived, fits).message
        return message


def offer_and_grant(
    prefill: Peer, decode: Peer, request_id: str, num_tokens: int, pages: list[int], epoch: int = 1, skip: int = 0
) -> None:
    key = RequestId(request_id), Epoch(epoch)
    prefill.node.offer(decode.ref, Offer(*key, num_tokens, prefill.layout.layout_id))
    decode.message(Offer, request_id)
    decode.node.grant(prefill.name, Grant(*key, [[BlockId(page) for page in pages]], skip))
    prefill.message(Grant, request_id)


def send(
    prefill: Peer,
    decode: Peer,
    request_id: str,
    index: int,
    first: int,
    num_tokens: int,
    pages: list[int],
    epoch: int = 1,
    loss: str = "",
) -> None:
    blocks = [BlockId(page) for page in pages]
    key, sums = (RequestId(request_id), Epoch(epoch)), prefill.checksums(blocks)
    prefill.node.send_chunk(decode.name, *key, index, first, num_tokens, blocks, sums, loss=loss)


def fin(request_id: str, num_chunks: int, epoch: int = 1) -> Fin:
    return Fin(RequestId(request_id), Epoch(epoch), num_chunks, Token(0, 7), 0)


def pages_equal(prefill: Peer, src: list[int], decode: Peer, dst: list[int]) -> bool:
    return bool((prefill.pool[:, src] == decode.pool[:, dst]).all())
