"""A small program that behaves as a service does, or misbehaves as it is told. Not a test."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from process.ready_file import ReadyFile


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--complain", default="")
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--pids", type=Path, required=True, help="folder: one file per process of this service")
    parser.add_argument("--with-core", action="store_true", help="start a process of its own, as a worker does")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.deaf else signal.default_int_handler)
    (options.pids / str(os.getpid())).touch()
    print("the service is starting", flush=True)
    if options.complain:
        sys.exit(options.complain)
    core = start_core(options.pids) if options.with_core else None
    if not options.never_ready:
        announce(options.ready_file, core)
    try:
        time.sleep(300)
    except KeyboardInterrupt:
        print("asked to stop", flush=True)


def start_core(pids: Path) -> subprocess.Popen:
    core = subprocess.Popen(["sleep", "300"])
    (pids / str(core.pid)).touch()
    return core


def announce(ready_file: Path, core: subprocess.Popen | None) -> None:
    ReadyFile(ready_file).write({"pid": os.getpid(), "core_pid": core.pid if core else None, "url": None})


if __name__ == "__main__":
    main()
