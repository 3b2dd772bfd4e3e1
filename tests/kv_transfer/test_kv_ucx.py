"""UCX passes the same tests as every transport, in processes of their own: a crash in C ends only those."""

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FETCHED = {"UCX_RNDV_SCHEME": "auto", "UCX_RNDV_THRESH": "1024"}
DEVICES = {"KV_TEST_POOL": "device"}
# The pool of a device imports UCX before the registry has told it so.
LOGS = {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_FILE": "stderr"}


def _run(*args: str, **env: str) -> subprocess.CompletedProcess:
    """Without pytest's variables: processes at once that they ask for are not meant for what a test starts."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=ours | LOGS | env, capture_output=True, text=True, timeout=280
    )


@pytest.mark.timeout(300)
def test_the_suites_pass_over_ucx() -> None:
    _pass("channels", "node", "groups", "bound_offers", "death", "faults")


@pytest.mark.timeout(300)
def test_the_suites_pass_where_ucx_fetches_the_messages_as_over_rdma() -> None:
    _pass("channels", "node", **FETCHED)


@pytest.mark.timeout(300)
def test_the_suites_pass_with_the_pages_of_devices() -> None:
    """Packed and unpacked by the device's operations, in whose memory messages begin and end."""
    _pass("node", "groups", **DEVICES)


def test_the_suite_passes_where_a_device_fetches_the_messages() -> None:
    _pass("node", **DEVICES, **FETCHED)


@pytest.mark.timeout(300)
def test_devices_may_die_and_groups_of_them() -> None:
    _pass("death", **DEVICES, KV_TEST_PREFILL_TP="2", KV_TEST_DECODE_TP="1")


SIZES = [(prefill, decode) for prefill in "124" for decode in "124"]


@pytest.mark.parametrize(("sizes", "num_copies"), [(SIZES, "1"), ([("1", "2"), ("4", "4")], "2")])
def test_damage_on_the_way_between_devices_is_found_and_the_way_is_told(
    sizes: list[tuple[str, str]], num_copies: str
) -> None:
    copies = {"KV_TEST_PREFILL_COPIES": num_copies, "KV_TEST_DECODE_COPIES": num_copies}
    result = _run("-m", "tests.kv_transfer.kv_device_ucx", *chain(*sizes), **DEVICES, **copies)
    lines = result.stdout.splitlines()
    assert len(lines) == 5 * len(sizes), result.stdout + result.stderr
    for found, landed, others, *ways in zip(*(lines[first::5] for first in range(5)), strict=True):
        assert (found, landed, others) == ("checksum differs", "landed", "kept"), result.stdout + result.stderr
        assert all("; " in way and way.endswith("GB/s") for way in ways)


def test_bf16_pages_arrive_as_decodes_own_kernel_writes_them_in_e4m3() -> None:
    result = _run("-m", "tests.kv_transfer.kv_device_narrow", *"11122122", **DEVICES)
    found = ["damaged: checksum differs", "nbytes True True", "pages True", "others True"]
    refused = "refused: groups[0].dtype groups[0].dtype"
    assert result.stdout.splitlines() == [*found * 4, refused], result.stdout + result.stderr


def test_a_link_that_ucx_cannot_serve_takes_the_next_transport_and_gives_staging_back() -> None:
    """Whole; no memory at prefill, at decode; what is tried out does not arrive; through the host's memory."""
    result = _run("-m", "tests.kv_transfer.kv_device_short", **DEVICES)
    assert result.stdout.splitlines() == ["ucx 0 0", *["shm 0 0"] * 4], result.stdout + result.stderr
    reasons = ["no memory for staging", "nothing came", "which shm does twice as fast"]
    assert all("transport ucx can't be used: " in result.stderr and reason in result.stderr for reason in reasons)


def test_a_receiver_naps_while_pages_are_due_and_unpacks_one_message_beside_the_next() -> None:
    result = _run("-m", "tests.kv_transfer.kv_device_slow", **DEVICES)
    found = ["in naps", "3 beside each other, in order", "kept until it is written", "until it is woken up"]
    found += ["fenced behind it"]
    assert result.stdout.splitlines() == found, result.stdout + result.stderr


def _pass(*suites: str, **env: str) -> None:
    files = [f"tests/kv_transfer/test_kv_{suite}.py" for suite in suites]
    result = _run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", "ucx", KV_TEST_TRANSPORTS="ucx", **env)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert " passed" in result.stdout


REPORT = """
from tests.kv_transfer.kv_pair import Peer, offer_and_grant
one, two = Peer("one", transport="ucx"), Peer("two", transport="ucx")
offer_and_grant(one, two, "r", 4, [1])
print(one.node.stats()[0].detail)
one.node.close(), two.node.close()
"""


def test_ucx_names_the_lanes_it_uses() -> None:
    result = _run("-c", REPORT)
    assert result.stdout.startswith("UCX 1.") and "tcp/" in result.stdout, result.stdout + result.stderr


IDLE = """
import time
from kv_transfer.transports.ucx import UcxWorker
from tests.kv_transfer.kv_pair import Peer
from tests.waiting import until
sleeps, sleep = [], UcxWorker.sleep
def counted(engine, deadline):
    sleeps.append(engine)
    sleep(engine, deadline)
UcxWorker.sleep = counted
pairs = [(Peer(f"p{number}", transport="ucx"), Peer(f"d{number}", transport="ucx")) for number in range(8)]
for prefill, decode in pairs:
    prefill.node.meet([decode.ref])
until(lambda: [link.state for pair in pairs for peer in pair for link in peer.node.stats()] == ["up"] * 16)
time.sleep(0.3)
before = len(sleeps)
time.sleep(0.3)
print(len(sleeps) - before)
for prefill, decode in pairs:
    prefill.node.close(), decode.node.close()
"""


def test_a_link_that_nobody_has_used_sleeps() -> None:
    """Half of them spun until their first message, as long as their two ends had not found each other."""
    result = _run("-c", IDLE)
    assert result.returncode == 0 and int(result.stdout) < 100, result.stdout + result.stderr


def test_what_the_operator_sets_wins() -> None:
    result = _run("-c", REPORT, UCX_TLS="self,tcp", UCX_NET_DEVICES="lo", UCX_TCP_TX_SEG_SIZE="64k")
    assert "tcp/lo" in result.stdout, result.stdout + result.stderr


SPY = """
import threading
import numpy as np
from kv_transfer.transports import ucx_messages
from tests.kv_transfer.test_kv_channels import RING, SESSION, Ends, Transports
kinds, arrived = [], ucx_messages.Receiving._on_arrival
def spy(self, *args):
    kinds.append("fetched" if args[-1][0] & ucx_messages._IS_RENDEZVOUS else "given")
    return arrived(self, *args)
ucx_messages.Receiving._on_arrival = spy
transport = Transports().find("ucx")
opening = transport.open(SESSION, RING, None)
inn, answer = transport.accept(SESSION, RING, opening.params, None)
ends = Ends(opening.finish(answer), inn)
parts = [np.full(n, n % 251, np.uint8) for n in (100, 5000, 1 << 20, 60)]
sender = threading.Thread(target=ends.send_all, args=(parts,))
sender.start()
assert [data.tolist() for _, data in (ends.receive() for _ in parts)] == [part.tolist() for part in parts]
sender.join()
ends.out.close(), ends.inn.close()
print(*kinds)
"""


def test_small_and_large_messages_keep_their_order_where_only_the_large_are_fetched() -> None:
    result = _run("-c", SPY, **FETCHED)
    assert result.stdout.split() == ["given", "fetched", "fetched", "given"], result.stdout + result.stderr
    result = _run("-c", SPY)
    assert result.stdout.split() == ["given"] * 4, result.stdout + result.stderr


TOO_LONG = """
import threading
from contracts.errors import PeerLost
from kv_transfer.transports.base import Ring
from kv_transfer.transports.registry import Transports
transport = Transports().find("ucx")
opening = transport.open(bytes(16), Ring(2, 1 << 20, 1.0), None)
inn, answer = transport.accept(bytes(16), Ring(2, 1 << 16, 1.0), opening.params, None)
out = opening.finish(answer)
def send():
    try:
        out.send(out.acquire(), 1 << 20)
        out.flush()
    except PeerLost:
        pass
sender = threading.Thread(target=send)
sender.start()
try:
    inn.receive(print)
except PeerLost as error:
    print("lost:", error)
inn.close()
sender.join()
out.close()
"""


SHORT = """
from concurrent.futures import ThreadPoolExecutor
from kv_transfer.transports.base import Ring
from kv_transfer.transports.registry import Transports
transport, ring = Transports().find("ucx"), Ring(2, 1 << 20, 30.0)
opening = transport.open(bytes(16), ring, None)
inn, answer = transport.accept(bytes(16), ring, opening.params, None)
out, lengths = opening.finish(answer), []
def send():
    for nbytes in (1 << 20, 70_000, 5):
        out.send(out.acquire(), nbytes)
    out.flush()
with ThreadPoolExecutor() as pool:
    sending = pool.submit(send)
    while len(lengths) < 3:
        inn.receive(lambda slot: lengths.append(len(slot.payload)))
    sending.result()
inn.close(), out.close()
print(*lengths)
"""


@pytest.mark.parametrize("how", [{}, FETCHED], ids=["given", "fetched"])
def test_a_message_shorter_than_a_slot_is_as_long_as_it_came(how: dict[str, str]) -> None:
    """UCX fills a part of a buffer without a word; what is behind it is an older message's."""
    result = _run("-c", SHORT, **how)
    assert result.stdout.split() == ["1048576", "70000", "5"], result.stdout + result.stderr


@pytest.mark.parametrize("how", [{}, FETCHED], ids=["given", "fetched"])
def test_a_message_longer_than_a_slot_ends_the_channel(how: dict[str, str]) -> None:
    result = _run("-c", TOO_LONG, **how)
    assert result.returncode == 0 and result.stdout.startswith("lost: "), result.stdout + result.stderr


OPEN_PORTS = """
from psutil import CONN_LISTEN, Process
from tests.kv_transfer.kv_pair import Peer, offer_and_grant
prefill, decode = Peer("prefill", transport="ucx"), Peer("decode", transport="ucx")
offer_and_grant(prefill, decode, "r", 4, [1])
print(*(end.laddr.ip for end in Process().net_connections() if end.status == CONN_LISTEN))
prefill.node.close()
decode.node.close()
"""


def test_two_ends_on_the_loopback_interface_listen_on_no_other() -> None:
    """UCX asks nobody who they are, and what a stranger sent to its port ended the worker."""
    result = _run("-c", OPEN_PORTS)
    ports = result.stdout.split()
    assert len(ports) == 4 and set(ports) == {"127.0.0.1"}, result.stdout + result.stderr


def test_no_other_module_needs_ucx() -> None:
    code = "import sys, kv_transfer.node; assert not {'ucxx', 'torch'} & set(sys.modules), 'loaded too early'"
    assert _run("-c", code).returncode == 0
