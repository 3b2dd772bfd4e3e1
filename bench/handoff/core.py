"""The engine core that the handoff benchmarks start, with random weights and time stamps.

`python -m bench.handoff.core FD`, where FD is the front's end of a socket pair as for worker.core.main. The settings in
its first frame are a `CoreSpec`. When it is told to stop, it writes its time stamps to a file, on the monotonic clock
that all processes of a host share.
"""

import json
import logging
import os
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench.models.random_model import LLAMA_8B, RandomWeights, random_checkpoint
from contracts.handoff import Commit, Fin, Grant, HandoffMessage, Offer, PullReady, PullScheduled
from contracts.ids import BlockId, Epoch, Incarnation, RequestId, WorkerId
from contracts.node import WorkerRole
from contracts.request import WorkerRef
from engine.engine import Engine
from engine.loader import load_device_engine
from engine.messages import Started, StepObserver, StepOutput
from engine.settings import EngineSettings
from kv_transfer.events import ChunkLanded, TransferEvent
from kv_transfer.links.incoming_link import IncomingLink
from kv_transfer.node import TransferNode
from kv_transfer.settings import TransferSettings
from mixed_svc.core import make_roles
from process.garbage_collector import freeze_startup_objects
from worker.core.attempt_table import AttemptTable
from worker.core.engine_core import EngineCore
from worker.core.front_link import FrontDisconnected, FrontLink
from worker.core.main import SWITCH_S, ready_of
from worker.core.open_tiers import open_tiers
from worker.core.peer_prefixes import PeerPrefixes
from worker.messages import Start
from worker.settings import WorkerSettings

SECRET = b"a secret of measurements"


class CoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one core.

    A model with fewer than Llama-8B's `num_layers` starts sooner. `stamps` is the file for its time stamps; `sums` is
    the folder for the checksums of pages that are handed over. `reuse`: it pulls prefixes from other cores, and gives
    its own; `kv_host_gib`: of a memory tier below its cache.
    """

    device: str
    stamps: str = ""
    sums: str = ""
    num_layers: int = LLAMA_8B.num_layers
    dtype: str = "auto"
    max_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_model_len: int = 16384
    kv_cache_gib: int = 32
    prefix_cache: bool = False
    checksum: bool = True
    transfer: str = "auto"
    reuse: bool = False
    kv_host_gib: float = 0.0


class Stamps:
    """The events of a core as (event, request, seconds), in order."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, float]] = []

    def put(self, what: str, request_id: str) -> None:
        self._rows.append((what, request_id, time.perf_counter()))

    def write(self, path: str) -> None:
        Path(path).write_text(json.dumps(self._rows))


class PageSums:
    """The checksums of a prompt's pages, where it was computed and where it was handed over to.

    The former are taken when a chunk has been computed, the latter when the answer ends. Each line of the file is JSON:
    (request, "computed" or "kept", `[pages, planes]`). It is written at once, because the process may be killed.
    """

    def __init__(self, path: Path, engine: Engine) -> None:
        self._path = path
        self._pool, self._block_size = engine.transfer_pool, engine.layout.block_size
        self._computed: defaultdict[str, list[list[int]]] = defaultdict(list)
        self._num_tokens: Counter[str] = Counter()
        self._granted: dict[str, list[BlockId]] = {}

    def computed(self, request_id: str, num_tokens: int, sums: np.ndarray) -> None:
        self._computed[request_id] += sums.tolist()
        self._num_tokens[request_id] += num_tokens

    def told(self, request_id: str) -> None:
        """Write the sums of the pages that the prompt fills; decode writes into the page behind its end."""
        num_full = self._num_tokens.pop(request_id) // self._block_size
        self._put(request_id, "computed", self._computed.pop(request_id)[:num_full])

    def granted(self, request_id: str, pages: list[BlockId]) -> None:
        self._granted[request_id] = pages

    def ended(self, request_id: str) -> None:
        """Write the sums of the granted pages before anybody else writes to them."""
        if pages := self._granted.pop(request_id, None):
            self._put(request_id, "kept", self._pool.checksums(pages).wait().tolist())

    def _put(self, *line: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class StampedNode(TransferNode):
    stamps: Stamps
    sums: PageSums | None = None

    def offer(self, peer: WorkerRef, offer: Offer) -> None:
        self.stamps.put("offer", offer.request_id)
        super().offer(peer, offer)

    def grant(self, peer_id: WorkerId, grant: Grant) -> None:
        if self.sums:
            self.sums.granted(grant.request_id, grant.pages[0])
        super().grant(peer_id, grant)
        self.stamps.put("grant", grant.request_id)

    def send_chunk(
        self, peer_id: WorkerId, request_id: RequestId, epoch: Epoch, index: int, first_token: int, num_tokens: int,
        src_pages: Sequence[BlockId], checksums: np.ndarray | None = None, **others: Any,
    ) -> None:  # fmt: skip
        super().send_chunk(peer_id, request_id, epoch, index, first_token, num_tokens, src_pages, checksums, **others)
        self.stamps.put("told", request_id)
        if self.sums and checksums is not None:
            self.sums.computed(request_id, num_tokens, checksums)

    def finish(self, peer_id: WorkerId, fin: Fin) -> None:
        if self.sums:
            self.sums.told(fin.request_id)
        super().finish(peer_id, fin)
        self.stamps.put("fin", fin.request_id)

    def commit(self, peer_id: WorkerId, message: Commit) -> bool:
        is_drained = super().commit(peer_id, message)
        self.stamps.put("adopted", message.request_id)
        return is_drained

    def _adopt(self, link: IncomingLink) -> None:
        send = link.send

        def stamped(message: HandoffMessage) -> None:
            send(message)
            if isinstance(message, Commit):
                self.stamps.put("commit", message.request_id)

        hear = link.on_message

        def heard(message: HandoffMessage) -> None:
            if isinstance(message, PullReady):
                self.stamps.put("heard", message.request_id)
            hear(message)
            if isinstance(message, PullScheduled):
                self.stamps.put("queued", message.request_id)

        link.send, link.on_message = stamped, heard  # type: ignore[method-assign]
        super()._adopt(link)

    def _note(self, event: TransferEvent) -> None:
        if isinstance(event, ChunkLanded):
            self.stamps.put("landed", event.header.request_id)
        super()._note(event)


class StampedCore(EngineCore):
    """An engine core that stamps its events; `parts` and `others` are the arguments of EngineCore."""

    def __init__(self, stamps: Stamps, *parts: Any, **others: Any) -> None:
        super().__init__(*parts, **others)
        self._stamps = stamps
        self._starting: list[str] = []
        self._first: list[str] = []

    def started(self, started: Started) -> None:
        self._starting.append(_name(started.request_id))
        self._stamps.put("started", self._starting[-1])
        super().started(started)

    def chunks_launched(self, is_all: bool) -> None:
        super().chunks_launched(is_all)
        if is_all:
            self._put_all("launched", self._starting)

    def _publish(self, output: StepOutput) -> None:
        """Stamp the first of decode's tokens; the others are not needed."""
        for chunk in output.chunks:
            self._stamps.put("computed", _name(chunk.request_id))
        for sampled in output.sampled:
            if sampled.token.index == 1:
                self._stamps.put("stepped", _name(sampled.request_id))
            elif sampled.token.index == 0:
                self._first.append(_name(sampled.request_id))
        super()._publish(output)

    def _send(self) -> None:
        super()._send()
        self._put_all("sent", self._first)

    def _put_all(self, what: str, names: list[str]) -> None:
        for name in names:
            self._stamps.put(what, name)
        names.clear()


def _name(key: RequestId) -> str:
    return key.rpartition(".")[0]


def main() -> None:
    sys.setswitchinterval(SWITCH_S)
    link = FrontLink(socket.socket(fileno=int(sys.argv[1])))
    start = next(message for message in link.receive(10.0) if isinstance(message, Start))
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {start.worker_id} %(name)s: %(message)s")
    spec = msgspec.json.decode(start.settings, type=CoreSpec)
    try:
        serve(link, start, spec, load(spec))
    except FrontDisconnected:
        os._exit(0)


def load(spec: CoreSpec) -> Engine:
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config = replace(LLAMA_8B, num_layers=spec.num_layers)
    settings = EngineSettings(
        dtype=spec.dtype,
        kv_cache_nbytes=spec.kv_cache_gib << 30,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_batched_tokens=spec.max_batched_tokens,
        prefix_cache=spec.prefix_cache,
    )
    checkpoint = random_checkpoint("llama-8b-random", config)
    return load_device_engine(settings, checkpoint, _silent, RandomWeights(config, device), device)


def serve(link: FrontLink, start: Start, spec: CoreSpec, engine: Engine) -> None:
    """Run the core as worker.core.main does, with stamps."""
    me, stamps, attempts = WorkerId(start.worker_id), Stamps(), AttemptTable()
    settings = TransferSettings(secret=SECRET, transport=spec.transfer, checksum=spec.checksum)
    node = StampedNode(settings, me, Incarnation(start.incarnation), engine.layout, engine.transfer_pool, link.wake)
    node.stamps = stamps
    if spec.sums:
        node.sums = sums = PageSums(Path(spec.sums) / f"{start.incarnation}.jsonl", engine)
        sum_what_ends(engine, sums)
    node.start()
    roles = make_roles(WorkerSettings.model_validate({"role": WorkerRole.MIXED}), me, engine, node, attempts)
    core = StampedCore(stamps, me, engine, node, roles, attempts, link)
    if spec.reuse:
        core.use_peers(PeerPrefixes(me, engine, node, attempts, roles, lambda: core.prefill_rate))
    if spec.kv_host_gib:
        given = WorkerSettings.model_validate({"role": WorkerRole.MIXED, "kv_host_gib": spec.kv_host_gib})
        core.measure_prefill_rate()
        core.use_tiers(open_tiers(given, engine, lambda: core.prefill_rate, link.wake))
    freeze_startup_objects()
    link.send(ready_of(engine, node))
    try:
        core.run()
    finally:
        if spec.stamps:
            stamps.write(spec.stamps)
        node.close()


def sum_what_ends(engine: Engine, sums: PageSums) -> None:
    """Take checksums within each step, before pages that it frees are granted again."""
    step = engine.step

    def summed(watcher: StepObserver) -> StepOutput:
        output = step(watcher)
        for ended in output.ended:
            sums.ended(_name(ended.request_id))
        return output

    engine.step = summed  # type: ignore[method-assign,assignment]


def _silent(stage: str, done: int, total: int) -> None:
    """Ignore the progress of loading."""


if __name__ == "__main__":
    main()
