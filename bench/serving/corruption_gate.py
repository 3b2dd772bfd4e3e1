"""The gate that KV which outlives its worker must pass.

    python -m bench.serving.corruption_gate --conversations 500 --faults 1000
    python -m bench.serving.corruption_gate --conversations 20 --faults 40 --seed 2

No token may be wrong, no request lost, and every page comes back. First a single worker without tiers answers all turns
of the conversations, undisturbed. Then two prefill and two decode workers with KV in host memory, on disk and in a
store answer the same, from device pools that hold a few of the conversations, over a network that is partly so slow
that KV is compressed. Meanwhile records are damaged in each tier and KV on the wire, disks and the store are slow,
full, broken and gone, the network is cut, and services are killed, frozen and drained, so that answers move. A turn
whose request ends with an error is asked again until it is answered; an answer counts only if each of its tokens is
that of the single worker.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import torch

from bench.load.client import session
from bench.models.model_folder import SMALL, TINY, write_folder
from bench.report.result import ResultRow, write_result
from bench.serving.conversations import VOCABULARY, KnownConversation, complete, known_conversations
from bench.serving.counter_sums import CounterSums
from bench.serving.kept_kv import STORE_HOST, KeptKV, kv_places, optional_network
from bench.serving.kv_faults import DAMAGED
from bench.serving.kv_outages import OUTAGES
from bench.serving.network_faults import NETWORK_FAULTS
from bench.serving.service_faults import DRAINS, SERVICE_FAULTS, revive
from bench.system.leftovers import still_held
from bench.system.local_system import model_of
from bench.system.services import Services
from models.config import ModelConfig

ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
REST_TIMEOUT_S = 90.0
PROGRESS_S = 30.0
SHARE_OF_LONG_FAULTS = 0.045
"""The share of faults of services and of the network."""
SHARE_OF_OUTAGES = 0.08
"""The share of faults of disks and of the store among the others."""
SLOW_HOSTS = ("p1", STORE_HOST)
"""The hosts whose KV is compressed; between the others prefixes are pulled sooner than computed."""
NUM_BEGUN = 30
"""The conversations under way, whose KV is about eight times what a worker's cache holds."""
REVIVE_S = 1.0
"""How often it is looked what ended, once all faults were made."""
MEAN_PAUSE_S = 0.2
"""The pause between two faults of records: they take about as long as the others beside them."""
COMMON = {"TANDEM_NUM_THREADS": "1", "TANDEM_DTYPE": "float32"}
COUNTED = {
    "kv_loaded_blocks": "blocks",
    **{f"kv_{tier}_hit_blocks": "blocks" for tier in ("host", "disk", "store", "peer")},
    **{f"kv_{tier}_refused_blocks": "blocks" for tier in ("host", "disk", "store")},
    **{f"kv_{tier}_compressed_blocks": "blocks" for tier in ("disk", "store")},
    "kv_loads_given_up": "loads",
    **{f"kv_peer_{what}": "pulls" for what in ("loads", "given_up", "refused", "failed")},
    "kv_handoff_loaded_blocks": "blocks",
    "kv_saved_tokens": "tokens",
    "handoffs_committed": "handoffs",
    "chunks_bad": "chunks",
    "codec_nbytes": "bytes",
    "migrations_begun": "moves",
    "migrations_committed": "moves",
    "gateway_replays": "answers",
    "drafts": "drafts",
}
"""What workers and gateways count, and its unit: each must have happened for the gate to mean something.

Drafts only where the options ask for them.
"""


@dataclass
class GateReport:
    """What was done, what became of the requests, and what must be zero in the end."""

    done: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    num_right: int = 0
    num_wrong: int = 0
    num_lost: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    held: list[str] = field(default_factory=list)
    minutes: float = 0.0

    @property
    def is_passed(self) -> bool:
        return not (self.num_wrong or self.num_lost or self.held)

    def rows(self) -> list[ResultRow]:
        made = sum(self.done.values())
        rows = [ResultRow("faults made", made, "times", {"in minutes": round(self.minutes, 1)})]
        rows += [ResultRow(f"fault made: {name}", count, "times") for name, count in sorted(self.done.items())]
        rows += [ResultRow(f"asked again: {name}", count, "requests") for name, count in sorted(self.errors.items())]
        rows += [
            ResultRow("share of prompt tokens cached", self.num_cached_tokens / max(1, self.num_prompt_tokens), ""),
            *(ResultRow(f"counted: {name}", self.counters[name], unit) for name, unit in COUNTED.items()),
            ResultRow("right answers", self.num_right, "answers"),
            ResultRow("wrong answers", self.num_wrong, "answers"),
            ResultRow("requests lost", self.num_lost, "requests"),
            ResultRow("not given back at rest", len(self.held), "things"),
        ]
        return rows


def main() -> int:
    args = parse()
    rng = random.Random(args.seed)
    with ExitStack() as stack:
        folder = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-gate-")))
        if (config := MODELS[args.model].config) is not None:
            write_folder(folder / "model", config, torch.device("cpu"), GAIN)
        conversations = asyncio.run(undisturbed(folder / "single", args, rng))
        print(f"{len({tuple(one.turns[-1].answer) for one in conversations})} different last answers", file=sys.stderr)
        report = asyncio.run(disturbed(folder / "tiers", args, conversations, rng))
    for row in report.rows():
        print(f"{row.name:44s} {row.value:>10.6g} {row.unit}")
    for line in report.held:
        print(line, file=sys.stderr)
    names = ("conversations", "turns", "faults", "seed", "model", "clients", "transfer", "options")
    write_result(args.out, "corruption-gate", report.rows(), {name: getattr(args, name) for name in names})
    return 0 if report.is_passed else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--faults", type=int, default=1000, help="the conversations go on until as many were made")
    parser.add_argument("--model", choices=list(MODELS), default="default", help="random small ones for busy machines")
    parser.add_argument("--clients", type=int, default=12, help="how many ask at the same time")
    parser.add_argument("--transfer", default="tcp", help="only tcp is compressed, and wholly goes over the network")
    parser.add_argument("--options", nargs="*", default=[], help="further NAME=VALUE settings of the workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, default=None, help="a new folder to keep the services' logs in")
    parser.add_argument("--out", type=Path, default=None, help="result file")
    return parser.parse_args()


@dataclass(frozen=True)
class ModelSizes:
    """The sizes that depend on the model.

    `config`: of a random model, None for the default one. `cache_mib`: of a cache that holds five turns. `scale`: of
    the tiers below. `rate_mbit`: of the links of SLOW_HOSTS.
    """

    config: ModelConfig | None
    vocabulary: int
    cache_mib: int
    scale: float
    rate_mbit: float


MODELS = {
    "default": ModelSizes(None, VOCABULARY, 32, 1.0, 200.0),
    "small": ModelSizes(SMALL, SMALL.vocab_size, 12, 0.36, 70.0),
    "tiny": ModelSizes(TINY, TINY.vocab_size, 1, 0.0225, 5.0),
}
GAIN = 3.0
"""The gain of the matrices of random models; with less their answers hardly depend on their prompts."""


def model_setting(folder: Path, args: argparse.Namespace) -> dict[str, str]:
    return {"TANDEM_MODEL": str(folder.parent / "model")} if MODELS[args.model].config else {}


async def undisturbed(folder: Path, args: argparse.Namespace, rng: random.Random) -> list[KnownConversation]:
    """Return the conversations with the answers of one worker without tiers."""
    folder.mkdir(parents=True)
    with Services(
        folder,
        {"m0": ("--role", "mixed")},
        **COMMON | model_setting(folder, args) | {"TANDEM_NUM_THREADS": "2" if args.model == "default" else "1"},
    ) as services:
        await services.start_all(REST_TIMEOUT_S)
        async with session() as http:
            model = model_of(services.url)
            return await known_conversations(
                http, services.url, model, args.conversations, args.turns, rng, MODELS[args.model].vocabulary
            )


async def disturbed(
    folder: Path, args: argparse.Namespace, conversations: list[KnownConversation], rng: random.Random
) -> GateReport:
    workers = {name: ("--role", role, "--transfer", args.transfer) for name, role in ROLES.items()}
    rates = {host: MODELS[args.model].rate_mbit for host in SLOW_HOSTS}
    with ExitStack() as stack:
        network = stack.enter_context(optional_network([*ROLES, STORE_HOST], rates))
        places = stack.enter_context(kv_places(folder, network, MODELS[args.model].scale))
        settings = COMMON | places.settings() | model_setting(folder, args)
        settings["TANDEM_KV_CACHE_MIB"] = str(MODELS[args.model].cache_mib)
        settings |= dict(option.split("=", 1) for option in args.options)
        services = stack.enter_context(Services(folder, workers, network, **settings))
        await services.start_all(REST_TIMEOUT_S)
        return await play(KeptKV(services, places), args, conversations, rng)


async def play(
    kept: KeptKV, args: argparse.Namespace, conversations: list[KnownConversation], rng: random.Random
) -> GateReport:
    """Hold the conversations, again and again until all faults were made, and check what is left at rest."""
    report, services, started = GateReport(), kept.services, time.monotonic()
    table = Table(conversations, random.Random(f"{args.seed} order"))
    sums = CounterSums(services)
    async with session() as http:
        model = model_of(services.url)
        clients = [asyncio.create_task(client(http, services.url, model, table, report)) for _ in range(args.clients)]
        striker = asyncio.create_task(strike_and_revive(kept, args.faults, rng, report, table))
        teller = asyncio.create_task(tell(report, table, args.faults))
        follower = asyncio.create_task(sums.follow(http))
        try:
            talks = asyncio.gather(*clients)
            await asyncio.wait([striker, talks], return_when=asyncio.FIRST_COMPLETED)
            await (talks if talks.done() else striker)  # the latter has failed
        finally:
            striker.cancel()
            teller.cancel()
            follower.cancel()
        await rest(services, report)
        await sums.look(http)
    report.counters.update(sums.sums())
    report.minutes = (time.monotonic() - started) / 60
    return report


class Table:
    """The conversations that are under way: who asks takes a turn of one that nobody else holds."""

    def __init__(self, conversations: list[KnownConversation], rng: random.Random) -> None:
        self._all, self._rng = conversations, rng
        self._free = list(conversations)
        self._never_ended = set(conversations)
        self.is_struck = False
        self.num_rounds = 0

    @property
    def num_open(self) -> int:
        return sum(conversation.num_done < len(conversation.turns) for conversation in self._all)

    def take(self) -> KnownConversation | None:
        """Return one with a turn left, or None once each has ended and all faults were made.

        At most NUM_BEGUN are between their first turn and their last, so that a turn finds the one before it below.
        """
        waiting = [one for one in self._free if one.num_done < len(one.turns)]
        if self.is_struck:
            waiting = [one for one in waiting if one in self._never_ended]
        begun = [one for one in waiting if one.num_done]
        waiting = begun if len(begun) >= NUM_BEGUN else waiting
        if not waiting and not self.is_struck and self._free:
            self.num_rounds += 1
            for conversation in self._free:
                conversation.num_done = 0
            waiting = self._free
        if not waiting:
            return None
        taken = self._rng.choice(waiting)
        self._free.remove(taken)
        return taken

    def give_back(self, conversation: KnownConversation) -> None:
        conversation.num_done += 1
        if conversation.num_done == len(conversation.turns):
            self._never_ended.discard(conversation)
        self._free.append(conversation)


async def client(http: aiohttp.ClientSession, url: str, model: str, table: Table, report: GateReport) -> None:
    while (conversation := table.take()) is not None:
        turn = conversation.turns[conversation.num_done]
        while (reply := await complete(http, url, model, turn.prompt, len(turn.answer))).error:
            report.errors[words_of(reply.error)] += 1
            if reply.error.startswith("lost"):
                report.num_lost += 1
                break
            await asyncio.sleep(0.3)
        else:
            report.num_cached_tokens += reply.num_cached
            report.num_prompt_tokens += len(turn.prompt)
            if reply.tokens == turn.answer:
                report.num_right += 1
            else:
                report.num_wrong += 1
                print(f"wrong: {reply.tokens}, not {turn.answer}", file=sys.stderr)
        table.give_back(conversation)


def words_of(error: str) -> str:
    """Return an error without what differs from one request to the next."""
    return " ".join(word for word in error.split() if not any(map(str.isdigit, word)) or word.isdigit())[:80]


async def strike_and_revive(
    kept: KeptKV, num_faults: int, rng: random.Random, report: GateReport, table: Table
) -> None:
    """Make the faults, then start again what ends, until cancelled.

    A worker that drains ends long after its fault; with no decode worker left, nobody would be answered any more.
    """
    await strike(kept, num_faults, rng, report, table)
    while True:
        await revive(kept.services)
        await asyncio.sleep(REVIVE_S)


async def strike(kept: KeptKV, num_faults: int, rng: random.Random, report: GateReport, table: Table) -> None:
    """Make the faults: those of records beside those of services and the network, which take longer."""
    num_long = round(num_faults * SHARE_OF_LONG_FAULTS)
    await asyncio.gather(
        strike_services(kept, num_long, random.Random(rng.random()), report),
        strike_records(kept, num_faults - num_long, random.Random(rng.random()), report),
    )
    table.is_struck = True


async def strike_services(kept: KeptKV, num_faults: int, rng: random.Random, report: GateReport) -> None:
    """Make faults one after another; what one of them ended is started again before the next."""
    services = kept.services
    network = NETWORK_FAULTS if services.network else {}
    for _ in range(num_faults):
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        kinds = [SERVICE_FAULTS, DRAINS, network or DRAINS]
        name, fault = rng.choice(list(rng.choice(kinds).items()))
        await fault(services, rng)
        report.done[name] += 1
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        await revive(services)


async def strike_records(kept: KeptKV, num_faults: int, rng: random.Random, report: GateReport) -> None:
    num_made = 0
    while num_made < num_faults:
        await asyncio.sleep(rng.uniform(0.0, 2 * MEAN_PAUSE_S))
        faults = OUTAGES if rng.random() < SHARE_OF_OUTAGES else DAMAGED
        name = rng.choice(list(faults))
        if await faults[name](kept, rng):
            report.done[name] += 1
            num_made += 1


async def rest(services: Services, report: GateReport) -> None:
    """Wait until nothing is held any more; what still is after a while goes into the report."""
    until = time.monotonic() + REST_TIMEOUT_S
    await revive(services)
    while (held := await still_held(services)) and time.monotonic() < until:
        await revive(services)  # a worker that drained may have ended only now
        await asyncio.sleep(0.5)
    report.held = held


async def tell(report: GateReport, table: Table, num_faults: int) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        print(
            f"{sum(report.done.values())} of {num_faults} faults, {report.num_right} answers right, "
            f"{report.num_wrong} wrong, {table.num_open} conversations open in round {table.num_rounds + 1}",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
