"""Strangers, liars and mismatches at the port: a clear error on both ends, and the port lives on."""

import socket
import time
from collections.abc import Callable

import msgspec
import pytest

from contracts import codec
from contracts.errors import ConfigError
from contracts.handoff import Offer
from contracts.ids import Epoch, Incarnation, RequestId, WorkerId
from contracts.layout import KVLayout
from kv_transfer.connection.handshake_frames import PROTOCOL, Attach, Hello, Proof, Rejected, Terms
from kv_transfer.connection.listener import MAX_HANDSHAKES
from kv_transfer.connection.transport_choice import candidates
from kv_transfer.events import ChunkLanded, PeerDisconnected
from tests.kv_transfer.kv_pair import DEADLINE_S, LAYOUT, Peer, offer_and_grant, send

Make = Callable[..., Peer]


def _lost_after_offer(prefill: Peer, decode: Peer) -> PeerDisconnected:
    offer = Offer(RequestId("r"), Epoch(1), 8, prefill.layout.layout_id)
    prefill.node.offer(decode.ref, offer)
    return prefill.wait(PeerDisconnected)


def _still_serves(make_peer: Make, decode: Peer) -> None:
    honest = make_peer("honest")
    offer_and_grant(honest, decode, "fine", 4, [1])
    send(honest, decode, "fine", 0, 0, 4, [2])
    decode.wait(ChunkLanded)


def test_a_wrong_secret_is_named_and_the_port_lives_on(make_peer: Make, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = make_peer("prefill", secret=b"another"), make_peer("decode")
    lost = _lost_after_offer(prefill, decode)
    assert (lost.code, lost.fenced) == ("auth_failed", True) and "shared secret" in lost.error
    assert "does not know the shared secret" in caplog.text
    assert not decode.node.poll()
    _still_serves(make_peer, decode)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (msgspec.structs.replace(LAYOUT, model="other"), "model"),
        (msgspec.structs.replace(LAYOUT, block_size=8), "block_size"),
        (LAYOUT.with_groups(layers=(0, 1, 2, 3)), "groups[0].layers"),
        (LAYOUT.with_groups(planes=("v", "k")), "groups[0].planes"),
        (LAYOUT.with_groups(dtype="bfloat16"), "groups[0].dtype"),
        (LAYOUT.with_groups(head_dim=4), "groups[0].head_dim"),
        (LAYOUT.with_groups(scales="page"), "groups[0].scales"),
    ],
)
def test_layouts_that_differ_are_refused_by_field_on_both_ends(
    make_peer: Make, other: KVLayout, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = make_peer("prefill", layout=other), make_peer("decode")
    lost = _lost_after_offer(prefill, decode)
    assert lost.code == "layout_mismatch" and f"'{field}'" in lost.error
    assert decode.wait(PeerDisconnected).code == "layout_mismatch"
    assert caplog.text.count(f"do not match in '{field}'") >= 2


def test_transports_that_cannot_meet_are_refused(make_peer: Make) -> None:
    prefill, decode = make_peer("prefill", transport="tcp"), make_peer("decode", transport="shm")
    lost = _lost_after_offer(prefill, decode)
    assert lost.code == "config" and "prefill wants 'tcp', decode wants 'shm'" in lost.error


def test_auto_takes_shared_memory_on_one_host(make_peer: Make) -> None:
    prefill, decode = make_peer("prefill", transport="auto"), make_peer("decode", transport="auto")
    offer_and_grant(prefill, decode, "r", 4, [1])
    assert {peer.node.stats()[0].transport for peer in (prefill, decode)} == {"shm"}


def _terms(transport: str = "auto", available: str = "tcp shm ucx", boot_id: str = "a") -> Terms:
    return Terms(LAYOUT, 64, transport, available.split(), boot_id, True)


@pytest.mark.parametrize(
    ("sender", "receiver", "names"),
    [
        (_terms(), _terms(), ["shm", "ucx", "tcp"]),
        (_terms(), _terms(boot_id="b"), ["ucx", "tcp"]),
        (_terms(), _terms(available="tcp"), ["tcp"]),
        (_terms("ucx"), _terms(), ["ucx"]),
        (_terms(), _terms("tcp"), ["tcp"]),
    ],
)
def test_candidates(sender: Terms, receiver: Terms, names: list[str]) -> None:
    assert candidates(sender, receiver) == names


def test_a_wish_that_one_end_lacks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'ucx' is not available on both ends"):
        candidates(_terms("ucx"), _terms(available="tcp"))


def _connect(decode: Peer) -> socket.socket:
    host, _, port = decode.node.address.rpartition(":")
    sock = socket.create_connection((host, int(port)), 5)
    sock.settimeout(60)
    return sock


def _is_closed(sock: socket.socket) -> bool:
    """The other end closed it, after perhaps a word of refusal."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        return True
    return True


HELLO = Hello(PROTOCOL, WorkerId("x"), Incarnation("y"), "prefill", b"n" * 32)
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    "long": (1 << 30).to_bytes(4, "little") + b"x",
    "not msgpack": b"\x05\0\0\0hello",
    "another version": codec.frame(msgspec.structs.replace(HELLO, protocol=99)),
    "another role": codec.frame(msgspec.structs.replace(HELLO, role="decode")),
    "out of order": codec.frame(Proof(b"")),
    "wrong proof": codec.frame(HELLO) + codec.frame(Proof(b"m" * 32)),
    "unknown data socket": codec.frame(Attach(b"s" * 16, b"m" * 32)),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_shown_out_and_the_port_lives_on(make_peer: Make, name: str) -> None:
    decode = make_peer("decode")
    with _connect(decode) as sock:
        sock.sendall(GARBAGE[name])
        assert _is_closed(sock)
    _still_serves(make_peer, decode)


def test_strangers_learn_nothing_but_a_name(make_peer: Make) -> None:
    decode = make_peer("decode")
    reader = codec.FrameReader()
    with _connect(decode) as sock:
        sock.sendall(codec.frame(HELLO) + codec.frame(Proof(b"m" * 32)))
        frames = []
        while data := sock.recv(4096):
            frames += reader.feed(data)
    assert [msgspec.msgpack.decode(frame)["type"] for frame in frames] == ["hello", "rejected"]
    assert LAYOUT.model.encode() not in b"".join(frames)


MANY_LINES = "x\n2026-01-01 core ERROR a line of its own \x1b[2J"
TOLD = {
    "name": codec.frame(msgspec.structs.replace(HELLO, worker_id=WorkerId(MANY_LINES))) + codec.frame(Proof(b"m" * 32)),
    "role": codec.frame(msgspec.structs.replace(HELLO, role=MANY_LINES)),
    "refusal": codec.frame(HELLO) + codec.frame(Rejected("config", MANY_LINES)),
}


@pytest.mark.parametrize("where", TOLD)
def test_a_stranger_writes_no_lines_into_the_log(make_peer: Make, caplog: pytest.LogCaptureFixture, where: str) -> None:
    decode = make_peer("decode")
    with _connect(decode) as sock:
        sock.sendall(TOLD[where])
        assert _is_closed(sock)
    (line,) = [record.getMessage() for record in caplog.records if "a line of its own" in record.getMessage()]
    assert line.isprintable()


def test_half_open_handshakes_end_by_themselves(make_peer: Make) -> None:
    decode = make_peer("decode", handshake_timeout_s=0.2)
    socks = [_connect(decode) for _ in range(5)]
    socks[0].sendall(codec.frame(HELLO))
    socks[1].sendall(b"\x10")
    assert all(_is_closed(sock) for sock in socks)
    for sock in socks:
        sock.close()
    _still_serves(make_peer, decode)


def test_more_peers_than_there_is_room_for(make_peer: Make) -> None:
    decode = make_peer("decode", max_peers=1)
    first, second = make_peer("prefill-1"), make_peer("prefill-22")
    offer_and_grant(first, decode, "r", 4, [1])
    assert "no room for another peer" in _lost_after_offer(second, decode).error
    send(first, decode, "r", 0, 0, 4, [2])
    decode.wait(ChunkLanded)


def test_closing_cuts_off_handshakes_under_way(make_peer: Make) -> None:
    decode = make_peer("decode", handshake_timeout_s=60)
    with _connect(decode) as sock:
        sock.sendall(b"\x10")
        time.sleep(0.05)
        decode.node.close()
        assert _is_closed(sock)


def test_a_port_that_is_taken_is_a_clear_error(make_peer: Make) -> None:
    port = int(make_peer("first").node.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{port}: .*choose another transfer_port"):
        make_peer("second", port=port)


def test_strangers_that_say_nothing_keep_no_peer_out(make_peer: Make) -> None:
    decode = make_peer("decode", handshake_timeout_s=10 * DEADLINE_S)
    host, port = decode.node.address.split(":")
    strangers = [socket.create_connection((host, int(port)), 5) for _ in range(MAX_HANDSHAKES)]
    _still_serves(make_peer, decode)
    for stranger in strangers:
        stranger.close()
