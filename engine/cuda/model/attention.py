"""Paged attention over the device's cache: prompts of any lengths in one launch, decodes in another."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.cuda.inputs.batch_inputs import Queries, in_segments
from engine.cuda.kv.kv_cache import LayerCache
from engine.cuda.model.forward_inputs import Attend, QueryRows
from engine.cuda.model.weights import AttentionWindow
from engine.cuda.runtime.upload import upload_all
from kernels.registry import Registry
from kernels.specs import AttnSpec, KVDtype
from kernels.workspace import decode_workspace_nbytes
from models.config import ModelConfig
from models.eagle3 import Eagle3Config

# Room for two float16 copies of the keys and values of a batch of prompts: with it prefill attention is a quarter
# faster (docs/design/kernels.md).
_MAX_WORKSPACE_NBYTES = 512 << 20
_DECODE_ROWS = 16  # of queries to a KV head

MAX_FEW, MANY_KEYS = 256, 16384
"""More rows of a sequence are never few to `are_few`; behind so many keys as many are few as ever."""
_TILE, _MAX_FEW_TILES = 128, 66


@dataclass(frozen=True)
class _PrefillAttention:
    """An implementation of prefill attention for some layers.

    And what it wants of a batch before the first of them: kernels.registry.Registry.preparer.
    """

    attend: Callable[..., None]
    prepare: Callable[..., Any]


def decode_workspace(config: ModelConfig | Eagle3Config, max_num_seqs: int, device: torch.device) -> Tensor:
    """Zeros, as both decode operations want it. For up to 16 query heads to a KV head."""
    nbytes = decode_workspace_nbytes(max_num_seqs, config.num_kv_heads, _DECODE_ROWS, config.head_dim)
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def attention_specs(config: ModelConfig, kv: KVDtype, block_size: int) -> dict[int, AttnSpec]:
    """Return the specs by window, 0 for all tokens."""
    shared = AttnSpec(config.num_heads, config.num_kv_heads, config.head_dim, block_size, kv, sinks=config.sinks)
    return {window: replace(shared, window=window) for window in {0, config.window}}


class DeviceAttention:
    """`wants_e4m3`: prompts' queries are to be e4m3, unscaled (kernels.specs.RopeSpec)."""

    def __init__(
        self,
        config: ModelConfig,
        registry: Registry,
        kv: KVDtype,
        block_size: int,
        max_tokens: int,
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        """Allocate the workspace.

        `max_tokens`: those of all the sequences of a batch of prompts, contexts included, that the workspace is for.
        """
        self._scale, self._segment, self._block_size = config.head_dim**-0.5, config.segment, block_size
        self._pages = torch.arange(config.segment // block_size, device=device)
        specs = attention_specs(config, kv, block_size)
        best = {window: registry.built("attn_prefill", spec) for window, spec in specs.items()}
        self.wants_e4m3 = kv == "e4m3" and all(impl.wants_e4m3 for impl in best.values())
        self._num_heads = config.num_heads
        self._prefills = {window: _prefill(registry, spec) for window, spec in specs.items()}
        self._few = {}
        for impl in registry.candidates("attn_prefill", specs[0]):
            if impl.name == best[0].for_few:
                self._few[0] = _PrefillAttention(
                    impl.load(specs[0], registry.plans, registry.caps), impl.preparer(specs[0])
                )
        self._decodes = {window: registry.get("attn_decode", spec) for window, spec in specs.items()}
        # The copies, or FlashInfer's e4m3 queries, which are more bytes where many heads share a key.
        token_nbytes = max(4 * config.num_kv_heads, config.num_heads) * config.head_dim
        nbytes = min(_MAX_WORKSPACE_NBYTES, token_nbytes * max_tokens)
        self._prefill_space = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._decode_space = decode_workspace(config, max_num_seqs, device)

    @property
    def is_cut(self) -> bool:
        """Whether there are segments: some layers' tables are parts of a sequence's."""
        return self._segment > 0

    def of_prompts(self, queries: Queries) -> Attend:
        whole = self._of_prompts(queries)
        if not self._segment or queries.lengths.max() <= self._segment:
            return whole
        cut = in_segments(queries, self._segment, self._block_size)
        return _by_sight(whole, self._of_prompts(cut))

    def _of_prompts(self, queries: Queries) -> Attend:
        prefills = self._prefills
        if are_few(queries.counts, queries.lengths, self._num_heads):
            prefills = {**prefills, **self._few}
        arrays = queries.tables, queries.lengths, queries.q_starts, queries.kv_starts
        tables, lengths, q_starts, kv_starts = upload_all(arrays, self._prefill_space.device)
        counts, totals = queries.counts.tolist(), queries.lengths.tolist()
        prepared = {window: prefill.prepare(tables, counts, totals) for window, prefill in prefills.items()}
        max_q, max_kv = max(counts), max(totals)

        def attend(asked: QueryRows, cache: LayerCache, out: Tensor, sight: AttentionWindow) -> None:
            prefills[sight.window].attend(
                asked.of_prompts, cache.keys, cache.values, tables, lengths, q_starts, kv_starts, out,
                self._prefill_space, max_q=max_q, max_kv=max_kv, sm_scale=self._scale, prepared=prepared[sight.window],
                k_scale=cache.k_scale, v_scale=cache.v_scale, sinks=sight.sinks,
            )  # fmt: skip

        return attend

    def of_decodes(self, tables: Tensor, lengths: Tensor, max_len: int) -> Attend:
        """`max_len` chooses how it is launched.

        Any length is computed right where there are no segments, up to `max_len` where there are. Reads `lengths` on
        the device for these: to be asked anew for each step.
        """
        whole = self._of_decodes(tables, lengths, max_len)
        if not self._segment or max_len <= self._segment:
            return whole
        index = (lengths - 1) // self._segment
        columns = (index[:, None] * len(self._pages) + self._pages).clamp_(max=tables.shape[1] - 1)
        cut = self._of_decodes(tables.gather(1, columns), lengths - index * self._segment, self._segment)
        return _by_sight(whole, cut)

    def _of_decodes(self, tables: Tensor, lengths: Tensor, max_len: int) -> Attend:
        def attend(asked: QueryRows, cache: LayerCache, out: Tensor, sight: AttentionWindow) -> None:
            self._decodes[sight.window](
                asked.plain, cache.keys, cache.values, tables, lengths, out, self._decode_space, sm_scale=self._scale,
                max_len=max_len, k_scale=cache.k_scale, v_scale=cache.v_scale, sinks=sight.sinks,
            )  # fmt: skip

        return attend


def are_few(counts: np.ndarray, lengths: np.ndarray, num_heads: int) -> bool:
    """Return whether there are so few rows that sharing out their keys pays.

    Whether rows (`counts` of each sequence, `lengths` with context) have so few tiles, of 128 rows of a head, that
    attention which shares out no keys would leave most of 132 multiprocessors idle, for longer than the host needs for
    the launches of sharing: three a layer, and two up to 64 rows.

    A lone prompt of Llama-8B's shape by FlashInfer's fa3 and by ours, which shares keys, H200, ms: 64 rows behind 2048
    keys 5.2 and 5.6, behind 8192 8.4 and 6.3, behind 32 768 19.6 and 12.0; 128 rows 5.7 and 7.3, 8.8 and 7.8, 20.2 and
    13.3; 256 rows behind 8192 10.0 and 8.8, behind 32 768 20.7 and 17.6. From 320 rows on fa3's attention is faster.
    """
    num_tiles, most = int((-(-counts // _TILE)).sum()) * num_heads, int(counts.max())
    least_keys = max(3072 if most <= 64 else 6144, 2 * num_tiles**2)
    return most <= MAX_FEW and num_tiles <= _MAX_FEW_TILES and int(lengths.max()) >= least_keys


def _prefill(registry: Registry, spec: AttnSpec) -> _PrefillAttention:
    return _PrefillAttention(registry.get("attn_prefill", spec), registry.preparer("attn_prefill", spec))


def in_two(decodes: Attend, count: int, prompts: Attend) -> Attend:
    """Return the attention of decodes and of the prompts behind them.

    Of `count` rows of decodes, which know their own and write some beyond, and of prompts in those behind.
    """

    def attend(asked: QueryRows, cache: LayerCache, out: Tensor, sight: AttentionWindow) -> None:
        decodes(asked, cache, out, sight)
        prompts(asked[count:], cache, out[count:], sight)

    return attend


def _by_sight(whole: Attend, cut: Attend) -> Attend:
    def attend(asked: QueryRows, cache: LayerCache, out: Tensor, sight: AttentionWindow) -> None:
        (cut if sight.in_segments else whole)(asked, cache, out, sight)

    return attend
