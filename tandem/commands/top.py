"""The command `tandem top`: a live view of the running systems, from the metrics of their processes."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tandem.commands import ps
from tandem.commands.top_snapshot import REQUESTS, Change, LinkView, Look, Samples, change, look

DESCRIPTION = "Watch the running systems: who is busy, how full KV caches are, what is moved, how fast answers come."
EXAMPLES = """\
examples:
  tandem top                   until Ctrl-C
  tandem top --once            one look of two seconds, for a script or a report
  tandem top --port 8000       only that system

requests        that ended; errors are those of ours: neither what a client asked wrong nor a refusal because of load
run, wait       requests that a worker computes, and that wait there for their turn
KV              how much of the cache running requests hold; what is kept for later prompts counts as free
prompt, answer  tokens computed of prompts, and produced of answers
MB/s            KV sent (prefill) or received (decode); a link's own is under `links`, with the transport really taken
codec           levels at which a link's KV is compressed, and how many times smaller that makes what it sends
tiers           what keeps KV below a cache: what it holds, blocks loaded and forgotten a second, and its speed
handoffs        requests between prefill and decode now: pages asked for, refused until some are free, granted while
                chunks cross, committed and decoding
migrations      running answers that moved to another worker a second, and for how long each was paused
Rates and times are means over the last interval; - is what nobody has measured yet.
"""
STYLES = {
    "ready": "green",
    "draining": "yellow",
    "turning": "yellow",
    "unhealthy": "bold red",
    "dead": "bold red",
    "off": "bold red",
    "starting": "yellow",
    "up": "green",
}
WORKER_COLUMNS = ("worker", "state", "run", "wait", "KV", "prompt t/s", "answer t/s", "MB/s", "handoffs/s")
GATEWAY_COLUMNS = ("gateway", "state", "in flight", "requests/s", "errors/s", "tok/s", "TTFT ms", "ITL ms")
LINK_COLUMNS = ("links", "by", "state", "codec", "MB of KV", "MB/s")
TIER_COLUMNS = ("tiers", "of", "state", "GB", "blocks", "loaded/s", "evicted/s", "MB/s")
HANDOFFS = {"RESERVING": "offered", "HELD": "waiting for pages", "TRANSFERRING": "granted", "COMMITTED": "committed"}
"""The states of the coordinator's table that a handoff passes -> their names in this view."""
MOVED, PAUSED = "tandem_worker_migrations_committed_total", "tandem_worker_migration_pause_seconds_total"
DRAFTS, ACCEPTED = "tandem_worker_drafts_total", "tandem_worker_accepted_tokens_total"
WIDE = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, help="only the system whose gateway has this port")
    parser.add_argument("--interval", type=seconds, default=2.0, help="seconds between two looks (2)")
    parser.add_argument(
        "--once", action="store_true", help="print one view and end; so it is where output is no terminal"
    )


def seconds(text: str) -> float:
    number = float(text)
    if not 0.1 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"{text} s are not between 0.1 and 3600")
    return number


def run(options: argparse.Namespace, home: Path) -> int:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDE)  # a pipe has no window to fit
    before = look(home, options.port)
    if options.once or not console.is_terminal or console.is_dumb_terminal:
        if before.rows:
            time.sleep(options.interval)
        console.print(view(before, look(home, options.port), console.width))
    else:
        _watch(console, options, home, before)
    return 0


def _watch(console: Console, options: argparse.Namespace, home: Path, before: Look) -> None:
    with Live(console=console, auto_refresh=False, screen=True) as live:
        after = before  # a first view without rates, which need a second look
        while True:
            title = Text(
                f"tandem top   {time.strftime('%H:%M:%S')}   every {options.interval:g} s   Ctrl-C ends", "dim"
            )
            live.update(Group(title, Text(), view(before, after, console.width)), refresh=True)
            time.sleep(options.interval)
            before, after = after, look(home, options.port)


def view(before: Look, after: Look, width: int) -> Group:
    """Return the view, which fits into `width` columns of 80 or more."""
    if not after.rows:
        return Group(Text(after.why))
    parts = []
    for port in sorted({int(row["port"] or 0) for row in after.rows}):
        rows = [row for row in after.rows if row["port"] == port]
        gap = 1 if width < WIDE else 3
        views = (_gateways, _handoffs, _migrations, _drafts, _workers, _links, _tiers)
        made = [table(rows, before, after, gap) for table in views]
        parts += [part for table in made if table is not None for part in (table, Text())]
    return Group(*parts[:-1])


def _gateways(rows: Sequence[ps.Row], before: Look, after: Look, gap: int) -> Table:
    table = _table(GATEWAY_COLUMNS, gap)
    for row in rows:
        if row["role"] == "gateway":
            now = change(row, before, after)
            prefix = "tandem_gateway"
            table.add_row(
                f"{row['id']} :{row['port']}",
                _state(row["state"]),
                _number(now.after.get(f"{prefix}_inflight")),
                _number(now.rate(REQUESTS), 1),
                _number(now.rate("errors"), 1),
                _number(now.rate(f"{prefix}_completion_tokens_total")),
                _number(_ms(now.mean(f"{prefix}_ttft_seconds"))),
                _number(_ms(now.mean(f"{prefix}_itl_seconds")), 1),
            )
    return table


def _handoffs(rows: Sequence[ps.Row], before: Look, after: Look, gap: int) -> Text:
    line = Text("handoffs", "dim")
    states = next((after.page(row).states for row in rows if row["role"] == "coordinator"), {})
    for state, name in HANDOFFS.items():
        number = int(states.get(state, 0))
        line.append(f"{' ' * (gap + 2)}{number} {name}", "bold not dim" if number else "dim")
    return line


def _migrations(rows: Sequence[ps.Row], before: Look, after: Look, gap: int) -> Text | None:
    """Return a line about answers that moved, or None while none has."""
    changes = [change(row, before, after) for row in rows if row["role"] in ps.WORKERS]
    if not any(since.after.get(MOVED) for since in changes):
        return None
    rate = sum(since.rate(MOVED) or 0.0 for since in changes)
    paused_s = sum(since.rate(PAUSED) or 0.0 for since in changes)
    line = Text("migrations", "dim")
    line.append(f"{' ' * (gap + 2)}{_number(rate, 1)}/s", "bold not dim" if rate else "dim")
    line.append(f"{' ' * (gap + 2)}paused {_number(_ms(paused_s / rate if rate else None), 1)} ms each", "dim")
    return line


def _drafts(rows: Sequence[ps.Row], before: Look, after: Look, gap: int) -> Text | None:
    """Return a line about speculative decoding, or None while no worker has verified a draft."""
    changes = [change(row, before, after) for row in rows if row["role"] in ps.WORKERS]
    if not any(since.after.get(DRAFTS) for since in changes):
        return None
    rate, right = (sum(since.rate(name) or 0.0 for since in changes) for name in (DRAFTS, ACCEPTED))
    line = Text("drafts", "dim")
    line.append(f"{' ' * (gap + 2)}{_number(rate, 1)}/s", "bold not dim" if rate else "dim")
    line.append(f"{' ' * (gap + 2)}{_number(1 + right / rate if rate else None, 2)} tokens a step with one", "dim")
    return line


def _workers(rows: Sequence[ps.Row], before: Look, after: Look, gap: int) -> Table:
    table = _table(WORKER_COLUMNS, gap)
    for row in rows:
        if row["role"] in ps.WORKERS:
            since = change(row, before, after)
            now = {name.removeprefix("tandem_worker_"): value for name, value in since.after.items()}
            table.add_row(
                str(row["id"]),
                _state(row["state"]),
                _number(now.get("running")),
                _number(now.get("waiting")),
                _kv(now),
                _number(since.rate("tandem_worker_prefill_tokens_total")),
                _number(since.rate("tandem_worker_decode_tokens_total")),
                _megabytes(since.rate("tandem_link_nbytes_total")),
                _number(_ended(since), 1),
            )
    return table


def _links(rows: Sequence[ps.Row], before: Look, after: Look, gap: int) -> Table | Text:
    """Return a table with a line for each sending end of a link, or a note if there is none yet."""
    table = _table(LINK_COLUMNS, gap, num_words=4)
    for row in rows:
        earlier = {link.peer: link.nbytes for link in before.page(row).links}
        for link in after.page(row).links:
            span_s = after.at_s - before.at_s
            moved = (link.nbytes - earlier.get(link.peer, 0.0)) / span_s if span_s else None
            words = f"{row['id']} → {link.peer}", link.transport, _state(link.state), _codec(link)
            table.add_row(*words, _megabytes(link.nbytes), _megabytes(moved))
    return table if table.row_count else Text("no KV was moved yet", "dim")


def _tiers(rows: Sequence[ps.Row], before: Look, after: Look, gap: int) -> Table | None:
    """Return a table with a line for each tier below a worker's KV cache; None if there are none."""
    table = _table(TIER_COLUMNS, gap, num_words=3)
    for row in rows:
        earlier = before.page(row).tiers
        for name, now in after.page(row).tiers.items():
            since = Change(earlier.get(name, {}), now, after.at_s - before.at_s)
            table.add_row(
                name,
                str(row["id"]),
                _state("up" if now.get("on", 1.0) else "off"),
                _number(now["bytes"] / 1e9 if "bytes" in now else None, 1),
                _number(now.get("blocks")),
                _number(since.rate("loaded_blocks_total"), 1),
                _number(since.rate("evicted_blocks_total"), 1),
                _megabytes(now.get("bytes_per_second")),
            )
    return table if table.row_count else None


def _codec(link: LinkView) -> str:
    """Return the levels of a link and its ratio, such as "lossless 1.2x"; "-" if nothing was compressed."""
    names = " ".join(name for name in link.levels if name != "raw")
    before, sent = (sum(sizes) for sizes in zip(*link.levels.values(), strict=True)) if names else (0.0, 0.0)
    return f"{names} {before / sent:.1f}x" if sent else "-"


def _table(columns: Sequence[str], gap: int, num_words: int = 2) -> Table:
    """Return a table whose first `num_words` columns are words, the others figures."""
    table = Table(box=None, header_style="dim", padding=(0, gap, 0, 0), pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < num_words else "right", no_wrap=True)
    return table


def _state(state: object) -> Text:
    return Text(str(state), style=STYLES.get(str(state), "dim"))


def _kv(now: Samples) -> str:
    capacity = now.get("capacity_tokens")
    return f"{1 - now['free_tokens'] / capacity:.0%}" if capacity else "-"


def _ended(since: Change) -> float | None:
    names = (f"tandem_worker_{name}_committed_total" for name in ("handoffs", "kv_handoffs_received"))
    return since.rate(*(name for name in names if name in since.after))


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1000


def _megabytes(nbytes: float | None) -> str:
    return _number(None if nbytes is None else nbytes / 1e6, 1)


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
