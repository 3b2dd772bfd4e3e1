"""The front of bench.handoff.core: it starts cores, gives them jobs, and keeps when each token came."""

import argparse
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.handoff.core import CoreSpec
from contracts.codec import FrameReader, decoder, frame
from contracts.events import Failed, Finished, Prefilled, Tokens
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.request import Cancel, Job, Route, WorkerRef
from contracts.sampling import SamplingParams
from kernels import caps
from worker.messages import CoreFrame, CoreReady, CoreStatus, KnownPeers, Start, Stop, ToFront, Work

FIRST = Epoch(1)
START_TIMEOUT_S = 150.0
MEET_TIMEOUT_S = 30.0
_incarnations = count(1)
_requests = count(1)


class Heard(NamedTuple):
    """A token, when it came (monotonic seconds), and from which worker."""

    at: float
    worker: str
    token_id: int


class Answers:
    """The tokens of all requests by index, and how each request ended.

    A thread of its own reads from each core. So decode's first token and its end may come before prefill's token 0, and
    without it if prefill is killed.
    """

    def __init__(self) -> None:
        self.tokens: dict[str, dict[int, Heard]] = defaultdict(dict)
        self.ends: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        self.changed = threading.Condition()
        self._lengths: dict[str, int] = {}

    def take(self, worker: str, event: Any, now: float) -> None:
        if isinstance(event, Tokens):
            for token in event.tokens:
                self.tokens[event.request_id][token.index] = Heard(now, worker, token.token_id)
        elif isinstance(event, Prefilled):
            self.cached[event.request_id] = event.cached_tokens
        elif isinstance(event, Finished):
            self.ends[event.request_id] = "finished"
            self._lengths[event.request_id] = event.num_tokens
        elif isinstance(event, Failed):
            self.ends[event.request_id] = f"{event.code}: {event.message}"

    def wait(self, request_ids: Sequence[str], timeout_s: float) -> None:
        """Wait until all requests have ended with all their tokens; raise TimeoutError if one has not."""
        with self.changed:
            if not self.changed.wait_for(lambda: all(self._is_whole(name) for name in request_ids), timeout_s):
                missing = [name for name in request_ids if not self._is_whole(name)]
                raise TimeoutError(f"no end in {timeout_s:.0f} s for {missing[:5]} of {len(request_ids)}")

    def ids(self, request_id: str) -> dict[int, int]:
        """Return the token ids by index, so that a missing token does not shift the others."""
        with self.changed:
            return {index: heard.token_id for index, heard in self.tokens[request_id].items()}

    def times(self, request_id: str) -> list[float]:
        """Return when the tokens came, in the order of their indices."""
        with self.changed:
            return [heard.at for _, heard in sorted(self.tokens[request_id].items())]

    def is_heard_in_order(self, request_id: str) -> bool:
        times = self.times(request_id)
        return times == sorted(times)

    def _is_whole(self, request_id: str) -> bool:
        return request_id in self.ends and len(self.tokens[request_id]) >= self._lengths.get(request_id, 0)


class CoreHandle:
    """The process of one core, with the socket to it and the thread that reads from it."""

    def __init__(self, name: str, spec: CoreSpec, answers: Answers) -> None:
        self.name, self._answers = name, answers
        self.incarnation = f"{name}-{next(_incarnations)}"
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "bench.handoff.core", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._sock, self._ready = ours, threading.Event()
        self.status: CoreStatus | None = None
        self.ref: WorkerRef
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.send(Start(msgspec.json.encode(spec), name, self.incarnation))

    def wait_ready(self) -> "CoreHandle":
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready.wait(0.1):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not start: {self.process.poll()}")
        return self

    def send(self, message: Any) -> None:
        self._sock.sendall(frame(message))

    def stop(self) -> None:
        """Stop the core; its stamps have been written when this returns."""
        self.send(Stop())
        self.process.wait(30)
        self._thread.join(5)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def _read(self) -> None:
        frames, messages = FrameReader(), decoder(ToFront)
        while data := self._recv():
            now = time.perf_counter()
            with self._answers.changed:
                for payload in frames.feed(data):
                    self._take(messages.decode(payload), now)
                self._answers.changed.notify_all()

    def _recv(self) -> bytes:
        try:
            return self._sock.recv(1 << 20)
        except OSError:
            return b""

    def _take(self, message: Any, now: float) -> None:
        if isinstance(message, CoreReady):
            self.ref = WorkerRef(WorkerId(self.name), Incarnation(self.incarnation), "", message.transfer)
            self._ready.set()
        elif isinstance(message, CoreFrame):
            self.status = message.status or self.status
            for events in message.events.values():
                for event in events:
                    self._answers.take(self.name, event, now)


def meet(prefill: CoreHandle, decode: CoreHandle) -> None:
    """Introduce the cores as a front does for registered ones; raise TimeoutError if no link comes up."""
    prefill.send(KnownPeers([decode.ref]))
    deadline = time.monotonic() + MEET_TIMEOUT_S
    while not any(link.state == "up" for link in (prefill.status.links if prefill.status else ())):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no link from {prefill.name} to {decode.name} in {MEET_TIMEOUT_S:.0f} s")
        time.sleep(0.02)


def ask(
    prefill: CoreHandle,
    decode: CoreHandle,
    token_ids: list[int],
    num_tokens: int,
    timeout_s: float = 60.0,
    source: CoreHandle | None = None,
) -> tuple[str, float]:
    """Post a job to both cores as a gateway does; return the name of the request and when it was posted.

    `source`: who has more of the prompt.
    """
    name = f"r{next(_requests)}"
    route = Route(RequestId(name), FIRST, prefill.ref, decode.ref, source.ref if source else None)
    work = Work([Job(route, GatewayId("bench"), token_ids, greedy(num_tokens), timeout_s)], time.monotonic())
    began = time.perf_counter()
    for core in {id(core): core for core in (prefill, decode)}.values():
        core.send(work)
    return name, began


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a result file says of a run whose cores are on `devices`, with `check` in float32."""
    model = "Llama-8B's shape, random weights, " + ("4 layers, float32" if args.check else "FP8")
    return {"devices": args.devices, "card": caps.detect().name, "model": model}


def greedy(num_tokens: int) -> SamplingParams:
    """Return the sampling of an answer of exactly so many tokens."""
    return SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=True)


def cancel(core: CoreHandle, request_ids: Sequence[str], epoch: Epoch = FIRST) -> None:
    core.send(Work([Cancel(RequestId(name), epoch, "measured") for name in request_ids], time.monotonic()))


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, 128256, length).tolist()
