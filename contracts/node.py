"""A worker as the rest of the system sees it: who it is, and how busy."""

from enum import StrEnum

import msgspec

from contracts.ids import Incarnation, WorkerId
from contracts.layout import KVLayout
from contracts.request import WorkerRef


class WorkerRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class TransferCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker can exchange KV with others.

    `memory`: where its pages are, "host" or a kind of device. `sends`: the transports that it has and may use, the
    best first; one that does not leave a host comes with that host's name, as in "shm@HOST". `takes`: by layout id,
    those by which it can take KV of that layout, by re-sharding or rounding it too; none if it may use none of them.
    """

    memory: str
    sends: list[str]
    takes: dict[str, list[str]]


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker states once, when it joins. `max_model_len`: longest prompt plus answer it serves, in tokens.

    `layout`: what `layout_id` is the digest of, to say where two differ.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    role: WorkerRole
    url: str
    transfer: str
    model: str
    layout_id: str
    max_model_len: int
    capacity_tokens: int
    version: str
    pid: int
    core_pid: int
    ways: TransferCapabilities
    layout: KVLayout | None = None

    @property
    def send_words(self) -> list[str]:
        """Its KV by each transport, a word each, for placement to compare with what others take."""
        return [self._word(self.layout_id, transport) for transport in self.ways.sends]

    @property
    def receive_words(self) -> list[str]:
        return [self._word(layout_id, name) for layout_id, names in self.ways.takes.items() for name in names]

    def can_receive_from(self, source: "NodeInfo") -> bool:
        """The KV of `source`, as far as memory, layouts and settings tell: a connection may fail still."""
        return not set(self.receive_words).isdisjoint(source.send_words)

    def _word(self, layout_id: str, transport: str) -> str:
        return f"{self.ways.memory}/{layout_id}/{transport}"

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.worker_id, self.incarnation, self.url, self.transfer)


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of a histogram of the tokens of an engine step: those of vLLM's."""


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker states with each heartbeat. Rates are measured online, in tokens a second; 0.0 while unknown.

    `prompt_tokens_per_mixed_step`: the most tokens of prompts in a step that goes on with the answers of now, too.
    `bad_paths`: decode workers that its handoffs do not reach lately. `num_preemptions`, `num_step_tokens`: since its
    start; `steps`: how many had at most so many tokens as the bound of STEP_TOKENS says, and more than the one before;
    the last counts those above all bounds.
    """

    num_running: int = 0
    num_waiting: int = 0
    queue_tokens: int = 0
    free_tokens: int = 0
    prompt_tokens_per_mixed_step: int = 0
    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    transfer_rate: float = 0.0
    draining: bool = False
    bad_paths: tuple[Incarnation, ...] = ()
    num_preemptions: int = 0
    num_step_tokens: int = 0
    steps: tuple[int, ...] = ()


class Node(msgspec.Struct, frozen=True, kw_only=True):
    info: NodeInfo
    load: NodeLoad
    alive: bool
