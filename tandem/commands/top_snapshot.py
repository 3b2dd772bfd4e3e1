"""The metrics of all processes of the running systems at one moment, and their change between two."""

import http.client
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gateway.error_codes import NOT_OURS
from process.local_http import open_local
from tandem.commands import ps

TIMEOUT_S = 2.0
REQUESTS = "tandem_gateway_requests_total"
STATES = "tandem_coordinator_requests"
SENT = "tandem_link_nbytes_total"
CODED, CODED_SENT = "tandem_link_codec_nbytes_total", "tandem_link_codec_wire_nbytes_total"

TIER = "tandem_worker_kv_tier_"

Samples = dict[str, float]
"""Sample name -> value, summed over its labels."""


@dataclass(frozen=True)
class LinkView:
    """An outgoing end of a handoff link; `transport` is the one in use.

    `levels`: of a link that may compress its KV, by name, bytes before and as they were sent.
    """

    peer: str
    transport: str
    state: str
    nbytes: float
    levels: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Page:
    """The metrics of one process.

    `states`: how many requests are in each, at the coordinator. Among the sums is `errors`: the gateway's requests that
    ended in an error of ours. `tiers`: by name, the metrics of each tier below a worker's KV cache, without TIER.
    """

    sums: Samples = field(default_factory=dict)
    states: Samples = field(default_factory=dict)
    links: tuple[LinkView, ...] = ()
    tiers: Mapping[str, Samples] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """All processes at one moment.

    `pages` by process id, empty for one that did not answer. Without rows, `why` says what runs.
    """

    at_s: float
    rows: list[ps.Row]
    pages: dict[int, Page]
    why: str

    def page(self, row: ps.Row) -> Page:
        return self.pages.get(int(row["pid"] or 0), Page())


@dataclass(frozen=True)
class Change:
    """The change of one process between two looks."""

    before: Samples
    after: Samples
    span_s: float

    def rate(self, *names: str) -> float | None:
        """Return the growth per second of the sum of counters; None unless both looks have all of them."""
        if not names or not self.span_s or not all(name in self.before and name in self.after for name in names):
            return None
        return max(0.0, sum(self.after[name] - self.before[name] for name in names)) / self.span_s

    def mean(self, histogram: str) -> float | None:
        """Return the mean of the values observed in between; None if there are none."""
        count, total = (self.rate(f"{histogram}_{part}") for part in ("count", "sum"))
        return total / count if count and total is not None else None


def look(home: Path, port: int | None) -> Look:
    """Read the metrics of all processes, or of those of one system."""
    found = list(ps.list_processes(home))
    rows = [row for row in found if port in (None, row["port"])]
    served = [row for row in rows if row["pid"] and str(row["url"]).startswith("http")]
    pages = {int(row["pid"] or 0): _read(f"{row['url']}/metrics") for row in served}
    return Look(time.monotonic(), rows, pages, "" if rows else ps.nothing_runs(found, port))


def change(row: ps.Row, before: Look, after: Look) -> Change:
    """Return the change of one process between two looks."""
    return Change(before.page(row).sums, after.page(row).sums, after.at_s - before.at_s)


def _read(url: str) -> Page:
    """Return the metrics at this URL; empty if it does not answer, which the row's state explains."""
    try:
        with open_local(url, TIMEOUT_S) as response:
            return parse(response.read().decode())
    except (http.client.HTTPException, OSError):
        return Page()


def parse(text: str) -> Page:
    """Return the metrics in a page of Prometheus text."""
    sums: Samples = {}
    states: Samples = {}
    links: list[LinkView] = []
    levels: defaultdict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    tiers: defaultdict[str, Samples] = defaultdict(dict)
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        name, labels, value = sample.name, sample.labels, sample.value
        sums[name] = sums.get(name, 0.0) + value
        if name.startswith(TIER):
            tiers[labels["tier"]][name.removeprefix(TIER)] = value
        elif name == REQUESTS:
            sums["errors"] = sums.get("errors", 0.0) + (labels.get("code") not in NOT_OURS) * value
        elif name == STATES:
            states[labels["state"]] = value
        elif name == SENT and labels.get("direction") == "out":
            links.append(LinkView(labels["peer"], labels["transport"], labels["state"], value))
        elif name in (CODED, CODED_SENT) and labels["direction"] == "out":
            before, sent = levels[labels["peer"]].get(labels["level"], (0.0, 0.0))
            levels[labels["peer"]][labels["level"]] = (value, sent) if name == CODED else (before, value)
    return Page(sums, states, tuple(replace(link, levels=levels.get(link.peer, {})) for link in links), tiers)
