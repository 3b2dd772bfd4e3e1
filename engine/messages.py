"""What goes into an engine and what comes out of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from contracts.events import FinishReason, PromptToken, Token
from contracts.ids import BlockId, RequestId
from contracts.kv_loss import EXACT
from contracts.request import AdapterRef
from contracts.sampling import SamplingParams


@dataclass(frozen=True)
class EngineRequest:
    """`handoff`: after its first token the sequence stops and keeps its blocks until `release`.

    Lower `priority`: sooner; within one, `tenant`s that have had less for their `weight`. Cached prefixes are shared
    with requests of the same `cache_salt` and `adapter` only; the latter is None for the model alone. The last
    `num_answered` of `token_ids` are computed as prompt and count as answer: they were drawn elsewhere. `loss`: of the
    cached KV that it may use where there is none that is exact, see contracts.kv_loss. `late_s`: the seconds that it
    has waited for KV of other workers, less what computing what came would have taken; tiers may add the less then.
    """

    request_id: RequestId
    token_ids: Sequence[int]
    sampling: SamplingParams
    handoff: bool = False
    priority: int = 0
    cache_salt: str = ""
    num_answered: int = 0
    loss: str = EXACT
    late_s: float = 0.0
    tenant: str = ""
    weight: float = 1.0
    adapter: AdapterRef | None = None

    @property
    def cost(self) -> float:
        """Return what its turn costs its tenant: the tokens of its prompt, over the tenant's weight."""
        return len(self.token_ids) / self.weight


@dataclass(frozen=True)
class Reservation:
    """Pages for a prompt that is computed elsewhere.

    `blocks` are those of the whole prompt, cached prefix first.

    `generations` are the blocks' at this moment. `skip_tokens` is the prefix hit, a multiple of the block size.
    """

    request_id: RequestId
    blocks: list[BlockId]
    generations: list[int]
    skip_tokens: int


@dataclass(frozen=True)
class Started:
    """The scheduler picked the request for the first time.

    `cached_tokens`: its prefix hit; if adopted, the prompt. `load_s`: how long it waited for KV from
    lower tiers, in seconds.
    """

    request_id: RequestId
    cached_tokens: int
    load_s: float = 0.0


class PageChecksums(Protocol):
    """Made where the KV is."""

    @property
    def is_done(self) -> bool:
        """`wait` would not wait."""
        ...

    def wait(self) -> np.ndarray:
        """`[blocks, planes]` uint32, each of one page alone.

        They are there a moment after the step that tells of the chunk.
        """
        ...


@dataclass(frozen=True)
class ChunkDone:
    """The KV of a chunk is computed.

    That of tokens `[first_token, first_token + num_tokens)` of a handoff sequence is in `blocks`, just these.

    Chunks of a prompt come in order and cover it once, cached prefix included; each starts on a block's edge. `loss`:
    see contracts.kv_loss.
    """

    request_id: RequestId
    first_token: int
    num_tokens: int
    blocks: list[BlockId]
    checksums: PageChecksums | None = None
    loss: str = EXACT


@dataclass(frozen=True)
class AnswerTail:
    """The last of the KV of an answer that moves: `chunk`, unless all was told before.

    `num_tokens` of KV in all: that of every token but the newest, which a peer goes on after.
    """

    chunk: ChunkDone | None
    num_tokens: int


@dataclass(frozen=True)
class ChunkScheduled:
    """What a ChunkDone will say once its batch is computed, unless that fails.

    `early_planes`: so many of a block are computed a while before the others.
    """

    request_id: RequestId
    first_token: int
    num_tokens: int
    blocks: list[BlockId]
    early_planes: int


@dataclass(frozen=True)
class Scored:
    """The prompt's tokens from `first_index` on.

    Of one request in order and each once, all before its token 0.
    """

    request_id: RequestId
    first_index: int
    tokens: list[PromptToken]


@dataclass(frozen=True)
class Sampled:
    request_id: RequestId
    token: Token


@dataclass(frozen=True)
class Verified:
    """The draft of a request in a step, of whose tokens the first `num_accepted` were right."""

    request_id: RequestId
    num_tokens: int
    num_accepted: int


@dataclass(frozen=True)
class Ended:
    request_id: RequestId
    num_tokens: int
    reason: FinishReason


@dataclass(frozen=True)
class EngineFailure:
    """The request ended without an answer; `code` is one of contracts.errors."""

    request_id: RequestId
    code: str
    message: str


class StepObserver:
    """The observer of a batch while it is made.

    What must be arranged elsewhere can be arranged under the compute. This one does nothing.
    """

    def started(self, started: Started) -> None:
        """The scheduler picked this request for the first time."""

    def chunk_scheduled(self, chunk: ChunkScheduled) -> None:
        """This chunk is computed next."""

    def chunks_launched(self, is_all: bool) -> None:
        """What the device is given from now on comes behind the chunks that were coming.

        Unless `is_all`, behind their early planes. May be said again.
        """


@dataclass(frozen=True)
class StepOutput:
    """`span_s`: how long the batch took, behind the one before it.

    `sampled`: in order; of a request several where its draft was right, which `verified` tells. `num_decode_tokens`: of
    answers that went on, drawn ones that were drafted among them.
    """

    started: tuple[Started, ...] = ()
    chunks: tuple[ChunkDone, ...] = ()
    sampled: tuple[Sampled, ...] = ()
    ended: tuple[Ended, ...] = ()
    failed: tuple[EngineFailure, ...] = ()
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    scored: tuple[Scored, ...] = ()
    span_s: float = 0.0
    verified: tuple[Verified, ...] = ()


@dataclass(frozen=True)
class EngineStats:
    """`queue_tokens`: prompt tokens not computed yet.

    Counters count from the start; prefix counters are in tokens. `num_accepted_by_place`: of drafted tokens, by their
    place in the draft.
    """

    num_running: int
    num_waiting: int
    num_held: int
    num_reserved: int
    queue_tokens: int
    free_tokens: int
    prompt_tokens_per_mixed_step: int
    num_cached_blocks: int
    num_steps: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_preemptions: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_by_place: tuple[int, ...] = ()
