"""The command `tandem bench serve`, which puts load on a server: a table, a result file, plots."""

import argparse
import asyncio
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.load.client import QUIET_S, VOCABULARY, StreamResult, session
from bench.load.generator import (
    KeyWanted,
    Lengths,
    Measured,
    Point,
    TargetServer,
    first_model,
    measure,
    rows_of,
    version_of,
)
from bench.report.result import ResultRow, write_result
from contracts.errors import ConfigError, Unavailable
from tandem.commands import target

DESCRIPTION = "Put load on an OpenAI-compatible server and say how it bears it: a table, a result file, plots."
EXAMPLES = """\
examples:
  tandem bench serve                                        the system that runs here, 4 users, 128 tokens in and out
  tandem bench serve --lengths 1k/1k --concurrency 1,4,16   a sweep; the Pareto plot has a point for each
  tandem bench serve --lengths 8k/1k --rate 0.5             arrivals at random, whether or not the answers keep up
  tandem bench serve --url http://10.0.0.5:8000 --gpus 2 --lengths 1k/1k,1k/8k,8k/1k --concurrency 1,4,16,64

Prompts are random token ids, so that no cache helps; answers are greedy and run to their full length.
TTFT    from sending a request to the first event with a token
ITL     between two such events
E2E     from sending a request to the end of its answer
A failed request is counted by its reason and is in no other figure. Ctrl-C shows what was measured so far.
Plots need matplotlib. An API key is taken from TANDEM_API_KEY or OPENAI_API_KEY.
If no request was answered the code is 1.
"""
LENGTHS = re.compile(r"(\d+)(k?)/(\d+)(k?)")
USER_REQUESTS = 10
RATE_SECONDS = 60
MAX_COLUMNS = 5

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(name: str, words: str, **more: Any) -> None:
        parser.add_argument(name, help=words, **more)

    target.add_arguments(parser)
    add("--model", "the model to name; by default the first that the server lists", default="")
    _add_load(parser, add)
    _add_ways(add)
    add("--gpus", "GPUs of the server: throughput is per GPU", type=positive, default=0, metavar="N")
    add("--out", "where the files go (./tandem-bench-DAY-TIME)", type=Path, metavar="FOLDER")
    add("--no-plots", "no plots; then matplotlib is not needed", action="store_true")


def _add_load(parser: argparse.ArgumentParser, add: Callable) -> None:
    words = "tokens of prompt and answer, 1k being 1024 (128/128)"
    add("--lengths", words, type=many(lengths), default=[Lengths(128, 128)], metavar="IN/OUT,...")
    load = parser.add_mutually_exclusive_group()
    words = "closed loop: so many users, each with one request after the other (4)"
    load.add_argument("--concurrency", help=words, type=many(positive), default=[4], metavar="N,...")
    words = "open loop: requests a second, as a Poisson process"
    load.add_argument("--rate", help=words, type=many(positive_real), metavar="R,...")
    words = f"for each point ({USER_REQUESTS} a user, or as many as come in {RATE_SECONDS} s)"
    add("--requests", words, type=positive, metavar="N")


def _add_ways(add: Callable) -> None:
    add("--seed", "the same seed sends the same prompts at the same times (0)", type=int, default=0)
    words = f"give a request up when no token came for so long ({QUIET_S:.0f})"
    add("--timeout", words, type=positive_real, default=QUIET_S, metavar="SECONDS")
    words = f"draw token ids below this ({VOCABULARY}, which every supported family has)"
    add("--vocabulary", words, type=positive, default=VOCABULARY, metavar="N")


def many(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a parser of a list with commas."""

    def read(text: str) -> list[T]:
        return [kind(word) for word in text.split(",")]

    return read


def lengths(text: str) -> Lengths:
    """Return the lengths in a text such as 128/128 or 1k/8k."""
    found = LENGTHS.fullmatch(text)
    numbers = [int(n) * (1024 if k else 1) for n, k in (found.group(1, 2), found.group(3, 4))] if found else [0]
    if not all(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not IN/OUT as 128/128 or 1k/8k are")
    num_in, num_out = numbers
    return Lengths(num_in=num_in, num_out=num_out)


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def positive_real(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def run(options: argparse.Namespace, home: Path) -> int:
    if not options.no_plots and find_spec("matplotlib") is None:
        install = f"`{sys.executable} -m pip install matplotlib`"
        raise ConfigError(f"plots need matplotlib, which is not installed: {install}, or measure with --no-plots")
    sweep = Sweep(target.gateway_url(options, home), options)
    with folder_for(options.out) as folder:
        is_stopped = sweep.run()
        rows = [row for measured in sweep.measured for row in rows_of(measured, options.gpus)]
        show(sweep.measured, rows)
        is_answered = any(measured.good for measured in sweep.measured)
        if is_answered:
            files = save(folder, sweep, rows, not options.no_plots)
            print(f"wrote {', '.join(map(str, files))}")
    return 0 if is_answered or is_stopped else 1


@contextmanager
def folder_for(named: Path | None) -> Iterator[Path]:
    """Make the folder before anything is measured, and remove it if it is new and stays empty.

    Raises ConfigError if it can't be made.
    """
    folder = named or Path(f"tandem-bench-{datetime.now():%Y-%m-%d-%H%M%S}")
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"can't write to {folder}: {error.strerror}; name another folder with --out") from error
    try:
        yield folder
    finally:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


class Sweep:
    """The measurement of all points against one server, one after the other.

    `measured` holds the results so far at any moment.
    """

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self._url, self._options = url, options
        self.measured: list[Measured] = []
        self.config: dict = {}

    def run(self) -> bool:
        """Measure all points, and return whether Ctrl-C stopped it.

        The loss of the server ends it too, keeping what was measured before. Raises Unavailable if nothing was, and
        ConfigError if the model's context is too short for the lengths.
        """
        try:
            asyncio.run(self._run())
        except KeyboardInterrupt:
            print("stopped; what was measured so far:", file=sys.stderr)
            return True
        except Unavailable as error:
            if not any(one.good for one in self.measured):
                advice = f"; {target.key_advice()}" if isinstance(error, KeyWanted) else ""
                raise Unavailable(f"{error}{advice}") from error
            print(f"{error}; what was measured before:", file=sys.stderr)
        return False

    async def _run(self) -> None:
        options = self._options
        async with session(total_s=None, headers=target.key_headers()) as http:
            card = {"id": options.model} if options.model else await first_model(http, self._url)
            points = list(points_of(options))
            require_context(card, points)
            server = TargetServer(self._url, card["id"], options.vocabulary, options.timeout)
            self.config = {
                "url": self._url,
                "server_version": await version_of(http, self._url),
                "model": server.model,
                "points": [f"{point}, {point.num_requests} requests" for point in points],
                **{name: getattr(options, name) for name in ("seed", "vocabulary", "timeout", "gpus")},
            }
            for point in points:
                measured = Measured(point)
                self.measured.append(measured)
                with following(point) as tell:
                    await measure(http, server, measured, options.seed, tell)
                self.config["system_fingerprints"] = fingerprints(self.measured)


def points_of(options: argparse.Namespace) -> Iterator[Point]:
    """Yield the points of the sweep: all loads for each pair of lengths."""
    for each in options.lengths:
        if options.rate:
            for rate in options.rate:
                yield Point(each, None, rate, options.requests or max(10, round(RATE_SECONDS * rate)))
        else:
            for users in options.concurrency:
                yield Point(each, users, None, options.requests or USER_REQUESTS * users)


def require_context(card: Mapping, points: Sequence[Point]) -> None:
    """Raise ConfigError if the model's context is too short for a point."""
    longest = max((point.lengths for point in points), key=lambda each: each.num_in + each.num_out)
    num_tokens, context = longest.num_in + longest.num_out, card.get("max_model_len")
    if isinstance(context, int) and num_tokens > context:
        raise ConfigError(
            f"{longest} takes {num_tokens} tokens, and {card['id']} has a context of {context}: shorten --lengths"
        )


@contextmanager
def following(point: Point) -> Iterator[Callable[[StreamResult], None]]:
    """Show a progress bar on a terminal, else print a line at the end.

    Both go to standard error: the result is the table.
    """
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    counts = {"done": 0, "failed": 0}
    with Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{point}: warming up", total=point.num_requests)

        def tell(answer: StreamResult) -> None:
            counts["done"] += 1
            counts["failed"] += bool(answer.reason)
            failed = f", {counts['failed']} failed" if counts["failed"] else ""
            progress.update(task, advance=1, description=f"{point}{failed}")

        yield tell
    if not console.is_terminal:
        console.print(f"{point}: {counts['done']} requests, {counts['failed']} failed", soft_wrap=True)


def fingerprints(measured: Sequence[Measured]) -> list[str]:
    """Return what servers said of themselves, such as that their acceptance of drafts is set."""
    return sorted({answer.fingerprint for one in measured for answer in one.answers if answer.fingerprint})


def show(measured: Sequence[Measured], rows: Sequence[ResultRow]) -> None:
    """Print a table for each pair of lengths with a column for each point, at most 80 wide on a terminal."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for each, group in groupby(measured, key=lambda one: one.point.lengths):
        points = list(group)
        for begin in range(0, len(points), MAX_COLUMNS):
            console.print(table(f"{each} tokens in and out", points[begin : begin + MAX_COLUMNS], rows), "")
    for said in fingerprints(measured):
        if "synthetic" in said:
            console.print(f"{said}: how many drafted tokens count was set, not found", soft_wrap=True)
    for one in measured:
        for reason, count in one.reasons.most_common():
            first = next(answer.error for answer in one.answers if answer.reason == reason)
            console.print(f"{one.point}: {count} x {reason}: {first}", markup=False, soft_wrap=True)


def table(title: str, points: Sequence[Measured], rows: Sequence[ResultRow]) -> Table:
    """Return a table whose rows are the figures that any of the points has."""
    loads = [(str(one.point.lengths), one.point.users or one.point.rate) for one in points]
    values: dict[tuple[str, str], dict[object, float]] = {}
    for row in rows:
        load = (row.params["lengths"], row.params.get("users") or row.params["rate"])
        if load in loads and not row.name.startswith("failed: "):
            values.setdefault((row.name, row.unit), {})[load] = row.value
    shown = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    shown.add_column("", no_wrap=True)
    for one in points:
        shown.add_column(one.point.load, justify="right", no_wrap=True)
    for (name, unit), by_load in values.items():
        words = name if unit == "requests" else f"{name}, {unit}"
        shown.add_row(words, *(figure(by_load.get(load)) for load in loads))
    return shown


def figure(value: float | None) -> str:
    """Return three digits, or all digits of the whole part."""
    if value is None:
        return "-"
    return (
        f"{value:.0f}" if value >= 100 or isinstance(value, int) else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    )


def save(folder: Path, sweep: Sweep, rows: Sequence[ResultRow], with_plots: bool) -> list[Path]:
    """Write the result and the plots, and return the files."""
    file = write_result(folder / "result.json", "serve", rows, sweep.config)
    if not with_plots:
        return [file, file.with_suffix(".md")]
    from bench.load.plots import plot  # late: matplotlib need not be installed to serve

    return [file, file.with_suffix(".md"), *plot(folder, sweep.measured, sweep.config["gpus"])]
