"""What an engine needs of the device that it runs on."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from contracts.layout import KVLayout
from engine.runner import Runner
from engine.sampler import Sampler


class Pages(Protocol):
    """The paged KV cache. `pool_bytes` `[num_planes, num_blocks, page_nbytes]` uint8 is what a transfer reads and
    writes; raises ConfigError where the host can't see it.
    """

    layout: KVLayout
    num_blocks: int

    @property
    def pool_bytes(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Backend:
    """`caches_answers`: an answer's KV is to the bit what a prompt's would be, so later prompts may share it."""

    cache: Pages
    runner: Runner
    sampler: Sampler
    caches_answers: bool
