"""What the doctor finds of tiers: real folders, a real Redis, and what is not there."""

import argparse
from pathlib import Path

import pytest

from process.sockets import free_port
from tandem.commands.tier_checks import add_arguments, check_tiers
from tests.kv_transfer.tiers.redis_cluster import redis_node

TOKEN_NBYTES = 46_080
NAME_TOO_LONG = 256 * "a"
"""Even to look at it is an error, as with a mount whose server is gone."""


def found(*arguments: str) -> list[tuple[str, bool]]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return list(check_tiers(parser.parse_args(arguments), TOKEN_NBYTES))


def test_says_nothing_of_tiers_that_nobody_asks_for() -> None:
    assert found() == []


def test_says_how_many_tokens_memory_and_disk_hold(tmp_path: Path) -> None:
    memory, disk = found("--kv-host-gib", "0.01", "--kv-disk", str(tmp_path / "new"), "--kv-disk-gib", "0.01")
    assert memory[0].startswith("kv_host_gib: 0.01 GiB hold the KV of 233 tokens or more; ") and memory[1]
    assert disk[0].startswith(f"kv_disk: 0.01 GiB hold the KV of 233 tokens or more in {tmp_path}/new; ") and disk[1]
    assert not list(tmp_path.iterdir()), "it was made"


@pytest.mark.usefixtures("silent_paths")
def test_names_what_can_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments, words in [
        (("--kv-host-gib", "1e6"), "a worker does not start: lower it"),
        (("--kv-disk", "kv"), "it must be an absolute path"),
        (("--kv-disk", str(tmp_path / "file" / "kv")), "is no folder that can be written in"),
        (("--kv-disk", str(tmp_path), "--kv-disk-gib", "1e9"), "lower kv_disk_gib, or make room"),
        (("--kv-store", "s4://bucket"), "it must begin with redis://"),
        (("--kv-disk", f"/{NAME_TOO_LONG}"), "kv_disk can't be read: [Errno 36] File name too long"),
        (("--kv-store", f"file://{tmp_path}/absent"), "does not answer: "),
        (("--kv-store", f"file:///{NAME_TOO_LONG}"), "kv_store does not answer: [Errno 36] File name too long"),
        (("--kv-store", f"redis://127.0.0.1:{free_port()}"), "does not answer: ConnectionError"),
    ]:
        ((said, is_well),) = found(*arguments)
        assert words in said and not is_well


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lfu"])
def test_says_what_a_redis_is_and_whether_it_lets_old_blocks_go(tmp_path: Path, policy: str) -> None:
    with redis_node(tmp_path, "--maxmemory", "64mb", "--maxmemory-policy", policy) as node:
        ((said, is_well),) = found("--kv-store", f"redis://127.0.0.1:{node.port}")
    assert "Redis " in said and policy in said
    assert is_well == (policy != "noeviction") == ("set maxmemory" not in said)


def test_says_what_is_free_in_a_shared_folder(tmp_path: Path) -> None:
    ((said, is_well),) = found("--kv-store", f"file://{tmp_path}")
    assert is_well and str(tmp_path) in said and "GiB free" in said
