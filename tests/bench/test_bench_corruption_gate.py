"""The faults of the corruption gate: they damage what they say, and the verifier refuses it."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving import kv_faults
from bench.serving.conversations import KnownConversation, Turn
from bench.serving.corruption_gate import Table
from contracts.errors import Corrupt, LayoutMismatch
from kv_transfer.chunks.block_record import verify
from tests.kv_transfer.tiers.block_samples import LAYOUT, key_of, record_of

ARENA_MIB = 8
HOLDER = f"""
import sys
from kv_transfer.chunks.block_record import verify
from contracts.errors import Corrupt
from kv_transfer.tiers.host_memory import HostMemoryTier
from tests.kv_transfer.tiers.block_samples import LAYOUT, RECORD_NBYTES, buffers, key_of, record_of, worth_of

tier = HostMemoryTier({ARENA_MIB} << 20, RECORD_NBYTES)
kept = [tier.store(key_of(number), record_of(number), worth_of(number)) for number in range(6)]
print(all(kept), flush=True)
sys.stdin.readline()
bad = 0
for number in range(6):
    into = buffers(1)
    [nbytes] = tier.load([key_of(number)], into)
    try:
        verify(into[0][:nbytes], key_of(number), LAYOUT)
    except Corrupt:
        bad += 1
print(bad, flush=True)
"""


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("name", ["a bit turned", "torn"])
def test_a_damaged_record_is_refused(name: str) -> None:
    for seed in range(50):
        damaged = kv_faults.DAMAGES[name](bytes(record_of(1)), random.Random(seed))
        with pytest.raises(Corrupt):
            verify(memoryview(damaged), key_of(1), LAYOUT)


def test_a_whole_record_of_another_layout_is_refused_by_its_field() -> None:
    fields = set()
    for seed in range(20):
        damaged = kv_faults.of_another_layout(bytes(record_of(1)), random.Random(seed))
        with pytest.raises(LayoutMismatch) as error:
            verify(memoryview(damaged), key_of(1), LAYOUT)
        fields.add(error.value.field)
    assert fields == {"block_size", "groups[0].dtype"}


def test_a_record_that_was_damaged_before_is_damaged_again() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        damaged = kv_faults.torn(bytes(record_of(1)), rng) or b"\0"
        again = kv_faults.of_another_layout(damaged, rng)
        assert again != damaged and len(again) == len(damaged)


def test_a_bit_turns_in_the_memory_of_another_process(holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None and holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    assert kv_faults.turn_bit_of(holder.pid, random.Random(0), (ARENA_MIB - 1) << 20)
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "6\n"  # each of the records


def test_records_on_disk_are_damaged_in_their_place(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.kv" for number in range(2)]
    for number, file in enumerate(files):
        file.write_bytes(record_of(number))
    before = [file.read_bytes() for file in files]
    assert kv_faults.exchange_on_disk(tmp_path, random.Random(0))
    assert len({file.read_bytes() for file in files}) == 1
    assert kv_faults.damage_disk(tmp_path, random.Random(0), kv_faults.torn)
    assert {len(file.read_bytes()) for file in files} != {len(record) for record in before}


def test_conversations_go_on_until_each_has_ended_and_all_faults_were_made() -> None:
    conversations = [KnownConversation([Turn([1], [2]), Turn([1, 2], [3])]) for _ in range(3)]
    table = Table(conversations, random.Random(0))
    taken = []
    for turn in range(7):
        conversation = table.take()
        assert conversation is not None
        taken.append((id(conversation), conversation.num_done))
        table.give_back(conversation)
        table.is_struck = turn == 6  # in the second round, for the faults were not made before
    assert len(set(taken[:6])) == 6 and table.num_rounds == 1
    assert table.take() is None


def test_a_conversation_is_held_by_one_client_at_a_time() -> None:
    table = Table([KnownConversation([Turn([1], [2])])], random.Random(0))
    conversation = table.take()
    assert conversation is not None and table.take() is None
    table.is_struck = True
    table.give_back(conversation)
    assert table.take() is None
