"""The child of `bench.engine.start`: one engine as a worker loads it, and what it took.

`python -m bench.engine.start_worker DTYPE MODEL`. Prints its seconds as JSON when the engine is ready, and its memory
when it is asked to, by a line of its input; ends with its input.
"""

import json
import sys
import time
from pathlib import Path

_STARTED = time.perf_counter()


def main() -> None:
    import worker.core.main  # noqa: F401 - a worker's imports are a part of what is measured
    from engine.loader import load_engine
    from engine.settings import EngineSettings

    imported = time.perf_counter()
    engine = load_engine(EngineSettings(dtype=sys.argv[1], model=sys.argv[2], num_threads=1))
    ready = time.perf_counter()
    say(
        import_s=imported - _STARTED,
        load_s=ready - imported,
        cpu_s=time.process_time(),
        kv_nbytes=engine.pool_bytes.nbytes,
        file_nbytes=engine.checkpoint.path.stat().st_size,
    )
    for _ in sys.stdin:
        say(**memory())


def say(**facts: float) -> None:
    print(json.dumps(facts), flush=True)


def memory() -> dict[str, int]:
    """Return what this process has in memory, in bytes: all, its share with others, and its own alone."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    kib = {row[0].rstrip(":"): int(row[1]) for row in rows if row[-1] == "kB"}
    return {
        "rss": kib["Rss"] << 10,
        "pss": kib["Pss"] << 10,
        "own": (kib["Private_Dirty"] + kib["Private_Clean"]) << 10,
    }


if __name__ == "__main__":
    main()
