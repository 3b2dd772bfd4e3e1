"""Random bytes at the port, in a session, and random aborts under load: an end with a word, never a crash or a hang."""

import errno
import random
import socket
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts import codec
from contracts.handoff import Abort
from contracts.ids import Epoch, RequestId
from kv_transfer.connection.control_connection import ControlConnection
from kv_transfer.events import ChunkLanded, Drained, PeerDisconnected
from tests.kv_transfer.kv_pair import Peer, offer_and_grant, pages_equal, send

pytestmark = pytest.mark.slow

Make = Callable[..., Peer]
LIVE = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
MAX_FRAME_NBYTES = 1 << 10


def _framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(codec.HEADER_NBYTES, "little") + payload


# Bytes as they come, whole frames of noise, and a frame that is cut.
NOISE = st.one_of(
    st.binary(min_size=1, max_size=200),
    st.binary(min_size=1, max_size=200).map(_framed),
    st.binary(min_size=2, max_size=200).map(lambda payload: _framed(payload)[:-1]),
)


def _say_and_hang_up(peer: Peer, noise: bytes) -> None:
    host, _, port = peer.node.address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as sock:
        sock.settimeout(60)
        try:
            sock.sendall(noise)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
        except OSError as error:  # closed with our bytes unread: an end too
            assert error.errno in (errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE)


def test_noise_at_the_port_ends_that_connection_only(make_peer: Make) -> None:
    decode, honest = make_peer("decode"), make_peer("honest")

    @LIVE
    @given(NOISE)
    def try_noise(noise: bytes) -> None:
        _say_and_hang_up(decode, noise)
        assert not decode.node.poll()

    try_noise()
    offer_and_grant(honest, decode, "fine", 4, [1])
    send(honest, decode, "fine", 0, 0, 4, [2])
    decode.wait(ChunkLanded)


def _serve_bytes(data: bytes) -> tuple[str, list[object]]:
    """What a control connection makes of `data` and the end of the stream after it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    control = ControlConnection(ours, heartbeat_s=5, silence_s=10, max_frame_nbytes=MAX_FRAME_NBYTES)
    messages: list[object] = []
    with theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        return control.run(messages.append), messages


@LIVE
@given(st.lists(NOISE, max_size=4), st.integers(0, 3))
def test_noise_on_a_control_connection_ends_it_and_makes_no_message(noise: list[bytes], num_good: int) -> None:
    abort = Abort(RequestId("r"), Epoch(1), "cancelled", "a test says so")
    why, messages = _serve_bytes(codec.frame(abort) * num_good + b"".join(noise))
    assert messages in [[abort] * count for count in range(num_good + 1)]
    assert "protocol" in why or "closed the control connection" in why


@pytest.mark.parametrize("data", [_framed(b"\xc1"), (MAX_FRAME_NBYTES + 1).to_bytes(4, "little"), _framed(b"\x80")])
def test_what_is_no_message_is_named_so(data: bytes) -> None:
    why, messages = _serve_bytes(data)
    assert "does not keep to the protocol" in why and not messages


def test_good_messages_are_heard_before_the_bad_one_that_came_with_them() -> None:
    good = [Abort(RequestId(name), Epoch(1), "cancelled", "a test says so") for name in "ab"]
    too_long = (MAX_FRAME_NBYTES + 1).to_bytes(codec.HEADER_NBYTES, "little")
    why, messages = _serve_bytes(b"".join(map(codec.frame, good)) + too_long)
    assert messages == good and f"a frame of {MAX_FRAME_NBYTES + 1} bytes" in why


def test_of_a_link_that_has_failed_nothing_more_is_heard() -> None:
    """Not even what came in the same read: acted on, it would tell of pages that are drained while some are written."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    control = ControlConnection(ours, heartbeat_s=5, silence_s=10, max_frame_nbytes=MAX_FRAME_NBYTES)
    heard: list[object] = []

    def fails(message: object) -> None:
        heard.append(message)
        control.stop("the device is gone")

    aborts = [Abort(RequestId(name), Epoch(1), "cancelled", "a test says so") for name in "ab"]
    with theirs:
        theirs.sendall(b"".join(map(codec.frame, aborts)))
        assert control.run(fails) == "the device is gone"
    assert heard == aborts[:1]


@pytest.mark.parametrize("liar", ["prefill", "decode"])
@pytest.mark.parametrize(
    "noise", [_framed(b"\xc1\xff"), b"\xff" * 64, _framed(b"hello")], ids=["frame", "long", "text"]
)
def test_noise_in_a_session_fences_both_ends(make_peer: Make, liar: str, noise: bytes) -> None:
    prefill, decode = make_peer("prefill"), make_peer("decode-1")
    offer_and_grant(prefill, decode, "r", 64, list(range(16)))
    from_one, to_one = (prefill, decode) if liar == "prefill" else (decode, prefill)
    (link,) = from_one.node._table.all()
    assert link._sock is not None
    link._sock.sendall(noise)
    lost = to_one.wait(PeerDisconnected)
    assert lost.fenced and "does not keep to the protocol" in lost.error
    assert from_one.wait(PeerDisconnected).fenced
    before = decode.pool.copy()
    send(prefill, decode, "r", 0, 0, 64, list(range(16, 32)))
    offer_and_grant(prefill, decode, "next", 4, [60])
    send(prefill, decode, "next", 0, 0, 4, [5])
    assert decode.wait(ChunkLanded).header.request_id == "next"
    assert (decode.pool[:, :60] == before[:, :60]).all()


NUM_ATTEMPTS, NUM_CHUNKS, BLOCKS_PER_CHUNK = 14, 4, 4
NUM_BLOCKS = NUM_ATTEMPTS * NUM_CHUNKS * BLOCKS_PER_CHUNK


class Storm:
    """Attempts side by side, each on blocks of its own, some ended by either side at any moment."""

    def __init__(self, prefill: Peer, decode: Peer, seed: int) -> None:
        self.prefill, self.decode, self.dice = prefill, decode, random.Random(seed)
        order = [int(block) for block in np.random.default_rng(seed).permutation(NUM_BLOCKS)]
        self.dst = {f"r{n}": order[n::NUM_ATTEMPTS] for n in range(NUM_ATTEMPTS)}
        self.src = {name: [NUM_BLOCKS - 1 - block for block in blocks] for name, blocks in self.dst.items()}
        self.aborted: set[str] = set()
        self.landed: Counter[str] = Counter()
        self.at_drain: dict[str, np.ndarray] = {}

    def run(self) -> None:
        tokens_per_chunk = BLOCKS_PER_CHUNK * self.prefill.layout.block_size
        for name, blocks in self.dst.items():
            offer_and_grant(self.prefill, self.decode, name, NUM_CHUNKS * tokens_per_chunk, blocks)
        steps = [(name, index) for name in self.dst for index in range(NUM_CHUNKS)]
        self.dice.shuffle(steps)
        for name, index in steps:
            blocks = self.src[name][index * BLOCKS_PER_CHUNK :][:BLOCKS_PER_CHUNK]
            send(self.prefill, self.decode, name, index, index * tokens_per_chunk, tokens_per_chunk, blocks)
            if self.dice.random() < 0.12:
                self._abort(self.dice.choice(list(self.dst)))

    def settle(self) -> None:
        """Read what decode has seen, in order, until each attempt has its end."""
        while len(self.at_drain) + sum(self._is_whole(name) for name in self.dst) < NUM_ATTEMPTS:
            event = self.decode.wait(ChunkLanded | Drained)  # type: ignore[arg-type]
            if isinstance(event, ChunkLanded):
                assert event.header.request_id not in self.at_drain, "landed after it was drained"
                self.landed[event.header.request_id] += 1
            else:
                assert event.request_id in self.aborted and event.request_id not in self.at_drain
                self.at_drain[event.request_id] = self.decode.pool[:, self.dst[event.request_id]].copy()

    def _is_whole(self, name: str) -> bool:
        return name not in self.aborted and self.landed[name] == NUM_CHUNKS

    def _abort(self, name: str) -> None:
        if name not in self.aborted:
            self.aborted.add(name)
            one, other = self.dice.sample([self.prefill, self.decode], 2)
            one.node.abort(other.name, Abort(RequestId(name), Epoch(1), "cancelled", "a test says so"))


@pytest.mark.parametrize("seed", range(4))
def test_each_attempt_in_a_storm_of_aborts_lands_or_drains_once(make_peer: Make, transport: str, seed: int) -> None:
    options = {"num_blocks": NUM_BLOCKS, "slot_nbytes": 1024, "num_slots": 2, "transport": transport}
    prefill, decode = make_peer("prefill", **options), make_peer("decode-1", **options)
    storm = Storm(prefill, decode, seed)
    storm.run()
    storm.settle()
    assert set(storm.at_drain) == storm.aborted != set()
    assert {prefill.wait(Drained).request_id for _ in storm.aborted} == storm.aborted
    for name in storm.dst:
        if name in storm.aborted:
            assert (decode.pool[:, storm.dst[name]] == storm.at_drain[name]).all()
        else:
            assert pages_equal(prefill, storm.src[name], decode, storm.dst[name])
    offer_and_grant(prefill, decode, "last", 4, storm.dst[min(storm.aborted)][:1])
    assert not any(isinstance(event, Drained | ChunkLanded) for peer in (prefill, decode) for event in peer.seen)
