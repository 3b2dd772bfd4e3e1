"""What is said while children come up, to a terminal and to a pipe."""

import io
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tandem.local.child import ChildProcess, ChildState, ProcessSpec
from tandem.local.console_output import Progress, plain
from tests.waiting import until


@pytest.fixture
def child(tmp_path: Path) -> ChildProcess:
    """One that has not been started; ready as soon as it has."""
    argv = (sys.executable, "-c", "print('loading weights', flush=True); input()")
    spec = ProcessSpec("prefill-0", "prefill", 0, argv, is_ready=lambda: {}, env=dict(os.environ))
    return ChildProcess(spec, tmp_path / "prefill-0.log", tmp_path)


def test_a_pipe_gets_one_line_per_change(child: ChildProcess) -> None:
    console = Console(file=io.StringIO())
    with Progress(console, [child]) as progress:
        progress.update()
        child.state = ChildState.STARTING
        progress.update()
        progress.update()
        child.state = ChildState.READY
        progress.update()
    assert isinstance(console.file, io.StringIO)
    starting, ready = console.file.getvalue().splitlines()
    assert starting == "prefill-0: starting"
    assert ready.startswith("prefill-0: ready after ")


def test_a_pipe_gets_the_newest_words_of_a_child_that_takes_long(child: ChildProcess) -> None:
    console, now_s = Console(file=io.StringIO()), [0.0]
    with Progress(console, [child], lambda: now_s[0]) as progress:
        child.state = ChildState.STARTING
        for at_s, words in ((0, "old"), (1, "load: 1 of 10"), (5, "load: 2 of 10"), (9, "load: 3"), (11, "load: 4"),
                            (17, "load: 4")):  # fmt: skip
            now_s[0] = at_s
            child.log.write_text(f"{words}\n")
            progress.update()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "prefill-0: starting",
        "prefill-0: load: 2 of 10",
        "prefill-0: load: 4",
    ]


def test_a_terminal_gets_a_table_with_the_last_words(child: ChildProcess) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    child.log.write_text("old\nweights 3/10 [markup]\n")
    with Progress(console, [child]) as progress:
        child.state = ChildState.STARTING
        progress.update()
    assert isinstance(console.file, io.StringIO)
    assert "weights 3/10 [markup]" in console.file.getvalue()


def test_what_can_be_pasted_is_not_wrapped() -> None:
    console = Console(file=io.StringIO(), width=20)
    line = "curl http://127.0.0.1:8000/v1/chat/completions -d '{\"model\": [1]}'"
    plain(console, line)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == f"{line}\n"


def test_last_lines_of_a_long_log(child: ChildProcess) -> None:
    child.log.write_text("".join(f"line {number}\n\n" for number in range(10_000)))
    assert child.last_lines(2) == ["line 9998", "line 9999"]


def test_a_child_that_ends_by_itself_is_noticed_once(child: ChildProcess) -> None:
    child.start()  # its standard input is empty: it fails
    until(lambda: child.refresh() and child.state is ChildState.DEAD)
    assert child.exit_code == 1
    assert child.describe_exit() == "ended with code 1"
    assert not child.refresh()
    child.kill()
    assert "loading weights" in child.log.read_text()
