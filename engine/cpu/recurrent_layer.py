"""A recurrent layer on the CPU: what stands where other layers have attention.

Shapes: M rows of the batch, T rows of one piece, K key heads, W tokens that the convolution sees, C columns of query,
key and values of a key head, side by side; as in delta_rule H heads, which are the value heads, of V columns.
"""

import math
from dataclasses import dataclass

import torch

from engine.cpu.delta_rule import DeltaInputs, advance_tile, advance_token
from engine.cpu.linear import Linear, PhasedLinear
from engine.cpu.state_cache import StatePiece, StateUpdate
from models.config import Recurrence

_L2_EPS = 1e-6  # of the norms of queries and keys, as in transformers and flash-linear-attention


@dataclass(frozen=True)
class RecurrentWeights:
    """The weights of a recurrent layer's mixing of tokens.

    `project` gives for each key head its C columns, then what gates its value heads; `rates` gives beta of all value
    heads before the sigmoid, then their time steps. `conv_WKC`; `decay_H`, negative, and `step_bias_H`: of the time
    steps; `gain_V`: of the norm of each head, times the root of its width.
    """

    project: PhasedLinear
    rates: Linear
    conv_WKC: torch.Tensor
    decay_H: torch.Tensor
    step_bias_H: torch.Tensor
    gain_V: torch.Tensor


class RecurrentMixer:
    """The mixing of tokens by a state, `[M, hidden]` -> `[M, H * V]`, before the output projection."""

    def __init__(self, shape: Recurrence, weights: RecurrentWeights, norm_eps: float) -> None:
        self._shape, self._weights = shape, weights
        self._norm_floor = torch.tensor(math.sqrt(shape.value_dim * norm_eps))

    def __call__(self, x: torch.Tensor, num_answer_rows: int, update: StateUpdate, layer: int) -> torch.Tensor:
        shape = self._shape
        projected = self._weights.project(x, num_answer_rows).float().view(len(x), shape.num_key_heads, -1)
        columns_MKC, gates = projected.split([shape.mixed_width, shape.group * shape.value_dim], 2)
        beta, steps = self._weights.rates(x).float().chunk(2, 1)
        beta = 1 / (1 + torch.exp(-beta))
        log_decay = self._weights.decay_H * _softplus(steps + self._weights.step_bias_H)
        given = torch.empty(len(x), shape.num_value_heads, shape.value_dim)
        for piece in update.pieces:
            rows = piece.rows
            facts = columns_MKC[rows], log_decay[rows], beta[rows]
            given[rows] = self._advance(*facts, piece, update, layer)
        length = torch.hypot(torch.linalg.vector_norm(given, dim=-1, keepdim=True), self._norm_floor)
        gated = given / length * self._weights.gain_V * _silu(gates.reshape(given.shape))
        return gated.flatten(1)

    def _advance(
        self,
        columns_TKC: torch.Tensor,
        log_decay_TH: torch.Tensor,
        beta_TH: torch.Tensor,
        piece: StatePiece,
        update: StateUpdate,
        layer: int,
    ) -> torch.Tensor:
        """Return what the rows of one piece give, `[T, H, V]`, and leave the states that are to be kept."""
        shape, before = self._shape, update.before(layer, piece)
        num_past = shape.conv_width - 1
        past = before[:, : num_past * shape.mixed_width]
        past_WKC = past.view(shape.num_key_heads, num_past, shape.mixed_width).transpose(0, 1)
        seen_WKC = torch.cat([past_WKC, columns_TKC])
        inputs = self._inputs(self._convolved(seen_WKC, len(columns_TKC)), log_decay_TH, beta_TH)
        state = self._matrices(before)
        advance, tile = (advance_token, 1) if piece.is_answer else (advance_tile, update.cache.group.block_size)
        kept, parts = dict(piece.stops), []
        for first in range(0, len(columns_TKC), tile):
            end = min(first + tile, len(columns_TKC))
            part, state = advance(inputs.of(first, end), state)
            parts.append(part)
            if (page := kept.get(end)) is not None:
                update.leave(layer, page, self._parts(seen_WKC, end, state))
        if piece.drafted is not None:
            piece.drafted.advance_of[layer] = lambda state, place: self._further(state, place, inputs, seen_WKC)
        return torch.cat(parts, 1).transpose(0, 1)

    def _parts(self, seen_WKC: torch.Tensor, end: int, state_HKV: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parts of a state behind so many rows: the convolution's last inputs, and the matrices."""
        shape = self._shape
        last_KWC = seen_WKC[end : end + shape.conv_width - 1].transpose(0, 1)
        return last_KWC, state_HKV.view(shape.num_key_heads, shape.group, -1)

    def _further(
        self, before: torch.Tensor, row: int, inputs: DeltaInputs, seen_WKC: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the parts of a state behind one of a piece's rows, from that before it."""
        _, state = advance_token(inputs.of(row, row + 1), self._matrices(before))
        return self._parts(seen_WKC, row + 1, state)

    def _matrices(self, state: torch.Tensor) -> torch.Tensor:
        """Return the matrices of a state, `[H, K, V]`."""
        shape = self._shape
        matrices = state[:, (shape.conv_width - 1) * shape.mixed_width :]
        return matrices.reshape(shape.num_value_heads, shape.key_dim, shape.value_dim)

    def _convolved(self, seen_WKC: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the causal convolution of the last `num_rows`, one column at a time, and its SiLU."""
        total = seen_WKC[:num_rows] * self._weights.conv_WKC[0]
        for index, weight_KC in enumerate(self._weights.conv_WKC[1:], 1):
            total += seen_WKC[index : index + num_rows] * weight_KC
        return _silu(total)

    def _inputs(self, columns_TKC: torch.Tensor, log_decay_TH: torch.Tensor, beta_TH: torch.Tensor) -> DeltaInputs:
        shape = self._shape
        q, k, v = columns_TKC.split([shape.key_dim, shape.key_dim, shape.group * shape.value_dim], 2)
        q = _normalised(q) * shape.key_dim**-0.5
        return DeltaInputs(
            q=q.transpose(0, 1).repeat_interleave(shape.group, 0),
            k=_normalised(k).transpose(0, 1).repeat_interleave(shape.group, 0),
            v=v.reshape(len(v), shape.num_value_heads, shape.value_dim).transpose(0, 1).contiguous(),
            log_decay=log_decay_TH.t().contiguous(),
            beta=beta_TH.t().contiguous(),
        )


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x / ((x * x).sum(-1, keepdim=True) + _L2_EPS).sqrt()


def _silu(x: torch.Tensor) -> torch.Tensor:
    # Not F.silu, whose last few elements of a thread's share take another exponential than the others.
    return x / (1 + torch.exp(-x))


def _softplus(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 + e^x), x itself where the rest is lost in float32."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))
