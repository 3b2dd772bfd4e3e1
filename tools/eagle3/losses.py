"""What a head is trained to say: the target's distribution over the drafted tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK = 4096
"""Rows whose logits are there at once; rows come in whole chunks, so that one shape is compiled."""


def chunk_loss(logits: Tensor, wanted: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of weight times cross-entropy of some rows, and its gradient by the logits `[M, V]`.

    `wanted` `[M, V]` are distributions, `weights` `[M, 1]`.
    """
    said, shares = logits.float(), wanted.float()
    norms = torch.logsumexp(said, -1, keepdim=True)
    loss = ((norms - (shares * said).sum(-1, keepdim=True)) * weights).sum()
    return loss, ((torch.exp(said - norms) - shares) * weights).to(logits.dtype)


ChunkLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class DraftLoss(torch.autograd.Function):
    """The cross-entropy of a head against the target, with its output head, a chunk of rows at a time.

    Logits of all rows would be the largest tensors of training by far; their gradient is known at once, so that none is
    kept.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, head: Tensor, wanted: Tensor, weights: Tensor, of_chunk: ChunkLoss) -> Tensor:
        """Return the sum over rows of weight times cross-entropy.

        `rows` `[M, H]`, `head` `[V, H]`, `wanted` `[M, V]` distributions, `weights` `[M]`.
        """
        total = torch.zeros((), device=rows.device)
        to_rows, to_head = torch.empty_like(rows), torch.zeros(head.shape, device=rows.device)
        matrix = head.to(rows.dtype)
        for start in range(0, len(rows), CHUNK):
            part = slice(start, start + CHUNK)
            loss, gradient = of_chunk(rows[part] @ matrix.t(), wanted[part], weights[part, None])
            total += loss
            to_rows[part] = gradient @ matrix
            to_head += gradient.t() @ rows[part]
        ctx.save_for_backward(to_rows, to_head)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Scale what `forward` has found."""
        to_rows, to_head = ctx.saved_tensors
        (gradient,) = grad_outputs
        return to_rows * gradient.to(to_rows.dtype), to_head * gradient, None, None, None


def draft_loss(rows: Tensor, head: Tensor, wanted: Tensor, weights: Tensor, of_chunk: ChunkLoss = chunk_loss) -> Tensor:
    """Return the loss of `DraftLoss`; `of_chunk` is `chunk_loss`, or what a compiler made of it."""
    return DraftLoss.apply(rows, head, wanted, weights, of_chunk)  # pyright: ignore[reportReturnType]


def wanted_of(logits: Tensor, best: Tensor, drafted: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
    """Return what is wanted of rows, `[M, V]`, and which rows count, `[M]`.

    Those count whose first choice is drafted. Wanted is the target's softmax over the drafted tokens, and for a part,
    `sharpness`, its first choice alone, which is what greedy drafts are judged by. `logits` `[M, V]` are the target's
    of the drafted tokens, `best` `[M]` its first choices of all.
    """
    place = torch.searchsorted(drafted, best).clamp(max=len(drafted) - 1)
    shares = logits.float().softmax(-1) * (1 - sharpness)
    shares.scatter_add_(1, place[:, None], torch.full_like(shares[:, :1], sharpness))
    return shares.to(logits.dtype), drafted[place] == best
