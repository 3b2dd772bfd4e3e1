"""The benchmark of fairness: a tenant that floods a pair, and another that goes on asking.

    python -m bench.serving.fairness [--requests 60] [--streams 50]

The quiet tenant asks one thing after the other, with pauses; the loud one keeps many streams busy with longer prompts.
The first tokens of the quiet one are measured without the loud one, beside it, and beside it where both are one tenant,
which is first come, first served.
"""

import argparse
import asyncio
import logging
import random
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.load.client import StreamResult, ask, body_of, random_prompt, session
from bench.load.generator import percentile
from bench.report.result import ResultRow, write_result
from bench.system.local_system import running

MODEL = "measured"
QUIET_TOKENS, LOUD_TOKENS, ANSWER_TOKENS = 128, 512, 16
PERIOD_S, SETTLE_S = 1.5, 10.0
"""The pause of the quiet tenant. Whoever waits has come once a prompt of each loud stream has been computed."""
RELOAD_S = 2.5
ONE = '[tenants.all]\nkeys = ["quiet", "loud"]\n'
TWO = '[tenants.quiet]\nkeys = ["quiet"]\n[tenants.loud]\nkeys = ["loud"]\n'
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuietRun:
    """The quiet tenant's first tokens, and the share of its requests that were refused."""

    ttfts_s: list[float]
    refused: float


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60, help="of the quiet tenant, each time")
    parser.add_argument("--streams", type=int, default=50, help="of the loud tenant")
    parser.add_argument("--note", default="", help="what should be known of the run, such as a busy machine")
    parser.add_argument("--out", type=Path, default=None, help="result file")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.toml"
        file.write_text(TWO)
        settings = {"TANDEM_TENANTS": str(file), "TANDEM_SERVED_MODEL_NAME": MODEL}
        with running("--prefill", "1", "--decode", "1", **settings) as system:
            runs = asyncio.run(measure(system.url, file, args.requests, args.streams))
    config = {"requests": args.requests, "streams": args.streams, "period_s": PERIOD_S, "note": args.note}
    _log.info("%s", write_result(args.out, "fairness", rows_of(runs), config).with_suffix(".md").read_text("utf-8"))


async def measure(url: str, file: Path, num_requests: int, num_streams: int) -> dict[str, QuietRun]:
    """Return what the quiet tenant saw: alone, beside the flood as another tenant, and as the same."""
    rng = random.Random(0)
    await quiet(url, 5, rng)  # what starts with the first requests
    runs = {"alone": await quiet(url, num_requests, rng)}
    for name, tenants in (("two tenants", TWO), ("one tenant", ONE)):
        file.write_text(tenants)
        await asyncio.sleep(RELOAD_S)
        loud = [asyncio.create_task(flood(url, rng.randrange(1 << 30))) for _ in range(num_streams)]
        await asyncio.sleep(SETTLE_S)
        runs[name] = await quiet(url, num_requests, rng)
        for task in loud:
            task.cancel()
        await asyncio.gather(*loud, return_exceptions=True)
        _log.info("%s: %s", name, runs[name])
    return runs


async def quiet(url: str, count: int, rng: random.Random) -> QuietRun:
    """Return what became of so many requests.

    Raises RuntimeError for one that failed otherwise than by a 429.
    """
    asked = []
    async with session(headers={"authorization": "Bearer quiet"}) as http:
        for _ in range(count):
            body = body_of(MODEL, random_prompt(QUIET_TOKENS, rng), ANSWER_TOKENS)
            asked.append(asyncio.create_task(ask(http, url, body, ANSWER_TOKENS)))
            await asyncio.sleep(PERIOD_S)
        answers: list[StreamResult] = await asyncio.gather(*asked)
    if failed := [answer.error for answer in answers if answer.error and answer.refusal != 429]:
        raise RuntimeError(f"{len(failed)} of {count} requests of the quiet tenant failed: {failed[0]}")
    ttfts = [answer.ttft_s for answer in answers if not answer.error]
    return QuietRun(ttfts, 1 - len(ttfts) / count)


async def flood(url: str, seed: int) -> None:
    """Ask for one answer after the other until cancelled; a refusal is waited out."""
    rng = random.Random(seed)
    async with session(headers={"authorization": "Bearer loud"}) as http:
        while True:
            begun_s = time.monotonic()
            body = body_of(MODEL, random_prompt(LOUD_TOKENS, rng), ANSWER_TOKENS)
            if (await ask(http, url, body, ANSWER_TOKENS)).refusal:
                await asyncio.sleep(max(0.0, 1.0 - (time.monotonic() - begun_s)))


def rows_of(runs: dict[str, QuietRun]) -> list[ResultRow]:
    """Return the quiet tenant's first tokens, beside those of first come, first served."""
    first_come, rows = runs["one tenant"], []
    for name, run in runs.items():
        peer = "one tenant: first come, first served" if name == "two tenants" else None
        rows.append(
            ResultRow(
                "refused with 429", run.refused, "of all", {"load": name}, None, peer, peer and first_come.refused
            )
        )
        for share in (50, 99):
            ttft, alone = percentile(run.ttfts_s, share), percentile(runs["alone"].ttfts_s, share)
            peer_value = percentile(first_come.ttfts_s, share) if peer and first_come.ttfts_s else None
            params = {"load": name, "times alone": round(ttft / alone, 2)}
            words = f"first token of the quiet tenant, p{share}, of those that were answered"
            rows.append(ResultRow(words, ttft, "s", params, None, peer if peer_value else None, peer_value))
    return rows


if __name__ == "__main__":
    main()
