"""On a slow network greedy tokens survive what loses nothing; what loses is taken only where both ends name it."""

import asyncio
from pathlib import Path

import httpx
import pytest

from bench.system.local_system import get_json
from bench.system.services import Services
from process.sockets import free_port
from testing.paced_proxy import PacedProxy
from tests.engine.tiny_models import save_tiny
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # it starts four systems, one after the other

SLOW, FAST = 6e5, 1e9
"""Bytes a second of the network to decode: of KV and of everything else."""
DECODE_HOST = "127.0.0.2"
DEADLINE_S = 120.0
NUM_PROMPTS, MAX_TOKENS = 3, 16
PLAIN = {"TANDEM_DTYPE": "float32", "TANDEM_NUM_THREADS": "1", "TANDEM_TRANSFER": "tcp", "TANDEM_KV_CACHE_MIB": "16"}
WIDE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
"""A model whose tokens have much KV for what they take to compute."""
TOKEN_NBYTES = 2 * 2 * 4 * 64 * 4


def flags(role: str, setting: str, *others: str) -> tuple[str, ...]:
    return "--role", role, "--kv-codec", setting, "--max-batched-tokens", "128", *others


async def answers(
    model: str, folder: Path, prefill: str, decode: str, *others: str
) -> tuple[list[list[int]], dict[str, dict]]:
    """Return the tokens of all prompts and the levels that prefill's end of the link used.

    `prefill`, `decode`: the `--kv-codec` of each. `others`: decode's further options.
    """
    http_port, kv_port = free_port(), free_port()
    own = "--port", str(http_port), "--transfer-port", str(kv_port), "--advertise-host", DECODE_HOST
    folder.mkdir()
    proxies = [
        PacedProxy(f"127.0.0.1:{port}", rate, (DECODE_HOST, port))
        for port, rate in ((http_port, FAST), (kv_port, SLOW))
    ]
    workers = {"p": flags("prefill", prefill), "d": flags("decode", decode, *own, *others)}
    try:
        with Services(folder, workers, TANDEM_MODEL=model, **PLAIN) as services:
            for name in ("p", "d", "gateway"):
                services.start(name)
            await asyncio.gather(*(services.ready(name) for name in ("p", "d", "gateway")))
            until(lambda: httpx.get(f"{services.url}/ready").status_code == 200)
            replies = [await asyncio.to_thread(ask, services.url, index) for index in range(NUM_PROMPTS)]
            return [tokens for tokens, _ in replies], levels(services.facts("p")["url"])
    finally:
        for proxy in proxies:
            proxy.close()


async def answers_alone(model: str, folder: Path, *others: str) -> list[tuple[list[int], int]]:
    """Return what a worker that takes no loss answers, and how many tokens of each prompt it found cached."""
    folder.mkdir()
    with Services(folder, {"m": flags("mixed", "auto", *others)}, TANDEM_MODEL=model, **PLAIN) as services:
        await services.start_all(DEADLINE_S)
        until(lambda: httpx.get(f"{services.url}/ready").status_code == 200)
        return [await asyncio.to_thread(ask, services.url, index) for index in range(NUM_PROMPTS)]


def ask(url: str, index: int) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many of its prompt were cached."""
    prompt = [(17 * index + 13 * position) % 300 + 10 for position in range(400)]
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def levels(url: str) -> dict[str, dict]:
    nbytes = NUM_PROMPTS * 400 * TOKEN_NBYTES * 15 // 16

    def links() -> list[dict]:
        return [link for link in get_json(f"{url}/health")["core"]["links"] if link["counters"]["nbytes"] >= nbytes]

    until(links, words=lambda: get_json(f"{url}/health")["core"]["links"])  # told a moment later
    (link,) = links()
    assert link["transport"] == "tcp"
    return link["levels"]


async def test_a_slow_network_changes_no_token_unless_a_lossy_level_is_named_at_both_ends(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_tiny(model, "llama", **WIDE)
    plain, used = await answers(str(model), tmp_path / "off", "off", "auto")
    assert used == {}
    assert all(len(tokens) == MAX_TOKENS for tokens in plain)

    exact, used = await answers(str(model), tmp_path / "auto", "4bit", "auto")
    assert exact == plain
    assert set(used) - {"raw"} == {"lossless"}
    assert used["lossless"]["wire_nbytes"] < 0.9 * used["lossless"]["nbytes"]

    (tmp_path / "store").mkdir()
    store = "--kv-store", f"file://{tmp_path}/store"
    _, used = await answers(str(model), tmp_path / "4bit", "4bit", "4bit", *store)
    assert set(used) - {"raw"} == {"4bit"}
    assert used["4bit"]["wire_nbytes"] < 0.25 * used["4bit"]["nbytes"]
    # Decode has kept what it got: lossy KV for those who take that loss alone, and the first that was sent as it was.
    assert sum(1 for path in (tmp_path / "store").rglob("*") if path.is_file()) >= NUM_PROMPTS * (400 // 16)
    alone = await answers_alone(str(model), tmp_path / "alone", *store)
    assert [tokens for tokens, _ in alone] == plain
    assert sum(cached for _, cached in alone) < NUM_PROMPTS * 384 // 2
