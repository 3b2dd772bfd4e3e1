"""A supervisor in a process of its own, over fake services: `supervise.py FOLDER JSON`. Not a test.

FOLDER/disk, if there, holds its state, the logs and the ready files; else FOLDER does.

JSON: a list of {name, stage, options, is_vital, begins}. Exits as `tandem up` does.
"""

import json
import os
import sys
from pathlib import Path

from rich.console import Console

from contracts.errors import ConfigError
from tandem.commands.up import StateFile
from tandem.local.child import ChildProcess, ProcessSpec, ready_file
from tandem.local.console_output import plain
from tandem.local.run_dir import RunDir
from tandem.local.signals import SignalInbox
from tandem.local.supervisor import StopRequested, Supervisor, VitalDeath

FAKE = Path(__file__).with_name("fake_service.py")
START_TIMEOUT_S = 90.0


def main() -> int:
    folder, console = Path(sys.argv[1]), Console()
    disk = folder / "disk" if (folder / "disk").exists() else folder
    children = [make_child(folder, disk, entry) for entry in json.loads(sys.argv[2])]
    with SignalInbox() as inbox, RunDir(disk / "state", 0) as run_dir:
        supervisor = Supervisor(children, inbox, console, StateFile(run_dir, 0, children, console).write)
        try:
            supervisor.start(START_TIMEOUT_S)
            plain(console, "UP")
            supervisor.watch()
            return 0
        except (ConfigError, VitalDeath, StopRequested) as error:
            plain(console, f"{type(error).__name__}: {error}")
            return {ConfigError: 1, VitalDeath: 3, StopRequested: 0}[type(error)]
        finally:
            supervisor.stop()


def make_child(folder: Path, disk: Path, entry: dict) -> ChildProcess:
    ready = disk / f"{entry['name']}.json"
    own = ["--ready-file", str(ready), "--pids", str(folder / "pids")]
    spec = ProcessSpec(
        name=entry["name"],
        role="fake",
        stage=entry["stage"],
        argv=(sys.executable, str(FAKE), *own, *entry.get("options", [])),
        is_ready=ready_file(ready),
        env=dict(os.environ),
        is_vital=entry.get("is_vital", False),
        stop_timeout_s=entry.get("stop_timeout_s", 5.0),
        begins=entry.get("begins"),
    )
    return ChildProcess(spec, disk / f"{entry['name']}.log", folder)


if __name__ == "__main__":
    sys.exit(main())
