"""The gated delta rule, token by token and by tiles of a prompt.

It is that of Yang et al. 2024 ("Gated Delta Networks"). A head's state S `[key, value]` becomes e^g S, then S + k u^T
with u = beta (v - S^T k), and gives S^T q. Within a tile all u follow from the state before it: with G the sums of g up
to each token, (1 + L) U = beta (V - e^G K S), where L has beta_t e^(G_t - G_j) (k_t k_j) below the diagonal; the decays
go up to the tile's end alone, so no exponent is positive.

Shapes: H heads, T tokens, K columns of a key, V of a value. Every call has those of one sequence, so a result does not
depend, to the bit, on what else is in a batch.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeltaInputs:
    """What the rule takes of some tokens.

    `q` and `k` `[H, T, K]`, `v` `[H, T, V]`, `log_decay`, g above, and `beta` `[H, T]`, all float32.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor

    def of(self, first: int, last: int) -> "DeltaInputs":
        """Return those of the tokens `[first, last)`."""
        span = slice(first, last)
        q, k, v = (part[:, span].contiguous() for part in (self.q, self.k, self.v))
        return DeltaInputs(q, k, v, self.log_decay[:, span].contiguous(), self.beta[:, span].contiguous())


def advance_tile(inputs: DeltaInputs, state_HKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the tokens of a tile give, `[H, T, V]`, and the state behind them."""
    q, k, beta_HT1 = inputs.q, inputs.k, inputs.beta[..., None]
    sums_HT = inputs.log_decay.cumsum(1)
    is_later = torch.ones(sums_HT.shape[1], sums_HT.shape[1], dtype=torch.bool).triu(1)
    decay_HTT = (sums_HT[:, :, None] - sums_HT[:, None]).masked_fill(is_later, -torch.inf).exp()
    since_begin_HT1 = sums_HT.exp()[..., None]
    system_HTT = beta_HT1 * decay_HTT * torch.bmm(k, k.transpose(1, 2))
    right_HTV = beta_HT1 * (inputs.v - since_begin_HT1 * torch.bmm(k, state_HKV))
    # Of the system only what is below the diagonal is read, which is taken for ones.
    u_HTV = torch.linalg.solve_triangular(system_HTT, right_HTV, upper=False, unitriangular=True)
    scores_HTT = decay_HTT * torch.bmm(q, k.transpose(1, 2))
    given_HTV = since_begin_HT1 * torch.bmm(q, state_HKV) + torch.bmm(scores_HTT, u_HTV)
    to_end_HT1 = (sums_HT[:, -1:] - sums_HT).exp()[..., None]
    added_HKV = torch.bmm((k * to_end_HT1).transpose(1, 2), u_HTV)
    return given_HTV, since_begin_HT1[:, -1:] * state_HKV + added_HKV


def advance_token(inputs: DeltaInputs, state_HKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same for one token, `[H, 1, V]`, which reads and writes the state once."""
    decayed_HKV = state_HKV * inputs.log_decay[..., None].exp()
    u_H1V = inputs.beta[..., None] * (inputs.v - torch.bmm(inputs.k, decayed_HKV))
    new_HKV = torch.baddbmm(decayed_HKV, inputs.k.transpose(1, 2), u_H1V)
    return torch.bmm(inputs.q, new_HKV), new_HKV
