"""The benchmark of the first and the next turn of a conversation on a GPU.

`python -m bench.engine.chat_turns [--out FILE] [--cached 0 2048 8192 32768] [--new 64 128 256 512 1024 2048]`

The model has Llama-8B's shape and random weights in FP8. One request runs alone; all but the new tokens of its prompt
are in the prefix cache. The time runs from Engine.submit until the first token is on the host. The limit is the longer
of two times: to read weights, head and the cached KV once, and to multiply the new rows at the rate of FP8 products.
"""

import argparse
import gc
import logging
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.engine.gpu import flops_per_token, limit_ms, load, random_requests, settled
from bench.report.hardware_limits import FP8_ROW_RATE
from bench.report.result import ResultRow, shown, write_result
from engine.engine import Engine
from engine.messages import EngineRequest
from kernels import caps

CACHED, NEW = (0, 2048, 8192, 32768), (64, 128, 256, 512, 1024, 2048)
NUM_TURNS = 12


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--cached", nargs="+", type=int, default=list(CACHED), help="tokens of earlier turns")
    parser.add_argument("--new", nargs="+", type=int, default=list(NEW), help="tokens of this one")
    args = parser.parse_args()
    longest = max(args.cached) + max(args.new) + 64
    engine = load("float8", max_batched_tokens=2048, max_model_len=longest, max_num_seqs=64, prefix_cache=True)
    rows = []
    with settled(engine):
        for cached in args.cached:
            (earlier,) = random_requests(engine, [max(cached, 1)], 1)
            first_token_ms(engine, earlier)
            earlier = replace(earlier, token_ids=earlier.token_ids[:cached])
            rows += [shown(measure(engine, earlier, new)) for new in args.new]
    config = {"model": "llama-8b's shape, random weights", "card": caps.detect().name}
    write_result(args.out, "engine-gpu-turns", rows, config)


def measure(engine: Engine, earlier: EngineRequest, new: int) -> ResultRow:
    """Return the median time to the first token of a turn of `new` tokens after the cached ones.

    The new tokens of each repetition differ, so that only the earlier turns are found in the cache.
    """
    gc.collect()
    config, cached = engine.checkpoint.config, len(earlier.token_ids)
    rng, times = np.random.default_rng(new), []
    for number in range(NUM_TURNS):
        said = rng.integers(0, config.vocab_size, new).tolist()
        turn = replace(earlier, request_id=f"{cached}-{new}-{number}", token_ids=[*earlier.token_ids, *said])
        times.append(first_token_ms(engine, turn))
    multiplied = new * flops_per_token(config, 2 * cached + new) / FP8_ROW_RATE * 1e3  # each row sees all cached
    limit = max(limit_ms(config, 1, cached + new, "float8"), multiplied)
    return ResultRow("engine_turn", statistics.median(times), "ms", {"cached": cached, "new": new}, limit)


def first_token_ms(engine: Engine, request: EngineRequest) -> float:
    begin = time.perf_counter()
    engine.submit(request)
    while engine.has_work():
        engine.step()
    return (time.perf_counter() - begin) * 1e3


if __name__ == "__main__":
    main()
