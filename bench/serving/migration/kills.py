"""Kills and freezes of each service at each point of a migration: every answer goes on exactly once."""

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import aiohttp

from bench.load.client import session
from bench.report.result import ResultRow
from bench.serving.migration.halting_core import POINTS
from bench.serving.migration.movable_requests import StreamedReply, stream_reply
from bench.serving.migration.moving_services import MovingServices
from bench.serving.service_faults import revive
from bench.system.leftovers import still_held

SOURCE, DESTINATION = "source", "destination"
REDIS = "Redis"
TARGETS = (SOURCE, DESTINATION, "gateway", "coordinator", REDIS)
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
FREEZE_S = 4.5
"""Longer than the 3 s after which a silent peer is lost."""
REACH_TIMEOUT_S, REST_TIMEOUT_S, SETTLE_S = 20.0, 60.0, 0.05
MAX_TRIES = 3
AT_SOURCE = ("during copy", "after Moved")
SHARE = 1.0


@dataclass(frozen=True)
class KillCase:
    """One case: what is done, to whom, at which point of a move."""

    target: str
    number: signal.Signals
    point: str

    @property
    def name(self) -> str:
        return f"{self.number.name} of {self.target}, {self.point}"


@dataclass
class KillsReport:
    """What became of the answers of all cases.

    `excused`: those of a gateway that was killed. All lists must be empty.
    """

    num_cases: Counter[str] = field(default_factory=Counter)
    unreached: list[str] = field(default_factory=list)
    num_right: int = 0
    excused: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    span_s: float = 0.0

    @property
    def is_passed(self) -> bool:
        return not (self.wrong or self.lost or self.held or self.unreached)

    def rows(self) -> list[ResultRow]:
        """Return the figures."""
        return [
            *(ResultRow(f"kills and freezes of {target}", count, "") for target, count in self.num_cases.items()),
            ResultRow("points that were not reached", len(self.unreached), ""),
            ResultRow("right answers around kills and freezes", self.num_right, "", {"s": round(self.span_s)}),
            ResultRow("answers that ended with a killed gateway", self.excused, ""),
            ResultRow("wrong answers around kills and freezes", len(self.wrong), ""),
            ResultRow("answers lost around kills and freezes", len(self.lost), ""),
            ResultRow("cases after which something was not given back", len(self.held), ""),
        ]


def cases(targets: Sequence[str], points: Sequence[str] = POINTS) -> list[KillCase]:
    """Return each fault at each point."""
    return [KillCase(target, number, point) for point in points for target in targets for number in SIGNALS]


async def kill_at_points(
    services: MovingServices, right: Sequence[StreamedReply], chosen: Sequence[KillCase]
) -> KillsReport:
    """Make each case with answers of its own, and look what is left."""
    report, began_s = KillsReport(), time.monotonic()
    for index, case in enumerate(chosen):
        few = [right[(2 * index + offset) % len(right)] for offset in range(2)]
        failures = len(report.wrong), len(report.lost), len(report.held), len(report.unreached)
        case_s = time.monotonic()
        await _one(services, few, case, report)
        report.num_cases[case.target] += 1
        is_well = failures == (len(report.wrong), len(report.lost), len(report.held), len(report.unreached))
        words = f"{index + 1} of {len(chosen)}, {time.monotonic() - case_s:.1f} s: {case.name}"
        print(f"{words}: {'well' if is_well else 'NOT WELL'}", file=sys.stderr, flush=True)
    report.span_s = time.monotonic() - began_s
    return report


async def _one(services: MovingServices, right: Sequence[StreamedReply], case: KillCase, report: KillsReport) -> None:
    async with session() as http:
        for _ in range(MAX_TRIES):
            services.arm(case.point)
            asked = [asyncio.create_task(_asked(http, services, each)) for each in right]
            services.order(SHARE)
            try:
                at = await services.reached(REACH_TIMEOUT_S)
            except TimeoutError:
                services.order(0)
                await asyncio.gather(*asked)
                continue
            services.order(0)
            await asyncio.sleep(SETTLE_S)  # what was sent before the point is there
            await _strike(services, case, at)
            replies = await asyncio.gather(*asked)
            await revive(services)
            _judge(case, replies, right, report)
            if held := await _left(services):
                report.held.append(f"{case.name}: {held}")
            return
    report.unreached.append(case.name)


async def _asked(http: aiohttp.ClientSession, services: MovingServices, right: StreamedReply) -> StreamedReply:
    return await stream_reply(http, services.url, replace(right.request, name=f"{right.request.name}.0"))


async def _strike(services: MovingServices, case: KillCase, at: str) -> None:
    """Do it while the core of worker `at` halts, then let that go on; what was frozen goes on later."""
    other = next(name for name in services.workers if name != at)
    is_source = case.point in AT_SOURCE
    names = {SOURCE: at if is_source else other, DESTINATION: other if is_source else at}
    name = names.get(case.target, case.target)
    if case.number is signal.SIGKILL:
        await _kill(services, name)
        services.go_on()
        if (
            name not in services.workers
        ):  # the other worker goes on alone, and this one is there again for the next case
            await _start_again(services, name)
    else:
        _signal(services, name, signal.SIGSTOP)
        services.go_on()
        await asyncio.sleep(FREEZE_S)
        _signal(services, name, signal.SIGCONT)


def _signal(services: MovingServices, name: str, number: signal.Signals) -> None:
    if name == REDIS:
        assert services.redis.pid is not None
        os.kill(services.redis.pid, number)
        return
    services.signal(name, number)
    if name in services.workers:
        services.signal(name, number, to_core=True)


async def _kill(services: MovingServices, name: str) -> None:
    if name == REDIS:
        _signal(services, name, signal.SIGKILL)
        await asyncio.to_thread(services.redis.stop)
    else:
        services.signal(name, signal.SIGKILL)  # a core ends with its front
        await services.ended(name)


async def _start_again(services: MovingServices, name: str) -> None:
    if name == REDIS:
        services.redis.start()  # empty; it ends with the thread that starts it
    else:
        services.start(name)
        await services.ready(name)


def _judge(
    case: KillCase, replies: Sequence[StreamedReply], right: Sequence[StreamedReply], report: KillsReport
) -> None:
    is_cut = case.target == "gateway" and case.number is signal.SIGKILL
    for reply, meant in zip(replies, right, strict=True):
        words = reply.difference(meant)
        if not words:
            report.num_right += 1
        elif is_cut and reply.error.startswith("connection lost"):
            report.excused += 1
        else:
            failed = report.lost if reply.error else report.wrong
            failed.append(f"{case.name}, {reply.request.kind}: {words}")
            print(failed[-1], file=sys.stderr, flush=True)


async def _left(services: MovingServices) -> list[str]:
    """Return what is held still after a while: nothing, if it is right."""
    until = time.monotonic() + REST_TIMEOUT_S
    while (held := await still_held(services)) and time.monotonic() < until:
        await revive(services)
        await asyncio.sleep(0.2)
    return held
