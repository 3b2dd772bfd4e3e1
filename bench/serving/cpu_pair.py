"""The benchmark of what handoff and services cost on a CPU.

    python -m bench.serving.cpu_pair --transfers ucx,shm,tcp --out FILE

The pair stands beside a mixed worker, and both beside the engine alone, in one run, in turn. The engine alone runs in
this process on the same dtype; what the others lack of its rate, HTTP and the services took.
"""

import argparse
import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

from bench.engine.cpu import NUM_DECODED, NUM_STREAMS, decode
from bench.load.client import StreamResult, ask, body_of, random_prompt, session
from bench.report.result import ResultRow, write_result
from bench.system.local_system import System, running
from engine.engine import Engine
from engine.loader import load_engine
from engine.settings import EngineSettings
from kernels.cpu.isa import apply_isa, probe_isa

PROMPT_TOKENS = (128, 1024, 4096)
MAX_TOKENS = 24
KV_CACHE_MIB = 1024
"""The KV cache of each worker, small enough that all systems together fit in the machine's memory."""


def main() -> None:
    args = parse()
    common = ["--dtype", args.dtype] + (["--model", args.model] if args.model else [])
    memory = {"TANDEM_KV_CACHE_MIB": str(KV_CACHE_MIB)}
    flags = {"mixed": ("--prefill", "0", "--decode", "0", "--mixed", "1")}
    flags |= {transfer: ("--transfer", transfer) for transfer in args.transfers.split(",")}
    with ExitStack() as stack:
        systems = {name: stack.enter_context(running(*some, *common, **memory)) for name, some in flags.items()}
        rows = rows_of(asyncio.run(measure(systems, args.repeats)))
        keep(args, rows)  # written now, because the rest takes minutes and may be cut short
        engine = load(args.model, args.dtype)
        rates = rate_rows(asyncio.run(measure_rates(engine, systems, args.repeats)))
        keep(args, [*rows, *rates])
    for row in [*rows, *rates]:
        peer = "" if row.peer_value is None else f"   {row.peer} {row.peer_value:.2f}"
        print(f"{row.name:16s} {dict(row.params)!s:52s} {row.value:9.2f} {row.unit}{peer}")


def keep(args: argparse.Namespace, rows: Sequence[ResultRow]) -> None:
    write_result(args.out, "serving", rows, {"dtype": args.dtype, "model": args.model, "repeats": args.repeats})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transfers", default="ucx,shm,tcp")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default="")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=None, help="result file")
    return parser.parse_args()


async def measure(systems: dict[str, System], repeats: int) -> dict[tuple[str, int], list[StreamResult]]:
    """Send one request at a time to each system in turn, so that a busy machine affects all alike."""
    rng, answers = random.Random(0), {}
    async with session() as http:
        for num_tokens in PROMPT_TOKENS:
            for turn in range(repeats + 1):
                for name, system in systems.items():
                    body = body_of(system.model(), random_prompt(num_tokens, rng), MAX_TOKENS)
                    answer = await ask(http, system.url, body, MAX_TOKENS)
                    if answer.error:
                        raise RuntimeError(f"{name}, {num_tokens} tokens: {answer.error}")
                    print(f"{name}, {num_tokens} tokens: TTFT {answer.ttft_s * 1e3:.1f} ms", flush=True)
                    if turn:
                        answers.setdefault((name, num_tokens), []).append(answer)
    return answers


def load(model: str, dtype: str) -> Engine:
    settings = EngineSettings(model=model, dtype=dtype, prefix_cache=False, kv_cache_nbytes=KV_CACHE_MIB << 20)
    apply_isa(probe_isa(settings.cache_dir))
    return load_engine(settings)


async def measure_rates(engine: Engine, systems: dict[str, System], repeats: int) -> dict[tuple[str, int], list[float]]:
    """Return tokens per second of decode by system and number of streams; "engine" is in this process."""
    rng, rates = random.Random(1), {}
    async with session() as http:
        for num_streams in (1, NUM_STREAMS):
            for turn in range(repeats + 1):
                found = {"engine": decode(engine, num_streams)}
                for name, system in systems.items():
                    model, most = system.model(), NUM_DECODED + 1
                    bodies = [body_of(model, random_prompt(64, rng), most) for _ in range(num_streams)]
                    asked = (ask(http, system.url, body, most) for body in bodies)
                    found[name] = decode_rate(await asyncio.gather(*asked))
                    print(f"{name}, {num_streams} streams: {found[name]:.1f} tokens/s", flush=True)
                for name, rate in found.items() if turn else ():
                    rates.setdefault((name, num_streams), []).append(rate)
    return rates


def decode_rate(answers: Sequence[StreamResult]) -> float:
    """Return the tokens per second of streams that started together.

    The time runs from when the last of them has its token 0 until all have ended.
    """
    if errors := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(errors[0])
    start = max(answer.ttft_s for answer in answers)
    times = [time for answer in answers for time in accumulate(answer.gaps_s, initial=answer.ttft_s)]
    return sum(time > start for time in times) / (max(times) - start)


def rate_rows(rates: dict[tuple[str, int], list[float]]) -> list[ResultRow]:
    medians = {key: statistics.median(seen) for key, seen in rates.items()}
    return [
        ResultRow(
            "decode rate",
            rate,
            "tokens/s",
            {"system": name, "streams": num_streams},
            peer=None if name == "engine" else "engine alone",
            peer_value=None if name == "engine" else medians["engine", num_streams],
        )
        for (name, num_streams), rate in medians.items()
    ]


def rows_of(answers: dict[tuple[str, int], list[StreamResult]]) -> list[ResultRow]:
    rows = []
    for (name, num_tokens), measured in answers.items():
        mixed = answers["mixed", num_tokens]
        params = {"system": name, "prompt_tokens": num_tokens}
        for what, value_of in MEASURES.items():
            value, peer = (statistics.median(value_of(a) for a in some) * 1e3 for some in (measured, mixed))
            rows.append(row(what, params, value, None if name == "mixed" else peer))
        if name != "mixed":
            adder = statistics.median(a.ttft_s for a in measured) - statistics.median(a.ttft_s for a in mixed)
            rows.append(row("ttft adder", params, adder * 1e3, None))
    return rows


MEASURES: dict[str, Callable[[StreamResult], float]] = {
    "ttft": lambda answer: answer.ttft_s,
    "gap token 0 to 1": lambda answer: answer.gaps_s[0],
    "itl": lambda answer: statistics.median(answer.gaps_s[1:]),
}


def row(name: str, params: dict, value: float, mixed: float | None) -> ResultRow:
    return ResultRow(name, value, "ms", params, peer=None if mixed is None else "mixed worker", peer_value=mixed)


if __name__ == "__main__":
    main()
