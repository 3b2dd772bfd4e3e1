"""What an engine needs of the device that it runs on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from contracts.ids import BlockId
from contracts.layout import KVLayout
from engine.messages import Checksums
from engine.runner import Runner, ignore
from engine.sampler import Sampler


class Pages(Protocol):
    """The paged KV cache. `pool_bytes` `[num_planes, num_blocks, page_nbytes]` uint8 is what a transfer reads and
    writes; raises ConfigError where the host can't see it. `transfer_pool`: what kv_transfer.node takes, `pool_bytes`
    or a GPU's DevicePages.
    """

    layout: KVLayout
    num_blocks: int

    @property
    def pool_bytes(self) -> np.ndarray: ...

    @property
    def transfer_pool(self) -> Any: ...

    def checksums(self, blocks: Sequence[BlockId]) -> Checksums | None:
        """Of blocks whose computation has been launched; None if the transfer makes its own, or is to make none."""
        ...


@dataclass(frozen=True)
class Backend:
    """`caches_answers`: an answer's KV is to the bit what a prompt's would be, so later prompts may share it. `close`
    ends the processes that compute with this one.
    """

    cache: Pages
    runner: Runner
    sampler: Sampler
    caches_answers: bool
    close: Callable[[], None] = ignore
