"""The messages of a handoff on the control connection between a prefill and a decode worker.

    prefill -> decode   Offer                 the scheduler picked the request
    decode  -> prefill  Grant | Wait | Refuse  real pages are taken only now
    prefill -> decode   ChunkHeader           beside the chunk's bytes, one per computed chunk; in a PullReady if
                                              decode fetches the bytes itself, after a PullScheduled when the chunk
                                              was about to be computed
    decode  -> prefill  Fetched               such a chunk of an answer that moves was read
    prefill -> decode   Fin                   all chunks sent; carries token 0
    decode  -> prefill  Commit                every chunk valid and Fin seen: the pin may go
    either  -> other    Abort, answered by AbortAck once nothing can write any more

    any     -> other    PrefixRequest         asks for blocks of a prompt that the other may hold; an Offer of them, or
                                              Refuse, answers it, and what follows is as above, without Fin

Every message carries (request_id, epoch); a receiver drops old epochs and counts them.
"""

import msgspec

from contracts.events import Token
from contracts.ids import BlockId, Epoch, RequestId
from contracts.kv_loss import EXACT
from contracts.request import WorkerRef

MAX_MOVED_TOKENS = 1024
"""The most tokens of an answer that Fin carries: those since its migration was asked for."""
MAX_MOVED_NBYTES = MAX_MOVED_TOKENS * 330
"""The most bytes that they take: with the 20 alternatives that a client may ask for, one takes at most 23 + 20 * 15."""


class Offer(msgspec.Struct, frozen=True, omit_defaults=True, tag="offer"):
    """The announcement that `num_tokens` of KV will come.

    If it `is_bound`, at most so many: the KV of a running answer, which grows on its way. Fin says how many came.
    Prefix hashes are not sent: decode has the job and hashes its token ids itself.
    `nbytes_per_s`: of former handoffs on this link; 0.0 if that is not known, or decode fetches the bytes itself.
    `num_ready`: of a prefix that another worker pulls, the KV of so many tokens can be sent at once, and the rest as
    tiers of the offering worker give it; None for all.
    """

    request_id: RequestId
    epoch: Epoch
    num_tokens: int
    layout_id: str
    is_bound: bool = False
    nbytes_per_s: float = 0.0
    num_ready: int | None = None


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """The pages for the tokens from `skip_tokens` on, a multiple of the block size.

    Decode has the tokens before in its prefix cache. `pages` are a block table for each group of the layout. Of groups
    whose pages live shorter than a sequence only those move that a continuation needs: `group_skips` says for each
    group from which token on there are pages; for all from `skip_tokens` on, if it is empty.
    """

    request_id: RequestId
    epoch: Epoch
    pages: list[list[BlockId]]
    skip_tokens: int
    group_skips: list[int] = []

    def skips(self) -> list[int]:
        """Return for each group the first token of which there are pages."""
        return self.group_skips or [self.skip_tokens] * len(self.pages)


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """There are no pages now; decode keeps the offer queued and grants later.

    Prefill keeps its pages pinned while its deadline allows.
    """

    request_id: RequestId
    epoch: Epoch
    reason: str


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """The offer will never be granted, for example because no job came for it."""

    request_id: RequestId
    epoch: Epoch
    code: str
    reason: str


class ChunkFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The pages of some tokens in one group of the layout, in token order.

    The tokens are `[first_token, first_token + num_tokens)`. The pages are in decode's layout, and `nbytes` is their
    size there. Where the numbers of shards on the two sides differ, pages come in parts, the shards of the finer side.
    The transport decides how the bytes lie in messages.
    `first_token` is a multiple of the block size; `checksum` is seeded with the epoch and the group. `index` counts the
    chunks of all groups. `loss`: of the KV as it was sent, see contracts.kv_loss.
    """

    request_id: RequestId
    epoch: Epoch
    index: int
    first_token: int
    num_tokens: int
    layout_id: str
    nbytes: int
    checksum: int
    group: int = 0
    loss: str = EXACT


class ChunkHeader(ChunkFacts, frozen=True, tag="chunk"):
    """The header of a chunk whose bytes are sent; `checksum` covers the bytes."""


class PullReady(ChunkFacts, frozen=True, tag="pull", kw_only=True):
    """A chunk that decode's copy engine reads from `pages` of prefill's pool, in token order.

    The pages stay as they are until Commit, or AbortAck, or until decode's process is gone. `checksum` is over the
    checksums of the pages, `[pages, parts * num_planes]`, seeded as that of any chunk.
    """

    pages: list[BlockId]

    @classmethod
    def of(cls, header: ChunkHeader, pages: list[BlockId]) -> "PullReady":
        return cls(**msgspec.structs.asdict(header), pages=pages)

    @property
    def header(self) -> ChunkHeader:
        return ChunkHeader(**{name: getattr(self, name) for name in ChunkHeader.__struct_fields__})


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """Decode's copy engine has read this chunk of a PullReady, of an offer that is a bound.

    So the source of an answer that moves knows what is still on its way. Only sent to a peer whose terms say that it
    hears it.
    """

    request_id: RequestId
    epoch: Epoch
    index: int


class PullScheduled(msgspec.Struct, frozen=True, tag="coming"):
    """Tokens `[first_token, first_token + num_tokens)` are about to be computed.

    They go into `pages` of prefill's pool, and are there when the link's semaphore, a word that prefill's device sets,
    has reached `mark`; the first `early_planes` of each page are there one earlier. Decode's device may wait for that
    and copy them. It is a hint: a PullReady follows if they were computed, nothing if not. The tokens may begin before
    those that were granted.
    """

    request_id: RequestId
    epoch: Epoch
    first_token: int
    num_tokens: int
    pages: list[BlockId]
    early_planes: int
    mark: int
    group: int = 0


class Fin(msgspec.Struct, frozen=True, omit_defaults=True, tag="fin"):
    """The end of what is sent, with the token to go on after.

    After an offer that is a bound, `num_tokens` of KV came, and `drawn` are the answer's tokens between the job's and
    `first`, in order. Together they are no more than MAX_MOVED_TOKENS and MAX_MOVED_NBYTES.
    """

    request_id: RequestId
    epoch: Epoch
    num_chunks: int
    first: Token
    cached_tokens: int
    num_tokens: int | None = None
    drawn: list[Token] = []


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """The receiver's statement that these bytes arrived and are right."""

    request_id: RequestId
    epoch: Epoch
    num_chunks: int
    nbytes: int


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: RequestId
    epoch: Epoch
    code: str
    reason: str


class AbortAck(msgspec.Struct, frozen=True, tag="abort_ack"):
    """The writer of this attempt has ended, and no byte of it will land from now on."""

    request_id: RequestId
    epoch: Epoch


class PrefixRequest(msgspec.Struct, frozen=True, tag="prefix"):
    """The question for the KV of a prompt from `first_token` on, which is at the edge of a block.

    `digests`: of the blocks from there on (contracts.hashing.chain_hashes), 16 bytes each, one after the other.
    `shared_id`: see KVLayout.shared_id; a worker whose own differs holds none of these. Who has the first of them
    offers as many as it has, without a gap, to `reader`, and offers fewer anew if its tiers did not give all of them.
    """

    request_id: RequestId
    epoch: Epoch
    reader: WorkerRef
    shared_id: bytes
    first_token: int
    digests: bytes


HandoffMessage = (
    Offer
    | Grant
    | Wait
    | Refuse
    | ChunkHeader
    | PullScheduled
    | PullReady
    | Fetched
    | Fin
    | Commit
    | Abort
    | AbortAck
    | PrefixRequest
)
