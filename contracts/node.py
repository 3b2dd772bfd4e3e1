"""A worker as the rest of the system sees it: its identity, its abilities and its load."""

from collections.abc import Collection
from enum import StrEnum

import msgspec

from contracts.ids import Incarnation, WorkerId
from contracts.layout import KVLayout
from contracts.request import AdapterRef, WorkerRef


class WorkerRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class TransferCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The ways in which a worker can exchange KV with others.

    `memory` is where its pages are, "host" or a kind of device. `sends` lists the transports that it has and may use,
    the best first; one that does not leave a host has that host's name, as in "shm@HOST". `takes` lists, by the
    digest of a layout's model part, the transports by which it can take KV of that layout, by re-sharding or rounding
    it too; none if it may use none.
    """

    memory: str
    sends: list[str]
    takes: dict[str, list[str]]


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a worker states when it joins; only its role and its adapters may change.

    `max_model_len` is the longest prompt plus answer that it serves, in tokens. `layout` is what `layout_id` is the
    digest of, so that an error can say where two differ. Two workers can exchange KV if they have the model's groups of
    layers in common, whatever optional ones each has beside them. `synthetic_acceptance` is not 0.0 where drafted
    tokens are kept without asking the model, to measure: then its answers are nonsense. `adapters`: the LoRA adapters
    that it has loaded; None if it can load none.
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
    synthetic_acceptance: float = 0.0
    adapters: tuple[AdapterRef, ...] | None = None

    @property
    def send_words(self) -> list[str]:
        """Return a word for each transport that its KV can take, to be matched with `receive_words`."""
        return [self._word(self.model_layout_id, transport) for transport in self.ways.sends]

    @property
    def model_layout_id(self) -> str:
        """Return the digest of the layout's groups that its KV can't do without."""
        return self.layout.model_part.layout_id if self.layout is not None else self.layout_id

    @property
    def receive_words(self) -> list[str]:
        return [self._word(layout_id, name) for layout_id, names in self.ways.takes.items() for name in names]

    def can_receive_from(self, source: "NodeInfo") -> bool:
        """Return whether it can take the KV of `source`, judged by memory, layouts and settings.

        A connection may still fail.
        """
        return self.can_receive_any(source.send_words)

    def can_receive_any(self, send_words: Collection[str]) -> bool:
        """Return whether it can take KV sent by one of these, the `send_words` of one or more workers."""
        return any(word in send_words for word in self.receive_words)

    def _word(self, layout_id: str, transport: str) -> str:
        return f"{self.ways.memory}/{layout_id}/{transport}"

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.worker_id, self.incarnation, self.url, self.transfer)


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of the histogram of tokens in an engine step; vLLM has the same."""


class TierSpeed(msgspec.Struct, frozen=True, array_like=True):
    """The speed at which a tier below a worker's KV cache gave KV lately.

    It is in tokens a second, and seconds before the first. A tier that is off is left out.
    """

    tier: str
    tokens_per_s: float
    latency_s: float


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load that a worker states with each heartbeat.

    Rates are measured online, in tokens a second; 0.0 while unknown. `prompt_tokens_per_mixed_step` is the most prompt
    tokens in a step that also continues the current answers. `bounds_gaps`: it keeps such steps to an objective.
    `bad_paths` are decode workers that its handoffs did not reach lately. `num_preemptions` and `num_step_tokens` count
    since its start. `num_of_former_role`: requests of a side that its role no longer has, which end here. `steps`
    counts steps by the bounds of STEP_TOKENS, each between the bound before and its own; the last counts those above
    all bounds. `tiers`: those below its KV cache.
    """

    num_running: int = 0
    num_waiting: int = 0
    queue_tokens: int = 0
    free_tokens: int = 0
    prompt_tokens_per_mixed_step: int = 0
    bounds_gaps: bool = False
    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    transfer_rate: float = 0.0
    draining: bool = False
    bad_paths: tuple[Incarnation, ...] = ()
    num_of_former_role: int = 0
    num_preemptions: int = 0
    num_step_tokens: int = 0
    steps: tuple[int, ...] = ()
    tiers: tuple[TierSpeed, ...] = ()


class Node(msgspec.Struct, frozen=True, kw_only=True):
    info: NodeInfo
    load: NodeLoad
    alive: bool
