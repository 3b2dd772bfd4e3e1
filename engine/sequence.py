"""One request inside the engine: its tokens, its blocks, and how far its KV is computed."""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from enum import StrEnum

from contracts.hashing import chain_hashes
from contracts.ids import RequestId
from contracts.kv_loss import EXACT, joined
from contracts.request import chain_start
from contracts.sampling import SamplingParams
from engine.adapters import LoadedAdapter
from engine.fair_turns import Turn, Urgency
from engine.page_lease import PageLease


class Status(StrEnum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    HELD = "held"
    ENDING = "ending"
    RESERVED = "reserved"
    PAUSED = "paused"


class Sequence:
    """Mutable, owned by the engine.

    `tokens` is prompt plus answer; KV exists for the first `num_computed` of them. The first `num_prompt` came with the
    request, those from `answer_start` on are the answer's: the same number, unless it was begun elsewhere.

    The first `num_prefilled` have the KV of a prompt: those that came with the request, unless they had been decoded
    elsewhere and came with that KV.

    `loss` is that of the KV from token `first_inexact` on, see contracts.kv_loss; `accepted_loss`: of cached KV that it
    may use. KV that is computed after inexact KV is inexact, too.

    Of the prompt's log-probabilities the first `num_scored` are told, or were not asked for.

    `late_s`: by how much it was behind computing as it came, see EngineRequest. `load_s`: the seconds that it waited
    for KV from lower tiers before it started.

    The last `num_pending` tokens (none or one) are being drawn by the device: their ids mean nothing yet.

    `adapter`: the LoRA adapter that computes it, beside the model.

    `lease`: what it holds of the groups of layers whose pages live shorter than it; None while it has no blocks.

    `tokens` and `blocks` are 32-bit arrays, so that numpy reads them without a Python loop.
    """

    def __init__(
        self,
        request_id: RequestId,
        token_ids: SequenceOf[int],
        sampling: SamplingParams,
        handoff: bool = False,
        priority: int = 0,
        cache_salt: str = "",
        num_answered: int = 0,
        accepted_loss: str = EXACT,
        late_s: float = 0.0,
        tenant: str = "",
        cost: float = 0.0,
        adapter: LoadedAdapter | None = None,
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.handoff = handoff
        self.priority = priority
        self.status = Status.WAITING
        self.tokens = array("i", token_ids)
        self.num_prompt = len(self.tokens)
        self.answer_start = self.num_prompt - num_answered
        self.blocks = array("i")
        self.lease: PageLease | None = None
        self.digests: list[bytes] = []
        self.cache_salt, self.adapter = cache_salt, adapter
        self._root = chain_start(cache_salt, None if adapter is None else adapter.ref)
        self.tenant, self.cost = tenant, cost
        self.turn: Turn | None = None
        self.num_pending = 0
        self.num_computed = 0
        self.num_inserted_blocks = 0
        self.num_announced = 0
        self.num_exported = 0
        self.num_prefilled = self.num_prompt
        self.accepted_loss = accepted_loss
        self.loss, self.first_inexact = EXACT, 0
        self.num_scored = self.num_prompt if sampling.prompt_logprobs is None else 1  # nothing foretells token 0
        self.started = False
        self.late_s, self.load_s = late_s, 0.0
        self.draw_key: int | None = None

    @property
    def urgency(self) -> Urgency:
        """The smallest goes first."""
        assert self.turn is not None, f"request {self.request_id} has no turn"
        return self.priority, self.turn

    @property
    def num_generated(self) -> int:
        """Tokens of the answer, wherever they were drawn: the index of the next one."""
        return len(self.tokens) - self.answer_start

    @property
    def has_grown(self) -> bool:
        """Beyond what came with the request."""
        return len(self.tokens) > self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """Whether everything but the newest token is computed.

        That token was drawn here, or where the prompt was computed.
        """
        return self.has_grown and self.num_computed == len(self.tokens) - 1

    @property
    def is_pinned(self) -> bool:
        """Announced KV is being read by a transfer: it can't be recomputed elsewhere in the pool."""
        return self.handoff and self.num_announced > 0

    def lose(self, first_token: int, loss: str) -> None:
        """Note that the KV of its tokens from this one on is inexact. `first_token` is at the edge of a block."""
        self.first_inexact = min(self.first_inexact, first_token) if self.loss else first_token
        self.loss = joined(self.loss, loss)

    def loss_before(self, end: int) -> str:
        """Return the loss of the KV before token `end`."""
        return self.loss if end > self.first_inexact else EXACT

    def extend_digests(self, block_size: int, num_blocks: int) -> list[bytes]:
        """Digests of so many blocks at least, all full of known tokens. Each is computed once."""
        self._digest(block_size, num_blocks * block_size)
        return self.digests

    def each_digest(self, block_size: int, num_blocks: int) -> Iterator[bytes]:
        """Yield those of the first blocks, which are full, one after the other.

        A look-up that ends early leaves the rest for when the device computes them.
        """
        for index in range(num_blocks):
            self._digest(block_size, (index + 1) * block_size)
            yield self.digests[index]

    def _digest(self, block_size: int, num_tokens: int) -> None:
        done = len(self.digests)
        if num_tokens // block_size > done:
            previous = self.digests[-1] if self.digests else self._root
            self.digests += chain_hashes(self.tokens[done * block_size : num_tokens], block_size, previous=previous)
