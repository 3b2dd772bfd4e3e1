"""The output of `tandem up`: a live table on a terminal, a line per event elsewhere."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tandem.local.child import ChildProcess, ChildState

COLORS = {ChildState.WAITING: "dim", ChildState.STARTING: "yellow", ChildState.READY: "green", ChildState.DEAD: "red"}


WORDS_PERIOD_S = 5.0
"""The seconds between two lines about a child that is still starting, where there is no terminal."""


class Progress:
    """The view of children that are starting.

    On a terminal it is a table redrawn by `update()`, without a thread; elsewhere one line per change, and the last log
    line of a child that takes long, at least WORDS_PERIOD_S after its previous one.
    """

    def __init__(
        self, console: Console, children: Sequence[ChildProcess], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._children = children
        self._live: Live | None = None
        self._shown: dict[str, ChildState] = {}
        self._clock = clock
        self._words: dict[str, tuple[float, list[str]]] = {}

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self.update()
            self._live.stop()

    def update(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        for child in self._children:
            if self._shown.get(child.name) is not child.state:
                self._shown[child.name] = child.state
                self._report(child)
            elif child.state is ChildState.STARTING:
                self._report_words(child)

    def _report_words(self, child: ChildProcess) -> None:
        """Print the last line of its log, if that is another than before."""
        reported_s, words = self._words[child.name]
        if self._clock() - reported_s < WORDS_PERIOD_S:
            return
        last = child.last_lines(1)
        if last != words:
            plain(self._console, f"{child.name}: {''.join(last)}")
        self._words[child.name] = self._clock(), last

    def _report(self, child: ChildProcess) -> None:
        match child.state:
            case ChildState.STARTING:
                self._words[child.name] = self._clock(), []
                plain(self._console, f"{child.name}: starting")
            case ChildState.READY:
                plain(self._console, f"{child.name}: ready after {child.startup_s:.1f} s")

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for child in self._children:
            state = Text(child.state.value, style=COLORS[child.state])
            seconds = f"{child.startup_s:.1f} s" if child.state is not ChildState.WAITING else ""
            doing = child.last_lines(1) if child.state is ChildState.STARTING else []
            table.add_row(child.name, state, seconds, Text("".join(doing)[-80:], style="dim", no_wrap=True))
        return table


def plain(console: Console, words: str) -> None:
    """Print one line as it is: no markup, no wrapping, no colours, so that its text can be copied."""
    with suppress(OSError):  # output to a file on a full disk is lost; the system goes on
        console.print(words, markup=False, highlight=False, soft_wrap=True)
