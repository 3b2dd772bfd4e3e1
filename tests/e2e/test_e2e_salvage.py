"""A handoff that breaks off in the middle: the next attempt moves only what had not arrived."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from bench.load.client import StreamResult, ask, body_of, session
from bench.system.local_system import System, get_json, running
from tests.e2e.sockets_of_processes import reset_tcp
from tests.engine.tiny_models import save_tiny
from tests.waiting import until

pytestmark = pytest.mark.slow

SOON_S = 60.0
NUM_TOKENS = 640  # a whole number of blocks
SHAPE = {
    "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 64,
    "num_hidden_layers": 8, "max_position_embeddings": 1024,
}  # fmt: skip
"""A model whose prompts take seconds in chunks of 64 tokens."""
NBYTES_PER_TOKEN = 2 * 8 * 3 * 64 * 4  # keys and values of 8 layers with 3 heads of 64 float32
QUICK = {"TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "64", "TANDEM_MAX_BATCHED_TOKENS": "64"}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "llama", **SHAPE)
    flags = ("--model", str(folder), "--dtype", "float32", "--prefill", "2", "--decode", "1")
    with running(*flags, **QUICK, TANDEM_TRANSFER="tcp") as system:
        yield system


def decode_core(system: System) -> dict:
    (decode,) = (worker for worker in system.workers() if worker["role"] == "decode")
    return get_json(f"{decode['url']}/health")["core"]


def incoming(system: System, counter: str) -> dict[str, float]:
    """Return this counter of each link that brings KV to decode: it may send what it kept to prefill, too."""
    return {link["peer"]: link["counters"][counter] for link in decode_core(system)["links"] if not link["outgoing"]}


def num_arrived(system: System) -> float:
    return sum(incoming(system, "chunks").values())


def nbytes_arrived(system: System) -> dict[str, float]:
    return incoming(system, "nbytes")


def busy_prefill(system: System) -> dict:
    workers = [worker for worker in system.workers() if worker["role"] == "prefill"]
    return next(w for w in workers if get_json(f"{w['url']}/health")["core"]["gauges"]["requests"])


def reset_link(worker: dict) -> None:
    assert reset_tcp(worker["core_pid"]) > 0


def kill(worker: dict) -> None:
    os.kill(worker["core_pid"], signal.SIGKILL)


@pytest.mark.parametrize("disturb", [reset_link, kill])
def test_the_next_attempt_moves_only_the_rest(system: System, disturb: Callable[[dict], None]) -> None:
    """And the answer is that of a prompt that was computed and moved whole: greedy, in float32, in the same chunks."""
    prompt = [(number * 37 + len(disturb.__name__)) % 300 + 10 for number in range(NUM_TOKENS)]
    saved, before = decode_core(system)["counters"]["kv_saved_tokens"], num_arrived(system)
    nbytes_before = nbytes_arrived(system)

    async def answer(salt: str) -> StreamResult:
        body = json.loads(body_of(system.model(), prompt, 12)) | {"cache_salt": salt}
        async with session() as http:
            return await asyncio.wait_for(ask(http, system.url, json.dumps(body).encode(), 12), 2 * SOON_S)

    async def break_off() -> tuple[StreamResult, str]:
        asked = asyncio.create_task(answer("broken"))
        await asyncio.to_thread(until, lambda: num_arrived(system) >= before + 3, SOON_S)
        worker = await asyncio.to_thread(busy_prefill, system)
        await asyncio.to_thread(disturb, worker)
        return await asked, worker["id"]

    broken, lost = asyncio.run(break_off())
    assert (broken.error, broken.num_tokens) == ("", 12)
    until(lambda: decode_core(system)["is_clean"], SOON_S)
    num_saved = int(decode_core(system)["counters"]["kv_saved_tokens"] - saved)
    assert 3 * 64 <= num_saved < NUM_TOKENS and num_saved % 16 == 0
    nbytes_before[lost] = 0  # a new link counts from zero
    moved = sum(nbytes - nbytes_before.get(peer, 0) for peer, nbytes in nbytes_arrived(system).items())
    assert moved == (NUM_TOKENS - num_saved) * NBYTES_PER_TOKEN
    assert asyncio.run(answer("whole")).text == broken.text
