"""The GPU's adapter on the reference kernels, so that its whole way is proven where there is no GPU; and on one."""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpoint import open_checkpoint
from contracts.events import Token
from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.backend import Runner
from engine.cuda.graphs.last_layer_graphs import LastLayerGraphs
from engine.cuda.graphs.mixed_batch_attention import MixedBatchAttention
from engine.cuda.graphs.prefill_graphs import PrefillGraphs
from engine.cuda.kv.peer_pool import PeerPool
from engine.cuda.runner import DeviceRunner
from engine.cuda.runtime.graph_capture import Launch
from engine.engine import Engine
from engine.loader import load_device_engine
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from tests.engine.driving import drain, greedy, request, settings, tokens_of

ANSWER = greedy(8)
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


def engine_of(folder: Path, dtype: str, device: str = "cuda", **changes: Any) -> Engine:
    """On a GPU, or as it is there on the reference kernels."""
    chosen = settings(model=str(folder), dtype=dtype, max_num_seqs=8, max_model_len=512, **changes)
    return load_device_engine(chosen, open_checkpoint(str(folder)), lambda *_: None, device=torch.device(device))


def logits_of(engine: Engine, prompts: SequenceOf[list[int]], num_decoded: int = 3) -> torch.Tensor:
    """Return the logits of the prompts' last token and of some decode steps with given tokens."""
    sequences = []
    for row, prompt in enumerate(prompts):
        sequence = Sequence(RequestId(str(row)), prompt, greedy())
        sequence.blocks.extend(range(4 * row, 4 * row + 4))
        sequences.append(sequence)
    steps = [engine.runner.forward_without_sampling([ScheduledChunk(s, 0, s.num_prompt) for s in sequences]).logits]
    for token in range(num_decoded):
        for sequence in sequences:
            sequence.tokens.append(token)
        steps.append(
            engine.runner.forward_without_sampling([ScheduledChunk(s, len(s.tokens) - 1, 1) for s in sequences]).logits
        )
    return torch.stack(steps)


def logits_beside_a_prompt(runner: Runner, prompts: SequenceOf[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of an answer to each prompt and of a prompt, computed alone and together.

    There are three answers or so, so that they are padded. Then come those of the answers and of a chunk whose rows go
    no further than K and V.
    """
    *answering, prompt = [
        Sequence(RequestId(str(row)), each, greedy()) for row, each in enumerate([*prompts, prompts[-1]])
    ]
    for row, sequence in enumerate([*answering, prompt]):
        sequence.blocks.extend(range(8 * row, 8 * row + 8))
    whole, chunk = ScheduledChunk(prompt, 0, prompt.num_prompt), ScheduledChunk(prompt, 0, 64)
    runner.forward_without_sampling([ScheduledChunk(sequence, 0, sequence.num_prompt) for sequence in answering])
    for sequence in answering:
        sequence.tokens.append(7)
    decodes = [ScheduledChunk(sequence, sequence.num_prompt, 1) for sequence in answering]
    alone = [runner.forward_without_sampling(pieces).logits for pieces in (decodes, [whole], decodes)]
    beside = [runner.forward_without_sampling([*decodes, piece]).logits for piece in (whole, chunk)]
    return torch.cat(alone), torch.cat(beside)


def chunks_of(engine: Engine) -> PrefillGraphs:
    assert isinstance(engine.runner, DeviceRunner)
    return engine.runner.launcher.chunks


def beside_of(engine: Engine) -> MixedBatchAttention:
    assert isinstance(engine.runner, DeviceRunner)
    return engine.runner.launcher.mixed_batch


def endings_of(engine: Engine) -> LastLayerGraphs:
    assert isinstance(engine.runner, DeviceRunner)
    return engine.runner.launcher.endings


def noted_launches_of(holder: PrefillGraphs | MixedBatchAttention | LastLayerGraphs) -> list[Launch]:
    """Holds launches that run eagerly, and are put here when they do."""
    launched: list[Launch] = []

    def record(launch: Launch) -> Launch:
        def held() -> None:
            launched.append(launch)
            launch()

        return held

    holder.capture(record, holder.sizes)
    return launched


def tensors_of(held: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of weights, wherever in them they are."""
    if isinstance(held, torch.Tensor):
        yield held
    elif is_dataclass(held):
        for field in fields(held):
            yield from tensors_of(getattr(held, field.name))
    elif isinstance(held, tuple):
        for item in held:
            yield from tensors_of(item)


@dataclass(frozen=True)
class Prefilled:
    """What prefill tells of a prompt: token 0, and of each chunk its first token, tokens, blocks, and checksums by
    parts of its pages.
    """

    first: Token
    chunks: list[tuple[int, int, list[int], np.ndarray]]


def prefilled(
    source: Engine, name: str, prompt: SequenceOf[int], num_parts: int, sampling: SamplingParams = ANSWER
) -> Prefilled:
    """Computed, and kept until it is released."""
    source.submit(request(name, prompt, sampling, handoff=True))
    outputs, chunks = drain(source), []
    for chunk in (chunk for output in outputs for chunk in output.chunks):
        assert chunk.checksums is not None
        sums = source.transfer_pool.in_parts(chunk.checksums.wait(), chunk.blocks, num_parts)
        chunks.append((chunk.first_token, chunk.num_tokens, list(chunk.blocks), sums))
    return Prefilled(next(told.token for output in outputs for told in output.sampled), chunks)


def landed(
    target: Engine,
    remote: PeerPool,
    told: Prefilled,
    name: str,
    prompt: SequenceOf[int],
    sampling: SamplingParams = ANSWER,
) -> None:
    """Reserve and prepare as a worker does, then pages pulled, each summed up right."""
    reservation, layout = target.reserve(request(name, prompt, sampling)), target.layout
    target.prepare(reservation.request_id)
    for first_token, size, blocks, sums in told.chunks:
        start = max(first_token, reservation.skip_tokens)
        skipped = (start - first_token) // layout.block_size
        into = reservation.blocks[start // layout.block_size : layout.num_blocks(first_token + size)]
        if into:
            found = remote.pull(blocks[skipped:], into, True)
            assert found is not None and np.array_equal(found, sums[skipped:])


def adopted(target: Engine, told: Prefilled, name: str) -> None:
    target.adopt(RequestId(name), told.first)
    target.incoming_writer_ended(RequestId(name))


def taken_over(target: Engine, remote: PeerPool, told: Prefilled, name: str, prompt: SequenceOf[int]) -> list[int]:
    """The answer to it, token 0 included."""
    landed(target, remote, told, name, prompt)
    adopted(target, told, name)
    return [told.first.token_id, *tokens_of(drain(target), name)]


def hand_over(source: Engine, target: Engine, name: str, prompt: SequenceOf[int]) -> list[int]:
    """The answer of one engine to what the other computed, both in this process."""
    told = prefilled(source, name, prompt, max(source.layout.tp_size, target.layout.tp_size))
    remote = target.transfer_pool.attach(source.transfer_pool.share())
    answer = taken_over(target, remote, told, name, prompt)
    remote.close()
    source.release(RequestId(name))
    return answer
