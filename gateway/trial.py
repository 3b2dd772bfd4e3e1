"""A program that compiles grammars, to be killed if one takes too long: `python -m gateway.trial`, see gateway.trials.

On its standard input a Vocabulary, then grammars; for each, on its standard output, why it can't be used, empty if it
can. All of them framed.
"""

import contextlib
import resource
import sys
import threading
from typing import IO

import msgspec
from llguidance import LLTokenizer

from checkpoint.guidance import Vocabulary, compiled, error_of
from contracts.deep_threads import STACK_NBYTES

MAX_NBYTES = 4 << 30
LENGTH_NBYTES = 4


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_NBYTES, MAX_NBYTES))
    threading.stack_size(STACK_NBYTES)
    serving = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    serving.start()
    serving.join()


def serve(requests: IO[bytes], verdicts: IO[bytes]) -> None:
    """Until whoever asks is gone."""
    with contextlib.suppress(EOFError):
        tokens = msgspec.msgpack.decode(receive(requests), type=Vocabulary).tokens()
        send(verdicts, b"")
        while True:
            send(verdicts, _verdict(tokens, receive(requests).decode()).encode())


def _verdict(tokens: LLTokenizer, grammar: str) -> str:
    try:
        return error_of(compiled(tokens, grammar))
    except ValueError as error:
        return str(error)


def send(stream: IO[bytes], payload: bytes) -> None:
    stream.write(len(payload).to_bytes(LENGTH_NBYTES, "big") + payload)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes:
    """Raises EOFError."""
    length = stream.read(LENGTH_NBYTES)
    if len(length) < LENGTH_NBYTES:
        raise EOFError
    return stream.read(int.from_bytes(length, "big"))


if __name__ == "__main__":
    main()
