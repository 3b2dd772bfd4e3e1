"""The interfaces of a device: all that an engine asks of the one that it runs on."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from contracts.events import Token
from contracts.ids import BlockId
from contracts.layout import KVLayout
from engine.adapters import LoadAdapter
from engine.cache.group_page_table import GroupPageTable
from engine.messages import PageChecksums
from engine.sampling.host_sampler import Sampler
from engine.sampling.prompt_logprobs import Scores
from engine.sampling.token_masks import TokenMasks
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from engine.speculative.proposer import Draft, Proposer


class PendingTokens(Protocol):
    """Tokens that a device draws by itself, while the host does something else."""

    @property
    def is_done(self) -> bool:
        """`wait` would not wait."""
        ...

    def wait(self) -> list[Token]:
        """Until all of the batch is computed: a token for each row that is drawn from, in order.

        That is one for each piece that samples, and one behind each token of its draft. May be called again.
        """
        ...


class PendingDrafts(Protocol):
    """The tokens of drafts that a device makes in the batch that verifies them."""

    def known(self, drafts: SequenceOf[Draft]) -> list[Draft]:
        """Return the drafts of the batch with their tokens, in order; waits until these are computed."""
        ...


@dataclass(frozen=True)
class Computed:
    """The results of a forward pass.

    `logits` `[number of chunks that sample, vocab]` float32, of no meaning where `pending_tokens` is there. `scored`
    are of the prompts that asked for it, to be sent once the batch is computed. `pending_drafts`: where some are made
    on the way. `hidden` `[len(logits), hidden]` float32: the rows behind the final norm, if any of the sequences wants
    its own.
    """

    logits: torch.Tensor
    scored: tuple[Scores, ...] = ()
    pending_tokens: PendingTokens | None = None
    pending_drafts: PendingDrafts | None = None
    hidden: torch.Tensor | None = None


def wants_hidden(chunks: SequenceOf[ScheduledChunk]) -> bool:
    """Return whether a sequence whose next token the batch says wants its hidden row with it."""
    return any(chunk.samples and chunk.sequence.sampling.returns_embedding for chunk in chunks)


Written = Callable[[bool], None]
"""(whether all planes of a batch's prompts have been launched, or only the early ones)"""


def ignore_progress(is_all: bool) -> None:
    """Nobody waits for the planes."""


def ignore() -> None:
    """There is nothing to do."""


class Runner(Protocol):
    """The part of a device that computes batches.

    `early_planes`: so many of the cache's are filled a while before a batch ends; 0 if all come at once. `quick_rows`:
    a batch of more takes the host several times as long to launch. `gives_hidden`: it can give Computed.hidden.
    """

    early_planes: int
    gives_hidden: bool

    @property
    def max_graph_rows(self) -> int:
        """Constant once a model is loaded."""
        ...

    @property
    def max_draft_rows(self) -> int:
        """The most rows of a batch that are of drafts, beside one for each sequence."""
        ...

    @property
    def graph_rows(self) -> tuple[int, ...]:
        """Numbers of rows, ascending, to which a batch with prompts is padded; none if it is not.

        Constant once a model is loaded.
        """
        ...

    def forward(self, pieces: SequenceOf[ScheduledChunk], written: Written = ignore_progress) -> Computed:
        """Writes K and V; running it again, as after an error, writes the same.

        `written` is called when the early planes of prompts have been launched, and may be when all have: what is
        behind them is not in the cache. Raises RuntimeError.
        """
        ...

    def forward_without_sampling(self, pieces: SequenceOf[ScheduledChunk]) -> Computed:
        """The same without drawing: the tokens of the batch before stay on the device."""
        ...

    def sample(self, sequences: SequenceOf[Sequence], logits: torch.Tensor, masks: TokenMasks) -> PendingTokens | None:
        """Have the device draw what `forward` left undrawn, and wait for nothing.

        `masks`: of the sequences with a grammar. None from a runner whose tokens the host draws.
        """
        ...

    def wait(self) -> None:
        """Until all that was launched is computed."""
        ...

    def prepare(self, piece: ScheduledChunk) -> None:
        """Do all of the next batch that does not need its token's id.

        The chunk is the newest token of an answer and may well be that batch. Nothing is being computed.
        """
        ...


class PagedCache(Protocol):
    """The paged KV cache.

    `pool_bytes` `[num_planes, num_pages, page_nbytes]` uint8 are the pages of the layout's first group; raises
    ConfigError where the host can't see them. `transfer_pool`: what kv_transfer.node takes, `pool_bytes`, a list of the
    pages of each group, or a GPU's DeviceTransferPool.
    """

    layout: KVLayout
    num_blocks: int

    @property
    def pool_bytes(self) -> np.ndarray: ...

    @property
    def transfer_pool(self) -> Any: ...

    def checksums(self, blocks: SequenceOf[BlockId]) -> PageChecksums | None:
        """Return those of blocks whose computation has been launched.

        None if the transfer makes its own, or is to make none.
        """
        ...

    def checksums_behind(self, blocks: SequenceOf[BlockId]) -> PageChecksums | None:
        """Return those of cached blocks, once all that was launched is computed; None if all of it is."""
        ...


class AuxReader(Protocol):
    """The reader of a target's rows, such as a draft head."""

    def read(self, pieces: SequenceOf[ScheduledChunk], aux_MA: torch.Tensor) -> None:
        """Take in a batch that was computed.

        `aux_MA` `[M, aux layers * hidden]` float32: what went into the aux layers, side by side, of all rows in the
        order of the pieces.
        """
        ...


def ignore_accepted(sequence: Sequence, num_accepted: int) -> None:
    """A wrong guess leaves nothing that is not written again."""


def ignore_leaving(sequence: Sequence) -> None:
    """Nothing of a draft has to leave with the sequence."""


class Drafter(Proposer, Protocol):
    """A proposer that computes on the device what it drafts, from rows of the target."""

    def forget_blocks(self, blocks: SequenceOf[BlockId]) -> None:
        """Take note that what the drafter keeps of these blocks is of other tokens from now on."""
        ...

    def settle(self, sequence: Sequence) -> None:
        """Put what its next draft takes into the sequence's blocks, which are about to leave."""
        ...


@dataclass(frozen=True)
class Drafting:
    """A drafter, and the runner that an engine which uses it takes: the drafter reads its batches."""

    drafter: Drafter
    runner: Runner


@dataclass(frozen=True)
class Backend:
    """A loaded model on its device.

    `dtype`: the number format that `auto` became. `max_model_len`: the longest context in tokens, which the cache
    holds. `caches_decoded_kv`: later prompts may share an answer's KV. It is to the bit what a prompt's would be, or of
    the same number formats and rounded by other kernels, as that of prompts is which are cut into other chunks. `close`
    ends the processes that compute with this one. `on_accepted`: told of each guess that was right, at once, by the
    sequence and how many of its draft were by then: what is overwritten with each token goes on. `drafting`: what
    drafts with weights, if settings ask for it. `page_tables`: of the layout's groups of short life, in its order, as
    the runner reads them. `load_adapter`: makes a LoRA adapter ready for the runner, where settings enable them.
    """

    cache: PagedCache
    runner: Runner
    sampler: Sampler
    dtype: str
    max_model_len: int
    caches_decoded_kv: bool
    drafting: Drafting | None = None
    close: Callable[[], None] = ignore
    on_accepted: Callable[[Sequence, int], None] = ignore_accepted
    page_tables: SequenceOf[GroupPageTable] = ()
    load_adapter: LoadAdapter | None = None
