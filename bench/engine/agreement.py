"""The benchmark of how near the engine's answers are to float32.

`python -m bench.engine.agreement [--dtype float32] [--prompts 64] [--tokens 64] [--llama PYTHON]`

For float32 it counts greedy answers that equal those of transformers on the same weights. For every format it measures
teacher-forced argmax agreement and KL divergence against transformers in float32, and whether answers stay the same
from run to run, alone and in a batch, with chunks and with prefix hits. `--llama` is the Python of an environment
that has llama-cpp-python: its logits on the same GGUF file, along the same answers, are compared in the same way.
"""

import argparse
import logging
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bench.engine.llama_cpp_process import LlamaCppProcess
from bench.models.transformers_oracle import greedy, oracle
from bench.report.result import ResultRow, write_result
from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.cpu.linear import FORMATS
from engine.cpu.native.choice import NATIVE
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import EngineRequest
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from engine.settings import EngineSettings

_TOPICS = (
    "the capital of France", "why the sky is blue", "a poem about the sea", "how bread is baked", "the number 17",
    "a function that sorts a list", "Marie Curie", "what makes a good friend", "the history of Rome", "photosynthesis",
    "three healthy breakfasts", "how a bicycle stays upright", "the rules of chess", "a letter to a neighbour",
    "the difference between rain and snow", "a short story about a fox",
)  # fmt: skip
_FORMS = (
    "Tell me about {}.",
    "Explain {} to a child.",
    "Write one sentence on {}.",
    "List facts about {}: " + "and more, " * 60,
)
NUM_ALONE, NUM_FORCED = 16, 16


@dataclass(frozen=True)
class Gold:
    """The greedy float32 answer to one prompt, and the logits that led to it, `[tokens, vocab]`."""

    prompt: list[int]
    answer: list[int]
    logits: torch.Tensor


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder, GGUF file or hub id; the default model if empty")
    parser.add_argument("--dtype", nargs="+", default=[NATIVE, *FORMATS])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--llama", type=Path, default=None, help="the Python of an environment with llama-cpp-python")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    golds: list[Gold] = []
    rows: list[ResultRow] = []
    version = None
    for dtype in args.dtype:
        engine = load_engine(EngineSettings(model=args.model, dtype=dtype, kv_cache_nbytes=1 << 30))
        if not golds:
            golds = gold(oracle(engine.checkpoint), prompts(engine, args.prompts), args.tokens)
            if args.llama:
                peer = LlamaCppProcess(args.llama, engine.checkpoint.path, torch.get_num_threads(), 1)
                rows, version = _logged(compare_llama_cpp(peer, golds)), peer.version
                peer.close()
        rows += _logged(compare(engine, golds, args.model))
    config = {"model": args.model, "prompts": args.prompts, "tokens": args.tokens, "llama-cpp-python": version}
    logging.info("%s", write_result(args.out, "agreement", rows, config))


def _logged(rows: list[ResultRow]) -> list[ResultRow]:
    for row in rows:
        logging.info("%s %s: %.6g %s", row.params["dtype"], row.name, row.value, row.unit)
    return rows


def prompts(engine: Engine, count: int) -> list[list[int]]:
    texts = [form.format(topic) for form in _FORMS for topic in _TOPICS]
    tokenizer = engine.checkpoint.tokenizer()
    turns = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(turns.format(texts[index % len(texts)])).ids for index in range(count)]


@torch.inference_mode()
def gold(model: PreTrainedModel, prompts: SequenceOf[list[int]], num_tokens: int) -> list[Gold]:
    golds = []
    for prompt in prompts:
        answer = greedy(model, prompt, num_tokens)
        logits = model(torch.tensor([prompt + answer[:-1]]), logits_to_keep=num_tokens).logits[0]
        golds.append(Gold(prompt, answer, logits))
    return golds


def compare(engine: Engine, golds: SequenceOf[Gold], model: str) -> list[ResultRow]:
    params = {"dtype": engine.dtype}
    together = answers(engine, golds)
    again = answers(engine, golds)
    alone = [answers(engine, [gold])[0] for gold in golds[:NUM_ALONE]]
    small = EngineSettings(
        model=model, dtype=engine.dtype, max_batched_tokens=64, max_num_seqs=5, kv_cache_nbytes=1 << 28
    )
    chunked = answers(load_engine(small), golds)
    exact = [gold.answer for gold in golds]
    figures = {
        "answers equal to transformers float32": _share(together, exact),
        "answers equal in a second run, with prefix hits": _share(together, again),
        f"answers equal alone (first {len(alone)})": _share(together[: len(alone)], alone),
        "answers equal with 64-token chunks": _share(together, chunked),
    }
    rows = [ResultRow(name, value, "of 1", params, limit=1.0) for name, value in figures.items()]
    return [*rows, *_distance(golds, teacher_forced(engine, golds), engine.dtype)]


def compare_llama_cpp(peer: LlamaCppProcess, golds: SequenceOf[Gold]) -> list[ResultRow]:
    """Return how far the logits of llama.cpp are from float32's."""
    found = (torch.from_numpy(peer.forced_logits(gold.prompt, gold.answer)) for gold in golds)
    return _distance(golds, found, "llama.cpp")


def _distance(golds: SequenceOf[Gold], found: Iterable[torch.Tensor], dtype: str) -> list[ResultRow]:
    argmax, divergence = distance(golds, found)
    params = {"dtype": dtype}
    return [
        ResultRow("argmax equal, teacher-forced", argmax, "of 1", params, limit=1.0),
        ResultRow("KL divergence from float32", divergence, "nats", params),
    ]


def _share(ours: list[list[int]], theirs: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def answers(engine: Engine, golds: SequenceOf[Gold]) -> list[list[int]]:
    """Return the greedy answers to all prompts, submitted at once."""
    sampling = SamplingParams(max_tokens=len(golds[0].answer), seed=0, temperature=0.0, ignore_eos=True)
    found: dict[str, list[int]] = {str(index): [] for index in range(len(golds))}
    for name, gold in zip(found, golds, strict=True):
        engine.submit(EngineRequest(RequestId(name), gold.prompt, sampling))
    while engine.has_work():
        for sampled in engine.step().sampled:
            found[sampled.request_id].append(sampled.token.token_id)
    engine.check()
    return list(found.values())


def distance(golds: SequenceOf[Gold], found: Iterable[torch.Tensor]) -> tuple[float, float]:
    """Return the share of equal argmaxes and the mean KL divergence, in nats.

    `found`: the logits along each float32 answer, `[tokens, vocab]`.
    """
    equal, divergence, count = 0, 0.0, 0
    for gold, logits in zip(golds, found, strict=True):
        equal += int((logits.argmax(-1) == gold.logits.argmax(-1)).sum())
        # In float64, since float32 would leave a rounding error of 1e-8, of either sign, between equal logits.
        expected, ours = gold.logits.double().log_softmax(-1), logits.double().log_softmax(-1)
        divergence += float((expected.exp() * (expected - ours)).sum())
        count += len(gold.answer)
    return equal / count, divergence / count


def teacher_forced(engine: Engine, golds: SequenceOf[Gold]) -> Iterator[torch.Tensor]:
    """Yield the engine's logits along the float32 answers.

    It writes over the engine's cache.
    """
    for first in range(0, len(golds), NUM_FORCED):
        yield from forced_logits(engine, golds[first : first + NUM_FORCED])


def forced_logits(engine: Engine, golds: SequenceOf[Gold]) -> list[torch.Tensor]:
    """Return the logits along given answers of one length, computed as in serving.

    Each prompt is computed at once, the answers token by token in one batch.
    """
    sequences, used = [], 0
    for gold in golds:
        sequence = Sequence(RequestId("forced"), gold.prompt, SamplingParams(max_tokens=len(gold.answer), seed=0))
        num_blocks = engine.layout.num_blocks(len(gold.prompt) + len(gold.answer))
        sequence.blocks.extend(range(used, used + num_blocks))
        used += num_blocks
        sequences.append(sequence)
    steps = [torch.cat([engine.runner.forward([ScheduledChunk(s, 0, s.num_prompt)]).logits for s in sequences])]
    for index in range(len(golds[0].answer) - 1):
        for sequence, gold in zip(sequences, golds, strict=True):
            sequence.tokens.append(gold.answer[index])
        steps.append(engine.runner.forward([ScheduledChunk(s, len(s.tokens) - 1, 1) for s in sequences]).logits)
    return list(torch.stack(steps, 1))


if __name__ == "__main__":
    main()
