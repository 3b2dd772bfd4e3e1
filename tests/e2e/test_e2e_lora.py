"""LoRA adapters through a real pair: loaded at start and while it runs, each answer that of its merged model."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.models.transformers_oracle import greedy as oracle_greedy
from bench.system.local_system import System, running
from tests.engine.lora_folders import DENSE, save_lora
from tests.engine.tiny_models import save_tiny

pytestmark = pytest.mark.slow

PROMPTS = [random.Random(length).choices(range(2, 256), k=length) for length in (3, 40, 150)]
SETTINGS = {"TANDEM_MAX_BATCHED_TOKENS": "64", "TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "64"}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, dict[str, list[list[int]]]]:
    """A folder with a model and two adapters, and transformers' answers by the name of each."""
    folder = tmp_path_factory.mktemp("adapted")
    model = save_tiny(folder, "qwen3")
    merged = {
        "": model,
        "sql": save_lora(folder / "sql", model, DENSE, 1),
        "law": save_lora(folder / "law", model, DENSE, 2),
    }
    save_lora(folder / "dora", model, ("q_proj",), stated={"use_dora": True})
    return folder, {name: [oracle_greedy(each, prompt, 8) for prompt in PROMPTS] for name, each in merged.items()}


@pytest.fixture(scope="module")
def system(models) -> Iterator[System]:
    flags = ("--model", str(models[0]), "--dtype", "float32", "--enable-lora", "--lora-modules", f"sql={models[0]}/sql")
    with running(*flags, **SETTINGS, TANDEM_ALLOW_RUNTIME_LORA_UPDATING="1") as system:
        yield system


async def answers(system: System, names: list[str]) -> dict[str, list[tuple[list[int], int]]]:
    """All prompts by each name at once: the tokens of each answer, and how many of its prompt were cached."""
    async with httpx.AsyncClient(base_url=system.url, timeout=60) as client:

        async def ask(name: str, prompt: list[int]) -> tuple[list[int], int]:
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            reply = (await client.post("/v1/completions", json=body | {"model": name})).json()
            return reply["choices"][0]["token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]

        rows = [asyncio.gather(*(ask(name, prompt) for prompt in PROMPTS)) for name in names]
        return dict(zip(names, await asyncio.gather(*rows), strict=True))


def change(system: System, what: str, **body: str) -> httpx.Response:
    return httpx.post(f"{system.url}/v1/{what}_lora_adapter", json=body, timeout=60)


def test_adapters_come_go_and_answer_through_the_pair(models, system):
    folder, expected = models
    assert change(system, "load", lora_name="law", lora_path=str(folder / "law")).status_code == 200
    listed = httpx.get(f"{system.url}/v1/models").json()["data"]
    assert [card["id"] for card in listed][1:] == ["sql", "law"]
    for turn in range(2):
        found = asyncio.run(answers(system, ["", "sql", "law"]))
        assert {name: [tokens for tokens, _ in each] for name, each in found.items()} == expected
        hits = [cached for each in found.values() for _, cached in each]
        assert not any(hits) if turn == 0 else all(each[2][1] >= 128 for each in found.values()), hits
    refused = change(system, "load", lora_name="dora", lora_path=str(folder / "dora"))
    assert refused.status_code == 400 and "use_dora is True; it is not supported" in refused.json()["error"]["message"]
    assert change(system, "unload", lora_name="law").status_code == 200
    gone = httpx.post(f"{system.url}/v1/completions", json={"model": "law", "prompt": [5], "max_tokens": 1})
    assert gone.status_code == 404
    assert asyncio.run(answers(system, ["sql"]))["sql"][0][0] == expected["sql"][0]
