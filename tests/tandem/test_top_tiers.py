"""The tiers below a worker's KV cache in `tandem top`: a line for each, and nothing where there are none."""

from rich.console import Console

from tandem.commands.top import view
from tandem.commands.top_snapshot import Look, Page, parse

METRICS = """\
# TYPE tandem_worker_kv_tier_on gauge
tandem_worker_kv_tier_on{{tier="host"}} 1.0
tandem_worker_kv_tier_on{{tier="store"}} 0.0
# TYPE tandem_worker_kv_tier_bytes gauge
tandem_worker_kv_tier_bytes{{tier="host"}} 2.5e+09
# TYPE tandem_worker_kv_tier_blocks gauge
tandem_worker_kv_tier_blocks{{tier="host"}} 7000.0
# TYPE tandem_worker_kv_tier_bytes_per_second gauge
tandem_worker_kv_tier_bytes_per_second{{tier="host"}} 3e+09
tandem_worker_kv_tier_bytes_per_second{{tier="store"}} 2e+08
# TYPE tandem_worker_kv_tier_loaded_blocks counter
tandem_worker_kv_tier_loaded_blocks_total{{tier="host"}} {loaded}
tandem_worker_kv_tier_loaded_blocks_total{{tier="store"}} 5.0
# TYPE tandem_worker_kv_tier_evicted_blocks counter
tandem_worker_kv_tier_evicted_blocks_total{{tier="host"}} 3.0
"""
ROW = {"id": "mixed-1", "role": "mixed", "port": 8000, "pid": 10, "state": "ready", "url": "http://127.0.0.1:9"}


def shown(before: Page, after: Page) -> list[list[str]]:
    """Return the words of each line of two looks that are two seconds apart."""
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        console.print(view(Look(0.0, [ROW], {10: before}, ""), Look(2.0, [ROW], {10: after}, ""), 100))
    return [line.split() for line in captured.get().splitlines()]


def test_each_tier_has_a_line_with_its_state_and_rates() -> None:
    lines = shown(parse(METRICS.format(loaded=10)), parse(METRICS.format(loaded=30)))
    assert ["host", "mixed-1", "up", "2.5", "7000", "10.0", "0.0", "3000.0"] in lines
    assert ["store", "mixed-1", "off", "-", "-", "0.0", "-", "200.0"] in lines


def test_a_worker_without_tiers_has_no_table_of_them() -> None:
    assert not any(line[:1] == ["tiers"] for line in shown(Page(), Page()))
