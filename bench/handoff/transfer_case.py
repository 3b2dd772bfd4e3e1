"""The prompts whose pages the transports move, and the pools in which the pages lie."""

import math
from dataclasses import dataclass

import numpy as np

from contracts.ids import BlockId
from contracts.layout import KVLayout

SMOLLM2 = KVLayout.uniform(
    model="SmolLM2-135M", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32"
)
LLAMA = KVLayout.uniform(
    model="Llama-8B", num_layers=32, num_kv_heads=8, head_dim=128, block_size=64, dtype="float8_e4m3fn"
)
POOL_NBYTES = 256 << 20
NUM_SCATTERS = 4


@dataclass(frozen=True)
class TransferCase:
    """One prompt of a model, and the size of the pools that its pages lie in."""

    layout: KVLayout
    num_tokens: int

    @property
    def num_blocks(self) -> int:
        return self.layout.num_blocks(self.num_tokens)

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.layout.block_nbytes

    @property
    def pool_blocks(self) -> int:
        return POOL_NBYTES // self.layout.block_nbytes

    @property
    def params(self) -> dict[str, object]:
        return {
            "model": self.layout.model,
            "page KiB": self.layout.only_group.page_nbytes(1) // 1024,
            "tokens": self.num_tokens,
        }


CASES = [
    TransferCase(SMOLLM2, 128),
    TransferCase(SMOLLM2, 1024),
    TransferCase(SMOLLM2, 4096),
    TransferCase(LLAMA, 1024),
]


def make_pool(case: TransferCase) -> np.ndarray:
    group = case.layout.only_group
    shape = (group.num_planes, case.pool_blocks, group.page_nbytes(1))
    return np.frombuffer(bytearray(np.random.default_rng(7).bytes(math.prod(shape))), dtype=np.uint8).reshape(shape)


def scatters(case: TransferCase, seed: int) -> list[list[BlockId]]:
    """Return lists of pages for one prompt, scattered over the pool; moves take these lists in turn."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(case.pool_blocks)[: case.num_blocks] for _ in range(NUM_SCATTERS)]
    return [[BlockId(int(page)) for page in order] for order in orders]
