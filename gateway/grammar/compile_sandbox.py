"""Grammars are compiled once before a worker gets them, in a process of its own.

30 patterns that a string must match all at once are a kilobyte, and keep llguidance at work for hours: no limit of its
own bounds that, and a thread can't be ended. An integer that is to be -2^63 ends the process that only reads the
schema: llguidance turns the sign of its bounds, and that one stays negative without end.
"""

import contextlib
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from selectors import EVENT_READ, DefaultSelector

from checkpoint.checkpoint import Checkpoint
from checkpoint.grammar_compiler import Vocabulary
from contracts.errors import Unavailable
from gateway.grammar.compile_process import CompileRequest, receive, send
from process.parent_death import die_with_parent

TRIAL_S = 5.0
"""The largest schemas that llguidance takes compile in a tenth of a second."""
START_S = 60.0
NUM_KEPT = 1024


class CompileSandbox:
    """One at a time, from any thread: `thread` is there to wait for them.

    The process is started for the first one, and anew after one that was killed.
    """

    def __init__(self, checkpoint: Checkpoint, timeout_s: float = TRIAL_S) -> None:
        self._checkpoint, self._timeout_s = checkpoint, timeout_s
        self.thread = ThreadPoolExecutor(1, "trial")
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._compiler: _Compiler | None = None

    def known(self, grammar: str) -> str | None:
        """Its verdict, if it was tried before."""
        return self._verdicts.get(_digest(CompileRequest(grammar, is_read_only=False)))

    def close(self) -> None:
        """Ends the process, and with it the trial that is under way."""
        if (compiler := self._compiler) is not None:
            compiler.kill()

    def verdict(self, grammar: str) -> str:
        """Why workers can't use it; empty if they can. Known ones wait for nothing.

        Raises Unavailable if there is no process to try it.
        """
        return self._answer(CompileRequest(grammar, is_read_only=False))

    def fault(self, grammar: str) -> str:
        """Why llguidance can't even read it; empty if it can, whether it gets done with it or not.

        Raises Unavailable, as `verdict` does.
        """
        return self._answer(CompileRequest(grammar, is_read_only=True))

    def _answer(self, asked: CompileRequest) -> str:
        digest = _digest(asked)
        if (known := self._verdicts.get(digest)) is not None:
            return known
        with self._lock:
            if digest not in self._verdicts:
                self._verdicts[digest] = self._tried(asked)
            verdict = self._verdicts[digest]
            if len(self._verdicts) > NUM_KEPT:
                self._verdicts.popitem(last=False)
            return verdict

    def _tried(self, asked: CompileRequest) -> str:
        if self._compiler is None or self._compiler.is_gone:
            self._compiler = self._started()
        try:
            return self._compiler.ask(asked, self._timeout_s)
        except TimeoutError:
            self._compiler = None
            return f"compiling it takes longer than {self._timeout_s:g} s; make it simpler"
        except EOFError:
            self._compiler = None  # gone, though it may not be seen to be yet
            return "compiling it takes too much memory; make it simpler"

    def _started(self) -> "_Compiler":
        try:
            return _Compiler(Vocabulary.of(self._checkpoint))
        except (OSError, EOFError) as error:  # TimeoutError is one of the former
            raise Unavailable("the process that compiles grammars does not start") from error


def _digest(asked: CompileRequest) -> bytes:
    return blake2b(asked.grammar.encode(), digest_size=16, salt=bytes([asked.is_read_only])).digest()


class _Compiler:
    """The process. It is gone with the object."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Not of the terminal's group: an interrupt is for who started it.
        command = die_with_parent([sys.executable, "-m", "gateway.grammar.compile_process"])
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        weakref.finalize(self, _end, process)
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._requests, self._verdicts = process.stdin, process.stdout
        self.ask(vocabulary, START_S)

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()

    def ask(self, message: CompileRequest | Vocabulary, timeout_s: float) -> str:
        """Raises TimeoutError, and EOFError if the process is gone."""
        try:
            send(self._requests, message)
        except BrokenPipeError as error:
            raise EOFError from error
        with DefaultSelector() as selector:
            selector.register(self._verdicts, EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError
        return receive(self._verdicts, str)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # what it was not sent
            stream.close()  # type: ignore[union-attr]
