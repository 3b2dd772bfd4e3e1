"""The decoder that all families share, over rows of any sequences, from the library's operations.

Between kernels rows are bf16 (or float32); beside matrices of the recipe "row" they are rounded to e4m3, one scale a
token, and few rows beside those of "block128" with one for each 128 columns. Products of these are left to the kernel
that reads them: of few rows in parts along k (`kernels.decode_plan.skinny_parts`); of many beside "row" unscaled, which
is exact, and faster than scaling in cuBLAS. That kernel adds the bias too, and rope's takes the norm of each head.

Shapes: T rows, H hidden size, D head size.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from engine.backend import Written, ignore_progress
from engine.cuda.kv.kv_cache import DeviceCache, LayerCache
from engine.cuda.model.forward_inputs import Advance, Attend, QueryRows, Rows
from engine.cuda.model.linear import (
    QuantizedLinear,
    RowBuffer,
    Scaled,
    SplitKPartials,
    finishing_arguments,
    rounding,
    unrounded,
)
from engine.cuda.model.matrices import Matrix
from engine.cuda.model.moe import DeviceMoE, ExpertWeights
from engine.cuda.model.number_formats import E4M3, DeviceFormat
from engine.cuda.model.weights import DeviceLayerWeights, DeviceWeights, MlpWeights
from engine.cuda.runtime.process_group import SINGLE_PROCESS, ProcessGroup
from kernels.reference.quant import to_e4m3
from kernels.registry import Registry
from kernels.specs import NormSpec, Quant, QuantSpec, RopeSpec, SiluSpec
from models.config import ModelConfig

SINKS = 4
"""The first tokens of a text, where activations are hundreds of times the usual ones (Xiao et al. 2024, attention
sinks). No answer has such a token.
"""


def without_sinks(x: Tensor, dim: int = 0) -> Tensor:
    """Without what is of them, along `dim`, unless the text has no other tokens."""
    first = SINKS if x.shape[dim] > SINKS else 0
    return x.narrow(dim, first, x.shape[dim] - first)


@dataclass(frozen=True)
class _RotaryTable:
    """How rope turns a layer's rows, as at `positions` `[T]`.

    And what q is then multiplied by, `[T]` float32.
    """

    positions: Tensor
    scales: Tensor | None = None


class Transformer:
    """`max_rows`: the most rows of one call; their activations are allocated here, once.

    `is_smooth`: so are the keys (kernels.specs.RopeSpec), and every cache has offsets. `rounds_queries` of prompts to
    e4m3.

    `aux` takes what goes into `aux_layers`, side by side, of all rows of a call: a draft head reads it.

    While `peaks` `[layers, 2]` is there, it takes the largest scales of attention's output and of the MLP's middle, the
    first tokens of a text left out.
    """

    def __init__(
        self,
        config: ModelConfig,
        number_format: DeviceFormat,
        weights: DeviceWeights,
        registry: Registry,
        block_size: int,
        max_rows: int,
        team: ProcessGroup = SINGLE_PROCESS,
        is_smooth: bool = False,
        rounds_queries: bool = False,
        aux_layers: SequenceOf[int] = (),
    ) -> None:
        self._group, self.is_smooth, self._aux_layers = team, is_smooth, tuple(aux_layers)
        # Tunings multiply a query once it is turned, on any layer of such a model.
        self._rounds_queries = rounds_queries and weights.attention_temperatures is None
        self._config, self._weights, self._format, self._registry = config, weights, number_format, registry
        self._block_size = block_size
        self.peaks: Tensor | None = None
        # The rest of a chunk takes longer to compute than these take to be pulled.
        self.early_layers = len(weights.layers) * 7 // 8
        self.num_layers = len(weights.layers)
        self._get = cache(registry.get)  # asked at every step, and bound once
        self._allocate(max_rows, weights.embedding.device)

    @torch.inference_mode()
    def __call__(self, rows: Rows, cache: DeviceCache, attend: Attend) -> Tensor:
        """All rows after the final norm, for `head`; their K and V are in the cache."""
        self.fill(rows, cache, attend)
        count = len(rows.token_ids)
        queries = self._q[:count]
        return self._finish(self._residual[:count], QueryRows(queries, queries), cache, attend)

    @torch.inference_mode()
    def fill(
        self,
        rows: Rows,
        cache: DeviceCache,
        attend: Attend,
        written: Written = ignore_progress,
        advance: Advance | None = None,
    ) -> None:
        """Writes K and V of all rows, for `finish` of some.

        Calls `written` when the first `early_layers` have theirs, and when all have. A team says nothing of all: they
        are not there before the end, or before it has met. `advance`: does what the method of that name does.
        """
        count, advance, last = len(rows.token_ids), advance or partial(self.advance, rows, cache), self.num_layers - 1
        for index in range(self.num_layers):
            advance(index)
            # A team has met behind what the layers before have written.
            if self._group.shard.size > 1 and index == self.early_layers > 0:
                written(False)
            if self._group.shard.size == 1 and index == last:
                written(True)
            if index < last:
                self.attend(count, cache, index, attend)
            if self._group.shard.size == 1 and index == self.early_layers - 1:
                written(False)

    @torch.inference_mode()
    def finish(self, rows: Tensor, cache: DeviceCache, attend: Attend, as_prompts: bool = False) -> Tensor:
        """Return the rows after the final norm, for `head`.

        This is what follows the last K and V, of the rows `[W]` among those that `fill` was called for: 3 % of a
        prompt's work, and of its attention. `attend`: how they alone do, as decodes or `as_prompts`. Returns them after
        the final norm, for `head`.
        """
        queries = self._q.index_select(0, rows)
        asked = QueryRows(queries, to_e4m3(queries) if as_prompts and self._rounds_queries else queries)
        return self._finish(self._residual.index_select(0, rows), asked, cache, attend)

    def finish_nbytes(self, num_rows: int) -> int:
        """Return the bytes that `finish` of so many rows allocates.

        Their queries, twice in float32 while they are rounded, their residual, and what it returns.
        """
        config, plain_nbytes = self._config, self._format.rows.itemsize
        q_width = config.num_heads * config.head_dim
        rounding_nbytes = 8 * q_width if self._rounds_queries else 0
        return num_rows * (plain_nbytes * (q_width + 2 * config.hidden_size) + rounding_nbytes)

    def meet(self) -> None:
        """In place of a `finish`, which a team does not go without."""
        self._group.meet()

    @torch.inference_mode()
    def advance(self, rows: Rows, cache: DeviceCache, index: int) -> None:
        """From what the attention of the layer before left to the queries of this one, its K and V written.

        All of it is launched the same for as many rows, whatever these are.
        """
        count, layer = len(rows.token_ids), self._weights.layers[index]
        x, residual = self._x.of(layer.qkv, count), self._residual[:count]
        if index == 0:
            self._embed(layer, rows.token_ids, residual, x)
        else:
            mixed = self._mixed[:count].view(count, -1)
            self._leave(index - 1, mixed, residual, layer.attention_gain, x, rounding(layer.qkv, count))
        self.note_aux(index, residual)
        # Of the last layer the rows that go on attend as they are asked to later, whichever they are.
        num_plain = self._all if index == self.num_layers - 1 else rows.num_decodes
        self._project(layer, x, rows, num_plain, cache.layer(index))

    def note_aux(self, index: int, residual: Tensor) -> None:
        """Keep what goes into a layer, if a draft head reads it."""
        for place, layer in enumerate(self._aux_layers):
            if layer == index:
                self.aux[: len(residual)].chunk(len(self._aux_layers), 1)[place].copy_(residual)

    def attend(self, count: int, cache: DeviceCache, index: int, attend: Attend) -> None:
        """Attention of the first rows in a layer before the last."""
        attend(self._asked(count), cache.layer(index), self._mixed[:count], self._weights.layers[index].sight)

    def _finish(self, residual: Tensor, asked: QueryRows, cache: DeviceCache, attend: Attend) -> Tensor:
        last, mixed, out = self.num_layers - 1, self._mixed[: len(residual)], torch.empty_like(residual)
        attend(asked, cache.layer(last), mixed, self._weights.layers[last].sight)
        into = Scaled(out, self._x.scale)
        self._leave(last, mixed.view(len(residual), -1), residual, self._weights.final_gain, into, "none")
        return out

    def _asked(self, count: int) -> QueryRows:
        plain = self._q[:count]
        return QueryRows(plain, self._rounded_q[:count] if self._rounds_queries else plain)

    def _embed(self, layer: DeviceLayerWeights, token_ids: Tensor, residual: Tensor, x: Scaled) -> None:
        config, quant = self._config, rounding(layer.qkv, len(residual))
        embed = self._get("add_rmsnorm_quant", NormSpec(config.hidden_size, quant, embed=True))
        embed(self._weights.embedding, residual, layer.attention_gain, config.norm_eps, x.rows, x.scale, ids=token_ids)

    def _leave(self, index: int, mixed: Tensor, residual: Tensor, gain: Tensor, out: Scaled, quant: Quant) -> None:
        """The rest of a layer, from what its attention gave (`[T, heads * D]`).

        `out`: the norm for what follows.
        """
        layer, config = self._weights.layers[index], self._config
        read = self._products.as_read(layer.output, mixed, self._read)
        self._note(index, 0, read)
        if isinstance(layer.mlp, ExpertWeights):
            total = self._experts(layer, layer.mlp, read, residual)
            self._group.add(total)
            norm = self._get("add_rmsnorm_quant", NormSpec(config.hidden_size, quant))
            norm(total, residual, gain, config.norm_eps, out.rows, out.scale)
        else:
            middle = self._mlp(layer, read, residual)
            self._note(index, 1, middle)
            self._add_norm(layer.down, middle, residual, gain, out, quant)

    def _note(self, layer: int, which: int, rounded: Scaled) -> None:
        has_token_scales = rounded.rows.dtype == E4M3 and rounded.scale.dim() == 1  # else no step wants the peaks
        if self.peaks is not None and has_token_scales:
            self.peaks[layer, which] = without_sinks(rounded.scale).amax()

    @torch.inference_mode()
    def head(self, x: Tensor) -> Tensor:
        """Return the logits `[W, vocab]` of rows of what a call returns.

        Float32 from a plain head, else as activations are.
        """
        head = self._weights.head
        is_plain = head.recipe == "plain"
        logits = x.new_empty(len(x), head.shape[0], dtype=torch.float32 if is_plain else self._format.rows)
        if not len(x):
            return logits.new_empty(0, self._config.vocab_size)
        if is_plain:
            unrounded(x, head.weight, logits)
        else:
            self._products(head, self._rounded(x) if head.recipe == "row" else Scaled(x, x), logits)
        return self._group.gather(logits)

    def _rounded(self, x: Tensor) -> Scaled:
        rounded = Scaled(torch.empty(x.shape, dtype=E4M3, device=x.device), torch.empty(len(x), device=x.device))
        self._get("quant_fp8", QuantSpec(x.shape[1]))(x, rounded.rows, rounded.scale)
        return rounded

    def _allocate(self, max_rows: int, device: torch.device) -> None:
        config, plain, layers = self._config, self._format.rows, self._weights.layers
        hidden, inner = config.hidden_size, config.intermediate_size
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def empty(*shape: int) -> Tensor:
            return torch.empty(max_rows, *shape, dtype=plain, device=device)

        def buffer(matrices: list[Matrix], width: int, plain: torch.dtype | None = plain) -> RowBuffer:
            return RowBuffer(matrices, max_rows, width, plain, device)

        self.aux = empty(len(self._aux_layers) * hidden).zero_()
        # What a row holds before it is written is no NaN for an expert's choice.
        self._residual, self._sum = empty(hidden).zero_(), empty(hidden)
        self._qkv, self._q = empty(q_width + 2 * kv_width), empty(config.num_heads, config.head_dim).zero_()
        self._all = torch.full((1,), max_rows, dtype=torch.int32, device=device)
        if self._rounds_queries:
            self._rounded_q = torch.empty_like(self._q, dtype=E4M3)
        self._gate_up = empty(2 * inner)
        # Rows that pad a chunk hold what an earlier one left, never a NaN for an expert's choice.
        self._mixed = empty(config.num_heads, config.head_dim).zero_()
        dense = [layer for layer in layers if not isinstance(layer.mlp, ExpertWeights)]
        shared = [layer.shared for layer in layers if layer.shared is not None]
        gate_ups = [mlp.gate_up for mlp in [*(layer.dense for layer in dense), *shared]]
        self._x = buffer([layer.qkv for layer in layers] + gate_ups, hidden)
        self._read = buffer([layer.output for layer in layers], q_width, None)  # plain ones are read where they are
        self._middle = buffer([layer.down for layer in dense], inner)
        matrices = [self._weights.head, *(matrix for layer in layers for matrix in layer.matrices())]
        self._products = QuantizedLinear(self._registry, matrices, max_rows, device)
        if config.experts is not None:
            self._plain = empty(hidden)
            self._mixture = DeviceMoE(config, self._format, self._registry, max_rows, device)
        if shared and config.experts is not None:
            self._shared_gate_up = empty(2 * config.experts.intermediate_size)
            self._shared_middle = buffer([mlp.down for mlp in shared], config.experts.intermediate_size)

    def _no_rope(self, positions: Tensor) -> _RotaryTable:
        """At position 0 rope turns nothing."""
        tunings = self._weights.attention_temperatures
        scales = None if tunings is None else tunings.index_select(0, positions)
        return _RotaryTable(torch.zeros_like(positions), scales)

    def _project(self, layer: DeviceLayerWeights, x: Scaled, rows: Rows, num_plain: Tensor, cache: LayerCache) -> None:
        """Queries of the rows, of the first `num_plain` as they are; their K and V go into the cache."""
        turns = _RotaryTable(rows.positions) if layer.is_rotated else self._no_rope(rows.positions)
        config, count = self._config, len(x.rows)
        qkv, asked = self._qkv[:count], self._asked(count)
        product = self._products.unfinished(layer.qkv, x, qkv)
        self._get("rope_append", self._rope_spec(layer, product))(
            product.out, turns.positions, rows.slots, self._weights.cos_sin, asked.of_prompts, cache.keys, cache.values,
            k_scale=cache.k_scale, v_scale=cache.v_scale, k_offset=cache.k_offset,
            q_gain=layer.q_gain, k_gain=layer.k_gain, eps=config.norm_eps, q_plain=asked.plain,
            num_plain=num_plain, **finishing_arguments(layer.qkv, x, product),
        )  # fmt: skip
        if turns.scales is not None:
            asked.plain.mul_(turns.scales[:, None, None])

    def _rope_spec(self, layer: DeviceLayerWeights, product: SplitKPartials) -> RopeSpec:
        config = self._config
        return RopeSpec(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self._block_size,
            self._format.kv,
            parts=product.parts,
            deferred=product.deferred,
            smooth=self.is_smooth,
            biased=layer.qkv.bias is not None,
            normed=layer.q_gain is not None,
            rounded=self._rounds_queries,
        )

    def _experts(self, layer: DeviceLayerWeights, experts: ExpertWeights, mixed: Scaled, residual: Tensor) -> Tensor:
        """Adds attention to the residual; what the experts give, `[T, H]`."""
        x = Scaled(self._plain[: len(residual)], mixed.scale)
        self._add_norm(layer.output, mixed, residual, layer.mlp_gain, x, "none")
        total = self._sum[: len(residual)]
        self._mixture(experts, x.rows, total)
        if layer.shared is not None:
            total.add_(self._shared(layer.shared, x.rows))
        return total

    def _shared(self, mlp: MlpWeights, x: Tensor) -> Tensor:
        """What the shared expert makes of all rows, `[T, H]`: where `x` was."""
        count, rows = len(x), self._products.as_read(mlp.gate_up, x, self._x)
        middle = self._shared_middle.of(mlp.down, count)
        self._gated(mlp, rows, self._shared_gate_up[:count], middle)
        self._products(mlp.down, middle, x)
        return x

    def _mlp(self, layer: DeviceLayerWeights, mixed: Scaled, residual: Tensor) -> Scaled:
        """Adds attention to the residual; the MLP up to its middle, `[T, I]`."""
        count = len(residual)
        x, middle = self._x.of(layer.gate_up, count), self._middle.of(layer.down, count)
        self._add_norm(layer.output, mixed, residual, layer.mlp_gain, x, rounding(layer.gate_up, count))
        self._gated(layer.dense, x, self._gate_up[:count], middle)
        return middle

    def _gated(self, mlp: MlpWeights, x: Scaled, gate_up: Tensor, middle: Scaled) -> None:
        """Writes `gate_up` `[T, 2I]` and `middle` `[T, I]`."""
        product = self._products.unfinished(mlp.gate_up, x, gate_up, adds=False)
        spec = SiluSpec(middle.rows.shape[1], rounding(mlp.down, len(gate_up)), product.deferred)
        left = finishing_arguments(mlp.gate_up, x, product)
        self._get("silu_mul_quant", spec)(gate_up, middle.rows, middle.scale, **left)

    def _add_norm(self, matrix: Matrix, x: Scaled, residual: Tensor, gain: Tensor, out: Scaled, quant: Quant) -> None:
        """residual += x @ matrix; out = its norm."""
        product, config = self._summed(matrix, x, self._sum[: len(residual)]), self._config
        spec = NormSpec(config.hidden_size, quant, product.parts, product.deferred, biased=matrix.bias is not None)
        self._get("add_rmsnorm_quant", spec)(
            product.out, residual, gain, config.norm_eps, out.rows, out.scale, **finishing_arguments(matrix, x, product)
        )

    def _summed(self, matrix: Matrix, x: Scaled, total: Tensor) -> SplitKPartials:
        """x @ matrix over all of the team, which sums whole products with their scales, and no bias in them."""
        if self._group.shard.size == 1:
            return self._products.unfinished(matrix, x, total)
        self._products(matrix, x, total)
        self._group.add(total)
        return SplitKPartials(total)
