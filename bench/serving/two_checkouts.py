"""The benchmark of a pair beside the same pair of another checkout.

What a change costs who does not use it is shown by it:

    python -m bench.serving.two_checkouts CHECKOUT [--rounds 20] [--out FILE]

Both systems run side by side with the defaults, and take turns with each prompt; one is idle while the other answers.
"""

import argparse
import asyncio
import logging
import random
import statistics
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.load.client import StreamResult, answered, random_prompt
from bench.report.result import ResultRow, checkout, commit_of, write_result
from bench.system.local_system import model_of
from bench.system.services import Services

HERE = Path(__file__).parents[2]
WORKERS = {"p": ("--role", "prefill"), "d": ("--role", "decode")}
PROMPTS, MAX_TOKENS = (32, 1024), 48
READY_TIMEOUT_S, QUIET_S = 60.0, 60.0
_log = logging.getLogger(__name__)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=checkout, help="the other checkout, whose code the same Python runs")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--note", default="", help="what should be known of the run, such as a busy machine")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = asyncio.run(measure({"here": HERE, "there": args.checkout}, args.rounds))
    config = {"rounds": args.rounds, "peer": commit_of(args.checkout), "note": args.note}
    rows = [row_of(name, prompt, *both, config["peer"]) for (name, prompt), both in rows.items()]
    _log.info("%s", write_result(args.out, "two-checkouts", rows, config).with_suffix(".md").read_text("utf-8"))


async def measure(checkouts: dict[str, Path], rounds: int) -> dict[tuple[str, int], tuple[list[float], list[float]]]:
    """Return the seconds here and there, by what was measured and by the tokens of the prompt."""
    times: dict[tuple[str, int], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    rng = random.Random(0)
    with ExitStack() as stack:
        systems = []
        for checkout in checkouts.values():
            folder = Path(stack.enter_context(TemporaryDirectory()))
            # Without the safe path Python looks for modules in this folder before it looks in PYTHONPATH.
            settings = {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
            services = stack.enter_context(Services(folder, WORKERS, **settings))
            await services.start_all(READY_TIMEOUT_S)
            systems.append(services)
        for services in systems:
            for prompt in PROMPTS:
                await timed(services, random_prompt(prompt, rng))
        for turn in range(rounds):
            for prompt in PROMPTS:
                for index in (0, 1) if turn % 2 else (1, 0):
                    answer = await timed(systems[index], random_prompt(prompt, rng))
                    times["first token", prompt][index].append(answer.ttft_s)
                    times["token 0 to 1", prompt][index].append(answer.gaps_s[0])
                    times["later token", prompt][index].append(statistics.median(answer.gaps_s[1:]))
            _log.info("round %d of %d", turn + 1, rounds)
    return times


async def timed(services: Services, prompt: list[int]) -> StreamResult:
    return await answered(services.url, model_of(services.url), prompt, MAX_TOKENS, QUIET_S)


def row_of(name: str, prompt: int, here: list[float], there: list[float], commit: str) -> ResultRow:
    """Return the medians; the spread is that of the middle half, in parts of the median."""
    quarters = statistics.quantiles(here, n=4)
    median = statistics.median(here)
    params = {"prompt": prompt, "spread": f"{(quarters[2] - quarters[0]) / median:.1%}"}
    return ResultRow(name, median, "s", params, peer=f"commit {commit}", peer_value=statistics.median(there))


if __name__ == "__main__":
    main()
