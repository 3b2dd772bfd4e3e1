"""Groups of layers beside a model's, with pages of random bytes, as a draft head has them. Not a test."""

from collections.abc import Sequence

import numpy as np

from contracts.layout import KVGroup
from engine.cpu.joint_cache import GroupPages, JointCache
from engine.engine import Engine

# pyright: reportPrivateUsage=false, reportArgumentType=false


def head_groups(weights: str, block_size: int = 16) -> tuple[KVGroup, KVGroup]:
    """Return the KV of a head of one layer, and the row that it keeps of each block."""
    facts = {"layers": (0,), "head_dim": 24, "block_size": block_size, "dtype": "float32", "weights": weights}
    kv = KVGroup(kind="draft", num_kv_heads=2, **facts)
    return kv, KVGroup(kind="draft_row", planes=("row",), num_kv_heads=1, **facts)


def put_beside(engine: Engine, groups: Sequence[KVGroup], seed: int) -> None:
    """Give an engine that has done nothing yet these groups, whose pages it never touches by itself."""
    rng, num_blocks = np.random.default_rng(seed), engine.pool.num_blocks
    beside = [
        GroupPages(group, rng.integers(0, 256, (group.num_planes, num_blocks, group.page_nbytes(1)), np.uint8))
        for group in groups
    ]
    engine._cache = JointCache(engine._cache, beside)
    engine.layout = engine._cache.layout


def pages_of_prompt(engine: Engine, digests: Sequence[bytes]) -> list[np.ndarray]:
    """Return the pages `[planes, blocks, bytes]` of each group that hold these blocks, all of which are cached."""
    found = engine.pool.find_by_digest(digests)
    assert len(found) == len(digests)
    pools = engine.transfer_pool
    return [pool[:, found].copy() for pool in (pools if isinstance(pools, list) else [pools])]
