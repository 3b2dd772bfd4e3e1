"""The faults of a handoff, one after the other, between two processes and over each transport. Afterwards no page is
held at either end, no byte outside a grant has changed, and nothing is left on the host.
"""

import os
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from contracts.handoff import Abort, AbortAck, Commit, Fin, Grant, Offer, Refuse, Wait
from contracts.ids import Incarnation
from contracts.request import WorkerRef
from kv_transfer.events import ChunkBad, ChunkLanded, Drained, PeerDisconnected
from tests.kv_transfer.conftest import STAGED, TRANSPORTS, nothing_left
from tests.kv_transfer.kv_liar import CRIMES
from tests.kv_transfer.kv_owner import CHUNK_BLOCKS, CHUNK_TOKENS, NUM_BLOCKS, Owner, key_of
from tests.kv_transfer.kv_remote import Remote

pytestmark = pytest.mark.slow

LOST_S = 40.0  # the stopped peer is given up after a second and a half, on an idle host
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
BRIEF = {"heartbeat_misses": 6}
"""Half of the silence of a worker, for both ends where one is stopped: nothing else is waited for."""
LYING = [name for name in STAGED if name != "loopback" and os.environ.get("KV_TEST_POOL") != "device"]
"""A liar packs pages into bytes of the host, which a device's pool does not."""


@pytest.fixture(params=[name for name in TRANSPORTS if name != "loopback"])
def transport(request: pytest.FixtureRequest) -> str:
    """Loopback reaches no other process."""
    return request.param


@pytest.fixture
def local(leftovers: None, transport: str) -> Iterator[Callable[..., Owner]]:
    owners: list[Owner] = []

    def make(name: str, **settings: object) -> Owner:
        owners.append(Owner(name, **{"transport": transport, **settings}))
        return owners[-1]

    yield make
    for owner in owners:
        owner.close()


@pytest.fixture
def remote(leftovers: None, transport: str) -> Iterator[Callable[..., Remote]]:
    remotes: list[Remote] = []

    def make(name: str, **settings: object) -> Remote:
        remotes.append(Remote(name, **{"transport": transport, **settings}))
        return remotes[-1]

    yield make
    for process in remotes:
        process.end()


Anyone = Owner | Remote


def _hand_off(prefill: Anyone, decode: Anyone, request_id: str, epoch: int = 1) -> None:
    """A whole handoff as it should be, with the proof that the bytes came."""
    prefill.offer(decode.ref, request_id, epoch=epoch)
    assert decode.grant(request_id, epoch)
    prefill.message(Grant, request_id)
    for index in range(2):
        prefill.send(request_id, index, epoch)
    prefill.finish(request_id, epoch=epoch)
    for _ in range(2):
        decode.wait(ChunkLanded)
    decode.message(Fin, request_id)
    assert decode.digest_of(request_id, epoch) == prefill.digest_of(request_id, epoch)
    decode.commit(request_id, epoch=epoch)
    prefill.message(Commit, request_id)


def _begin(prefill: Anyone, decode: Anyone, request_id: str = "r") -> None:
    """Granted, and the first of two chunks has landed."""
    prefill.offer(decode.ref, request_id)
    assert decode.grant(request_id)
    prefill.message(Grant, request_id)
    prefill.send(request_id, 0)
    decode.wait(ChunkLanded)


@pytest.mark.parametrize("signum", SIGNALS)
def test_prefill_goes_between_two_chunks(local: Callable, remote: Callable, signum: int) -> None:
    decode, prefill = local("decode", **BRIEF), remote("prefill", **BRIEF)
    _begin(prefill, decode)
    prefill.send_signal(signum)
    lost = decode.wait(PeerDisconnected, timeout_s=LOST_S)
    assert (lost.peer_id, lost.fenced) == ("prefill", True)
    assert decode.is_clean() and not decode.stats()


def test_a_stopped_prefill_that_wakes_writes_to_no_page_that_was_used_again(local: Callable, remote: Callable) -> None:
    """Closed before reused: the pages go to another request while the first sender still believes in its grant."""
    decode, prefill, other = local("decode", **BRIEF), remote("prefill", **BRIEF), local("other", **BRIEF)
    _begin(prefill, decode)
    prefill.send_signal(signal.SIGSTOP)
    decode.wait(PeerDisconnected, timeout_s=LOST_S)
    other.offer(decode.ref, "next", num_chunks=4)
    assert decode.grant("next") and len(decode.held[key_of("next")][1]) == NUM_BLOCKS
    other.message(Grant, "next")
    before = decode.pool.copy()
    prefill.send_signal(signal.SIGCONT)
    prefill.send("r", 1)
    prefill.wait(PeerDisconnected)
    assert np.array_equal(decode.pool, before)
    for index in range(4):
        other.send("next", index)
        decode.wait(ChunkLanded)
    assert decode.digest_of("next") == other.digest_of("next")
    decode.commit("next", num_chunks=4)
    other.message(Commit, "next")
    assert prefill.is_clean() and decode.is_clean() and other.is_clean()


@pytest.mark.parametrize(
    ("stop", "num_others"),
    [(lambda decode: decode.send_signal(signal.SIGSTOP), 1000), (Remote.stop_behind_a_look, 0)],
    ids=["filled", "behind a look"],
)
def test_a_stopped_decode_that_wakes_takes_nothing_from_pages_that_were_used_again(
    local: Callable, remote: Callable, stop: Callable[[Remote], None], num_others: int
) -> None:
    """What it was told of is in its socket all the same. Without checksums, which would find it out. Others that are
    offered meanwhile fill that socket, so that what prefill says last is not in it.
    """
    settings = {"checksum": False, **BRIEF}
    prefill, decode = local("prefill", **settings), remote("decode", **settings)
    prefill.offer(decode.ref, "r")
    assert decode.grant("r")
    (pages,) = prefill.message(Grant, "r").pages
    stop(decode)
    _, blocks = prefill.held[key_of("r")]
    sent = [prefill.digest_at(blocks[first : first + CHUNK_BLOCKS]) for first in (0, CHUNK_BLOCKS)]
    for index in range(2):
        prefill.send("r", index)
    prefill.finish("r")
    for number in range(num_others):
        other = key_of(f"{number}".rjust(1000))
        prefill.node.offer(decode.ref, Offer(*other, CHUNK_TOKENS, prefill.layout.layout_id))
    prefill.wait(PeerDisconnected, timeout_s=LOST_S)
    assert prefill.is_clean()
    prefill.pool[:, blocks] ^= 0xFF
    decode.send_signal(signal.SIGCONT)
    decode.wait(PeerDisconnected)
    into = [pages[first : first + CHUNK_BLOCKS] for first in (0, CHUNK_BLOCKS)]
    assert [index for index in decode.landed() if decode.digest_at(into[index]) != sent[index]] == []
    assert decode.is_clean()


@pytest.mark.parametrize("signum", SIGNALS)
def test_decode_goes_before_its_grant(local: Callable, remote: Callable, signum: int) -> None:
    prefill, decode = local("prefill", **BRIEF), remote("decode", **BRIEF)
    prefill.offer(decode.ref, "r")
    decode.offered("r")
    decode.send_signal(signum)
    lost = prefill.wait(PeerDisconnected, timeout_s=LOST_S)
    assert (lost.peer_id, lost.incarnation, lost.fenced) == ("decode", decode.ref.incarnation, True)
    assert prefill.is_clean() and not prefill.stats()


@pytest.mark.parametrize("signum", SIGNALS)
def test_decode_goes_between_two_chunks(local: Callable, remote: Callable, signum: int) -> None:
    prefill, decode = local("prefill", **BRIEF), remote("decode", **BRIEF)
    before = prefill.pool.copy()
    _begin(prefill, decode)
    decode.send_signal(signum)
    prefill.send("r", 1)
    assert prefill.wait(PeerDisconnected, timeout_s=LOST_S).fenced
    assert prefill.is_clean() and np.array_equal(prefill.pool, before)


def test_a_grant_that_crosses_the_loss_of_its_peer_is_given_back(local: Callable, remote: Callable) -> None:
    decode, prefill = local("decode"), remote("prefill")
    prefill.offer(decode.ref, "r")
    offered = decode.offered("r")
    prefill.end()
    while decode.stats():  # the link is gone; PeerDisconnected lies unread
        decode.woken.wait(0.02)
    assert decode.grant_to(offered) and decode.held
    decode.wait(PeerDisconnected, timeout_s=LOST_S)
    assert decode.is_clean()


def test_a_worker_that_comes_back_under_its_name_is_another(local: Callable, remote: Callable) -> None:
    decode, first = local("decode"), remote("prefill")
    _begin(first, decode)
    first.end()
    again = remote("prefill")
    _hand_off(again, decode, "r", epoch=2)
    assert decode.wait(PeerDisconnected, timeout_s=LOST_S).incarnation == first.ref.incarnation
    assert decode.is_clean() and again.is_clean()


def test_a_former_incarnation_is_not_offered_anything(local: Callable, remote: Callable) -> None:
    prefill, decode = local("prefill"), remote("decode")
    before = WorkerRef(decode.ref.worker_id, Incarnation("before"), "", decode.ref.transfer)
    prefill.offer(before, "r")
    lost = prefill.wait(PeerDisconnected)
    assert lost.incarnation == "before" and "now served by decode" in lost.error
    _hand_off(prefill, decode, "s")
    assert prefill.is_clean() and decode.is_clean()


@pytest.mark.parametrize("num_sent", [0, 1, 2])
def test_a_reservation_expires_at_decode(local: Callable, remote: Callable, num_sent: int) -> None:
    """Decode gives up after some chunks. Its pages are free when both ends have drained, and then serve another."""
    decode, prefill = local("decode"), remote("prefill")
    prefill.offer(decode.ref, "r")
    assert decode.grant("r")
    prefill.message(Grant, "r")
    for index in range(num_sent):
        prefill.send("r", index)
    decode.abort("r")
    assert prefill.message(Abort, "r").code == "cancelled"
    prefill.wait(Drained)
    decode.wait(Drained)
    decode.message(AbortAck, "r")
    prefill.send("r", 1)
    assert prefill.is_clean() and decode.is_clean()
    decode.seen.clear()  # chunks that landed before the end
    _hand_off(prefill, decode, "next")
    assert prefill.is_clean() and decode.is_clean()


def test_prefill_gives_up_between_two_chunks(local: Callable, remote: Callable) -> None:
    decode, prefill = local("decode"), remote("prefill")
    _begin(prefill, decode)
    prefill.send("r", 1)
    prefill.abort("r")
    prefill.wait(Drained)
    decode.message(Abort, "r")
    decode.wait(Drained)
    prefill.message(AbortAck, "r")
    assert prefill.is_clean() and decode.is_clean()


def test_credits_are_exhausted_and_come_back(local: Callable, remote: Callable) -> None:
    decode, prefill, other = local("decode"), remote("prefill"), local("other")
    prefill.offer(decode.ref, "all", num_chunks=4)
    assert decode.grant("all")
    other.offer(decode.ref, "waits")
    offered = decode.offered("waits")
    assert not decode.grant_to(offered)
    assert "0 of 16 available" in other.message(Wait, "waits").reason
    prefill.message(Grant, "all")
    prefill.abort("all")
    decode.wait(Drained)
    assert decode.grant_to(offered)
    other.message(Grant, "waits")
    other.abort("waits")
    decode.wait(Drained)
    other.wait(Drained)
    prefill.wait(Drained)
    assert prefill.is_clean() and decode.is_clean() and other.is_clean()


def test_a_refusal_gives_prefill_its_pages_back(local: Callable, remote: Callable) -> None:
    decode, prefill = local("decode"), remote("prefill")
    prefill.offer(decode.ref, "r")
    decode.refuse(decode.offered("r"))
    assert prefill.message(Refuse, "r").code == "overloaded"
    assert prefill.is_clean() and decode.is_clean()


def test_closing_in_mid_transfer_gives_the_peer_its_pages_back(local: Callable, remote: Callable) -> None:
    decode, prefill = local("decode"), remote("prefill")
    _begin(prefill, decode)
    decode.close()
    after = decode.pool.copy()
    prefill.send("r", 1)
    assert prefill.wait(PeerDisconnected).fenced and prefill.is_clean()
    assert np.array_equal(decode.pool, after)


REFUSALS = [
    ({"secret": b"another"}, "auth_failed", "shared secret"),
    ({"transport": "another"}, "config", "transport: prefill wants "),
]


@pytest.mark.parametrize(("settings", "code", "words"), REFUSALS)
def test_a_stranger_gets_no_page(
    local: Callable, remote: Callable, transport: str, settings: dict, code: str, words: str
) -> None:
    if "transport" in settings:
        settings = {"transport": "shm" if transport == "tcp" else "tcp"}
    decode, stranger = local("decode"), remote("stranger", **settings)
    before = decode.pool.copy()
    stranger.offer(decode.ref, "r")
    lost = stranger.wait(PeerDisconnected)
    found = words in lost.error or lost.error.startswith("memory: ")  # which is looked at before the transports
    assert (lost.code, lost.fenced) == (code, True) and found
    assert stranger.is_clean() and decode.is_clean() and np.array_equal(decode.pool, before)


STALE = {"an old epoch", "a future epoch", "a request that nobody offered"}
WHY = {
    "one bit changed": "checksum",
    "messages swapped": "only 65536 of 262144 bytes came",
    "first message missing": "first bytes are missing",
    "said twice": "has arrived already",
    "another layout": "layout_id",
    "tokens beyond the offer": "not all in the 128 offered",
    "tokens before the first": "the grant starts at 0",
    "tokens from inside a block": "blocks are 16",
    "more bytes than the tokens have": "bytes for 64 tokens",
    "a message of half a page": "pages are 8192",
    "a message out of place": "only 196608 of 262144 bytes came",
}


@pytest.fixture(scope="module", params=LYING)
def liar(request: pytest.FixtureRequest) -> Iterator[tuple[Remote, Owner]]:
    """A prefill that lies, and its decode: one pair for all lies, so each also shows that the link lives on."""
    with nothing_left():
        decode, prefill = Owner("decode", transport=request.param), Remote("prefill", transport=request.param)
        yield prefill, decode
        decode.close()
        prefill.end()


@pytest.mark.parametrize("crime", [name for name in CRIMES if name != "noise for words"])
def test_a_lying_prefill_harms_nobody_and_may_try_again(liar: tuple[Remote, Owner], crime: str) -> None:
    prefill, decode = liar
    before, counts = decode.pool.copy(), decode.stats()
    prefill.offer(decode.ref, crime)
    assert decode.grant(crime)
    prefill.message(Grant, crime)
    prefill.lie_once(crime)
    prefill.send(crime, 0)
    if crime not in STALE:
        assert WHY[crime] in decode.wait(ChunkBad).reason
    if crime != "said twice":
        prefill.send(crime, 0)
    decode.wait(ChunkLanded)
    prefill.send(crime, 1)
    decode.wait(ChunkLanded)
    assert decode.digest_of(crime) == prefill.digest_of(crime)
    others = [block for block in range(NUM_BLOCKS) if block not in decode.held[key_of(crime)][1]]
    assert np.array_equal(decode.pool[:, others], before[:, others])
    num_stale, num_bad = (link.num_stale for link in counts), (link.num_bad for link in counts)
    (link,) = decode.stats()
    assert (link.num_stale > sum(num_stale), link.num_bad > sum(num_bad)) == (crime in STALE, crime not in STALE)
    decode.commit(crime)
    prefill.message(Commit, crime)
    decode.seen.clear()  # the other things that were bad about the same lie
    assert prefill.is_clean() and decode.is_clean()


@pytest.mark.parametrize("transport", LYING, indirect=True)
def test_noise_for_words_ends_the_link_at_both_ends(local: Callable, remote: Callable) -> None:
    decode, prefill = local("decode"), remote("prefill")
    _begin(prefill, decode)
    before = decode.pool.copy()
    prefill.lie_once("noise for words")
    prefill.send("r", 1)
    lost = decode.wait(PeerDisconnected)
    assert lost.fenced and ("unreadable" in lost.error or "message of" in lost.error)
    assert prefill.wait(PeerDisconnected).fenced
    assert np.array_equal(decode.pool, before)
    assert prefill.is_clean() and decode.is_clean()
