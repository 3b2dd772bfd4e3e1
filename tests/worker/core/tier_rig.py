"""A small engine with tiers below it. Not a test."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.kv_store import KVStore
from contracts.sampling import SamplingParams
from engine.cache.load_plan import MAX_DELAY_SHARE, compute_seconds
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import StepOutput
from kv_transfer.chunks.block_record import max_record_nbytes
from kv_transfer.tiers.disk import DiskTier
from kv_transfer.tiers.host_memory import HostMemoryTier
from tests.engine.driving import drain, greedy, random_prompts, request, settings, tokens_of
from tests.engine.tiny_models import VOCAB
from tests.waiting import until
from worker.core.kv_tiers import KVTiers
from worker.core.open_tiers import pages_of

POOL_BLOCKS = 12
"""The pool holds one conversation: another one evicts it."""
PROMPTS = random_prompts(VOCAB, (97, 113, 120, 90))
SLOW = 100.0
"""Tokens a second that computing is said to take, so that loading always pays."""


def small_engine(folder: Path) -> Engine:
    engine = load_engine(settings(model=str(folder)))
    nbytes = POOL_BLOCKS * engine.layout.block_nbytes
    engine.close()
    return load_engine(settings(model=str(folder), kv_cache_nbytes=nbytes))


class Clock:
    """A clock that a test turns: how long a load may take is then no matter of how busy the machine is."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def join(
    engine: Engine,
    *tiers: KVStore,
    tokens_per_s: float = SLOW,
    clock: Callable[[], float] = time.monotonic,
    levels: Sequence[str] = (),
) -> KVTiers:
    pages, generations = pages_of(engine), engine.pool.generations
    joined = KVTiers(tiers, engine.layout, pages, generations, lambda: tokens_per_s, lambda: None, clock, levels)
    engine.use_lower_tiers(joined)
    return joined


def host(engine: Engine) -> HostMemoryTier:
    nbytes = max_record_nbytes(engine.layout)
    return HostMemoryTier(200 * nbytes, nbytes)


def disk(engine: Engine, folder: Path, is_direct: bool = False) -> DiskTier:
    tier = DiskTier(folder, engine.layout.shared_id.hex(), 1 << 30, is_direct=is_direct)
    assert tier.wait_until_indexed(30)
    return tier


def answer(engine: Engine, prompt: Sequence[int], name: str, sampling: SamplingParams | None = None) -> list[int]:
    engine.submit(request(name, prompt, sampling or greedy()))
    return tokens_of(drain(engine, 20_000), name)


def cached_tokens(engine: Engine, prompt: Sequence[int], name: str, loss: str = "") -> tuple[int, list[int]]:
    """Return how much of the prompt was not computed, and the answer. `loss`: of the KV that it takes."""
    engine.submit(replace(request(name, prompt, greedy()), loss=loss))
    outputs = drain(engine, 20_000)
    (started,) = [start for output in outputs for start in output.started if start.request_id == name]
    return started.cached_tokens, tokens_of(outputs, name)


def settled(tiers: KVTiers) -> None:
    until(lambda: tiers.is_idle)


def fill(engine: Engine, tiers: KVTiers) -> None:
    """Let the tiers have all prompts; the pool then holds the last."""
    for index, prompt in enumerate(PROMPTS):
        answer(engine, prompt, f"fill {index}")
        settled(tiers)


def slack_s(prompt: Sequence[int]) -> float:
    return MAX_DELAY_SHARE * compute_seconds(0, len(prompt), SLOW)


def waits_for_its_slack(
    engine: Engine, clock: Clock, prompt: Sequence[int], name: str, hangs: Callable[[], bool] = lambda: True
) -> list[int]:
    """Submit a prompt whose load `hangs`; it waits for its slack and no longer. Return its tokens."""
    engine.submit(request(name, prompt, greedy()))
    assert engine.step() == StepOutput()
    until(hangs)
    clock.now += slack_s(prompt) - 1e-6
    assert engine.step() == StepOutput() and engine.has_work()
    clock.now += 2e-6
    outputs = [engine.step()]
    assert outputs[0] != StepOutput(), "it is still waiting"
    return tokens_of([*outputs, *drain(engine)], name)


def log_lines(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)
