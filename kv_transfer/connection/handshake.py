"""The handshake of two workers: identities, the shared secret, the KV layout, then a data channel."""

import hmac
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from socket import socket
from typing import Any

from contracts.errors import AuthFailed, ConfigError, PeerLost, TandemError, TransferError
from contracts.ids import Incarnation, WorkerId
from contracts.request import WorkerRef
from kv_transfer.connection import layout_negotiation as conversion
from kv_transfer.connection.handshake_frames import (
    PROTOCOL,
    Attach,
    Declined,
    Hello,
    Open,
    Opened,
    Proof,
    Rejected,
    Settled,
    Terms,
)
from kv_transfer.connection.handshake_socket import HELLO_MAX_NBYTES, HandshakeSocket, prove
from kv_transfer.transports.base import ChannelOffer, DeviceChannel, DeviceInbound, Ring, Transport

log = logging.getLogger(__name__)

SESSION_NBYTES = 16
MAX_RING_NBYTES = 1 << 30


@dataclass(frozen=True)
class Identity:
    """The identity of this worker, and the secret that proves it."""

    worker_id: WorkerId
    incarnation: Incarnation
    secret: bytes

    def hello(self, role: str) -> Hello:
        return Hello(PROTOCOL, self.worker_id, self.incarnation, role, secrets.token_bytes(32))


def greet_listener(wire: HandshakeSocket, us: Identity, expected: WorkerRef) -> Hello:
    """Shake hands as the connecting end, and return the peer's Hello.

    Raises AuthFailed, PeerLost if another worker or incarnation answers, TransferError on another protocol.
    """
    wire.send(us.hello("prefill"))
    ours = wire.raw_sent
    hello = wire.receive(Hello, HELLO_MAX_NBYTES)
    theirs = wire.raw_received
    _check_hello(hello, "decode")
    # Before the proof: the worker that answers must not take this for the loss of a link with us.
    if (hello.worker_id, hello.incarnation) != (expected.worker_id, expected.incarnation):
        raise PeerLost(f"{expected.transfer} is now served by {hello.worker_id} ({hello.incarnation})")
    wire.send(Proof(prove(us.secret, b"tandem-kv connect", ours, theirs)))
    _check_mac(wire.receive(Proof).mac, prove(us.secret, b"tandem-kv listen", ours, theirs), hello.worker_id)
    return hello


def greet_dialer(wire: HandshakeSocket, us: Identity, hello: Hello) -> None:
    """Shake hands as the listening end, after the peer's `hello`. Raises as greet_listener."""
    theirs = wire.raw_received
    _check_hello(hello, "prefill")
    wire.send(us.hello("decode"))
    ours = wire.raw_sent
    mac = wire.receive(Proof, HELLO_MAX_NBYTES).mac
    _check_mac(mac, prove(us.secret, b"tandem-kv connect", theirs, ours), hello.worker_id)
    wire.send(Proof(prove(us.secret, b"tandem-kv listen", theirs, ours)))


def agree(wire: HandshakeSocket, ours: Terms, sends: bool) -> Terms:
    """Exchange and check the terms, and return the peer's. `sends`: this end is prefill.

    Both ends check the same things, so both can name what is wrong. Raises LayoutMismatch or ConfigError. Optional
    groups of layers may differ: see layout_negotiation.
    """
    wire.send(ours)
    theirs = wire.receive(Terms)
    if ours.memory != theirs.memory:
        raise ConfigError(
            f"memory: our KV cache is in {ours.memory} memory, the peer's in {theirs.memory}: "
            "run prefill and decode on the same kind of device"
        )
    if not conversion.is_possible(*((ours, theirs) if sends else (theirs, ours))):
        ours.layout.model_part.require_match(theirs.layout.model_part)
    return theirs


def propose(
    wire: HandshakeSocket,
    names: list[str],
    find: Callable[[str], Transport],
    ring: Ring,
    connect: Callable[[bytes], socket],
) -> tuple[str, Any]:
    """Choose a channel as the sender, and return its name with an Outbound or a SharedPool.

    Raises TransferError if no transport works, naming each one's reason.
    """
    reasons: list[str] = []
    ring = replace(ring, is_local=wire.is_local)
    for index, name in enumerate(names):
        session = secrets.token_bytes(SESSION_NBYTES)
        wire.deadline.renew()
        try:
            return name, _propose_one(wire, find(name), session, ring, partial(connect, session), names[index + 1 :])
        except PeerLost:
            raise
        except TransferError as error:
            log.warning("transport %s can't be used: %s", name, error)
            reasons.append(f"{name}: {error}")
    raise TransferError("no transport works; " + "; ".join(reasons))


def dispose(
    wire: HandshakeSocket,
    names: list[str],
    find: Callable[[str], Transport],
    limits: Ring,
    attached: Callable[[bytes], socket],
) -> tuple[str, Any]:
    """Choose a channel as the receiver: accept the first proposal that works at both ends.

    Returns its name with an Inbound or a MappedPool. `limits`: only its stall timeout is this end's to set. Raises
    TransferError if no proposal works.
    """
    limits = replace(limits, is_local=wire.is_local)
    for _ in names:
        request = wire.receive(Open)
        wire.deadline.renew()
        try:
            inbound, params = _accept(request, names, find, limits, attached)
        except PeerLost:
            raise
        except TransferError as error:
            log.warning("transport %s can't be used: %s", request.transport, error)
            wire.send(Declined(str(error)))
            continue
        try:
            wire.send(Opened(params))
            reason = _settle(wire, inbound)
        except TransferError:
            inbound.close()
            raise
        if reason is None:
            return request.transport, inbound
        inbound.close()
        log.warning("transport %s can't be used: %s", request.transport, reason)
    raise TransferError("no transport works at both ends: the log says why")


def reject(wire: HandshakeSocket, error: TandemError) -> None:
    """Send the peer the reason, if it still listens."""
    try:
        wire.send(Rejected(error.code, str(error)))
    except PeerLost:
        log.debug("the peer left before it got the refusal: %s", error)


def attach_frame(secret: bytes, session: bytes) -> Attach:
    """Return the frame that a data socket begins with."""
    return Attach(session, prove(secret, b"tandem-kv attach", session))


def check_attach(secret: bytes, attach: Attach) -> None:
    """Raise AuthFailed unless the frame proves the secret."""
    _check_mac(attach.mac, prove(secret, b"tandem-kv attach", attach.session), "the peer of a data socket")


def _check_hello(hello: Hello, role: str) -> None:
    if hello.protocol != PROTOCOL:
        raise TransferError(
            f"the peer speaks transfer protocol {hello.protocol}, this worker speaks {PROTOCOL}: run one version"
        )
    if hello.role != role:
        raise TransferError(f"the peer says it is '{hello.role}' on this connection; it should be '{role}'")


def _check_mac(mac: bytes, expected: bytes, who: str) -> None:
    if not hmac.compare_digest(mac, expected):
        raise AuthFailed(f"{who} does not know the shared secret: give all services the same one")


def _propose_one(
    wire: HandshakeSocket,
    transport: Transport,
    session: bytes,
    ring: Ring,
    connect: Callable[[], socket],
    others: list[str],
) -> Any:
    opening: ChannelOffer = transport.open(session, ring, connect)
    try:
        wire.send(Open(transport.name, session, ring.num_slots, ring.slot_nbytes, opening.params))
        answer = wire.receive_any()
        if not isinstance(answer, Opened):
            raise TransferError(getattr(answer, "reason", f"the peer answered {type(answer).__name__}"))
    except TransferError:
        opening.cancel()
        raise
    try:
        channel = opening.finish(answer.params)
        _require_worth(channel, others)
    except TransferError as error:
        wire.send(Declined(str(error)))
        raise
    try:
        wire.send(Settled())
    except PeerLost:
        channel.close()
        raise
    return channel


def _require_worth(channel: Any, others: list[str]) -> None:
    """Raise TransferError if the channel goes through the host's memory and shm is left to try.

    On two H200, through the host's memory, shm moved 512 MiB at 2.1 GB/s and UCX at 0.9.
    """
    if _is_detour(channel) and "shm" in others:
        channel.close()
        raise TransferError("it goes through the host's memory, which shm does twice as fast")


def _is_detour(channel: Any) -> bool:
    return isinstance(channel, DeviceChannel) and not channel.is_direct


def _settle(wire: HandshakeSocket, inbound: Any) -> str | None:
    """Try the channel out together with the sender. Returns why it can't be used, or None."""
    ours = _tried(wire, inbound)
    answer = wire.receive_any()
    if isinstance(answer, Settled):
        if ours is not None:
            raise TransferError(f"the channel works at the sender's end only: {ours}")
        return None
    theirs = getattr(answer, "reason", f"the peer answered {type(answer).__name__}")
    return f"{theirs}; here: {ours}" if ours else theirs


def _tried(wire: HandshakeSocket, inbound: Any) -> str | None:
    if isinstance(inbound, DeviceInbound):
        try:
            inbound.be_tried(lambda: wire.is_quiet)
        except TransferError as error:
            inbound.close()  # so that the sender sees it too
            return str(error)
    return None


def _accept(
    request: Open, names: list[str], find: Callable[[str], Transport], limits: Ring, attached: Callable[[bytes], socket]
) -> tuple[Any, bytes]:
    if request.transport not in names:
        raise TransferError(f"'{request.transport}' was not agreed")
    if not (
        request.num_slots > 0 and request.slot_nbytes > 0 and request.num_slots * request.slot_nbytes <= MAX_RING_NBYTES
    ):
        raise TransferError(f"staging of {request.num_slots} x {request.slot_nbytes} bytes is out of bounds")
    ring = replace(limits, num_slots=request.num_slots, slot_nbytes=request.slot_nbytes)
    return find(request.transport).accept(request.session, ring, request.params, lambda: attached(request.session))
