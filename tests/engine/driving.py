"""Running an engine in tests: requests in, answers out."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import EngineRequest, StepOutput
from engine.settings import EngineSettings

needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="oneDNN multiplies no bfloat16 on this CPU: it needs AVX512 or AVX-NE-CONVERT",
)

SETTINGS: dict[str, Any] = {"kv_cache_nbytes": 64 << 20, "dtype": "float32", "num_threads": 1}


def settings(**changes: Any) -> EngineSettings:
    return EngineSettings(**{**SETTINGS, **changes})


def greedy(max_tokens: int = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 1, "temperature": 0.0, "ignore_eos": True, **changes})


def request(name: str, token_ids: Sequence[int], sampling: SamplingParams, handoff: bool = False) -> EngineRequest:
    return EngineRequest(RequestId(name), list(token_ids), sampling, handoff)


def drain(engine: Engine, limit: int = 2000) -> list[StepOutput]:
    """Step until nothing is left to do, checking the accounting on the way."""
    outputs = []
    while engine.has_work():
        outputs.append(engine.step())
        engine.check()
        if outputs[-1] == StepOutput():
            time.sleep(0.005)  # a thread is at work for it, with a grammar
        assert len(outputs) < limit, "the engine does not come to an end"
    return outputs


def tokens_of(outputs: Sequence[StepOutput], name: str) -> list[int]:
    sampled = [s.token for output in outputs for s in output.sampled if s.request_id == name]
    assert [token.index for token in sampled] == list(range(sampled[0].index, sampled[0].index + len(sampled)))
    return [token.token_id for token in sampled]


def leave_nans(engine: Engine) -> None:
    """Leave NaN of any float format in all free pages, as a former owner whose numbers overflowed might."""
    pools = engine.transfer_pool
    for pool in pools if isinstance(pools, list) else [pools]:
        pool[:] = 0xFF


def answers(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[int]]:
    """Everything at once, as one batch would have it."""
    for index, prompt in enumerate(prompts):
        engine.submit(request(str(index), prompt, sampling))
    outputs = drain(engine)
    return [tokens_of(outputs, str(index)) for index in range(len(prompts))]


def scored(folder: Path, prompt: Sequence[int], **changes: Any) -> list[float]:
    """The logprob of each of the prompt's tokens, but the first, in a model's folder."""
    engine = load_engine(settings(model=str(folder), **changes))
    engine.submit(request("a", prompt, greedy(1, prompt_logprobs=0)))
    return [token.logprob for output in drain(engine) for item in output.scored for token in item.tokens]


def random_prompts(vocab: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocab, length).tolist() for length in lengths]
