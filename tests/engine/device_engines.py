"""The GPU's adapter on the reference kernels, so that its whole way is proven where there is no GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from driving import drain, greedy, request, settings, tokens_of

from checkpoint import open_checkpoint
from contracts.ids import RequestId
from engine.cuda.chunks import Chunks, Launch
from engine.cuda.load import load_device_engine
from engine.cuda.runner import DeviceRunner
from engine.engine import Engine

FUSIBLE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Changes to a tiny model that make its FP8 decode step one of whole tiles."""


def device_engine(folder: Path, dtype: str = "float32", **changes: Any) -> Engine:
    chosen = settings(model=str(folder), dtype=dtype, **changes)
    torch.set_num_threads(1)
    return load_device_engine(chosen, open_checkpoint(str(folder)), lambda *_: None, device=torch.device("cpu"))


def chunks_of(engine: Engine) -> Chunks:
    assert isinstance(engine.runner, DeviceRunner)
    return engine.runner.launcher.chunks


def noted_launches_of(chunks: Chunks) -> list[Launch]:
    """Holds chunks as launches that run eagerly, and are put here when they do."""
    launched: list[Launch] = []

    def record(launch: Launch) -> Launch:
        def held() -> None:
            launched.append(launch)
            launch()

        return held

    chunks.hold(record)
    return launched


def hand_over(source: Engine, target: Engine, name: str, prompt: Sequence[int], num_tokens: int = 8) -> list[int]:
    """The answer of one engine to what the other computed: pages pulled, each summed up right."""
    request_id, params = RequestId(name), greedy(num_tokens)
    source.submit(request(name, prompt, params, handoff=True))
    outputs = drain(source)
    first = next(told.token for output in outputs for told in output.sampled)
    reservation = target.reserve(request(name, prompt, params))
    remote, size = target.transfer_pool.attach(source.transfer_pool.share()), target.layout.block_size
    num_parts = max(source.layout.tp_size, target.layout.tp_size)
    for chunk in (chunk for output in outputs for chunk in output.chunks):
        start = max(chunk.first_token, reservation.skip_tokens)
        skipped, end = (start - chunk.first_token) // size, chunk.first_token + chunk.num_tokens
        into = reservation.blocks[start // size : target.layout.num_blocks(end)]
        if into:
            assert chunk.checksums is not None
            sums = source.transfer_pool.in_parts(chunk.checksums.wait(), chunk.blocks, num_parts)
            assert np.array_equal(remote.pull(chunk.blocks[skipped:], into, True), sums[skipped:])
    remote.close()
    target.adopt(request_id, first)
    target.writer_ended(request_id)
    source.release(request_id)
    return [first.token_id, *tokens_of(drain(target), name)]
