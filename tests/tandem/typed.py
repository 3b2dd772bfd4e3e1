"""A command as it is typed, in this process, which has imported already what the commands need. Not a test."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

from tandem import cli
from tests.environment import plain_environment


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def typed(*arguments: str, given: str = "", **environment: str) -> Done:
    """What is `given` on standard input is no terminal, and neither is what is printed to."""
    stdout, stderr = io.StringIO(), io.StringIO()
    env = plain_environment() | environment
    with (
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        patch.object(sys, "stdin", io.StringIO(given)),
        patch.dict(os.environ, env, clear=True),
        _interrupts_kept(),
    ):
        try:
            code = cli.main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Done(code, stdout.getvalue(), stderr.getvalue())


@contextlib.contextmanager
def _interrupts_kept() -> Iterator[None]:
    """The command line says what Ctrl-C does; afterwards it is pytest's again."""
    former = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
