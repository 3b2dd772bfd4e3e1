"""The program that compiles grammars, `python -m gateway.grammar.compile_process`.

compile_sandbox can kill it.

On its standard input a Vocabulary, then Questions; for each, on its standard output, why its grammar can't be used,
empty if it can. All of them are frames of contracts.codec.
"""

import contextlib
import resource
import sys
import threading
from typing import IO, TypeVar

import msgspec
from llguidance import LLMatcher, LLTokenizer

from checkpoint.grammar_compiler import Vocabulary, compiled, error_of, in_a_line
from contracts.codec import HEADER_NBYTES, decoder, frame
from process.deep_stack_threads import STACK_NBYTES

MAX_NBYTES = 4 << 30

T = TypeVar("T")


class CompileRequest(msgspec.Struct, frozen=True):
    """`is_read_only`: whether llguidance can read it, and not whether it gets done with it."""

    grammar: str
    is_read_only: bool


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_NBYTES, MAX_NBYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a client's grammar may end it, with half a GiB of stack
    threading.stack_size(STACK_NBYTES)
    serving = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    serving.start()
    serving.join()


def serve(requests: IO[bytes], verdicts: IO[bytes]) -> None:
    """Until whoever asks is gone."""
    with contextlib.suppress(EOFError):
        tokens = receive(requests, Vocabulary).tokens()
        send(verdicts, "")
        while True:
            send(verdicts, _verdict(tokens, receive(requests, CompileRequest)))


def _verdict(tokens: LLTokenizer, asked: CompileRequest) -> str:
    if asked.is_read_only:
        return in_a_line(LLMatcher.validate_grammar(asked.grammar))
    try:
        return error_of(compiled(tokens, asked.grammar))
    except ValueError as error:
        return str(error)


def send(stream: IO[bytes], message: object) -> None:
    stream.write(frame(message))
    stream.flush()


def receive(stream: IO[bytes], kind: type[T]) -> T:
    """Raises EOFError."""
    length = stream.read(HEADER_NBYTES)
    if len(length) < HEADER_NBYTES:
        raise EOFError
    return decoder(kind).decode(stream.read(int.from_bytes(length, "little")))


if __name__ == "__main__":
    main()
