"""Multi-head latent attention on the CPU (DeepSeek-AI 2024): what surrounds attention over latents.

No key or value of a head is made of a latent. A head's q is multiplied by the matrix that would make its keys, and what
attention gives by the one that would make its values ("absorbed"; DeepSeek-V2, 2.1.2), so that all heads attend to one
row a token, as the heads of a group do to one KV head.

Shapes: M rows, H heads, N columns of q and k that are not turned, R columns that are, C width of a latent, V columns of
a value.
"""

from functools import cache

import torch
import torch.nn.functional as F

from engine.cpu.linear import PhasedLinear, cancelling_operands, sound_multiple
from engine.cpu.norms import RmsNorm
from models.config import LatentAttention

_NORM_EPS = 1e-6
"""That of the latents' norms, whatever config.json says of the others: DeepSeek's code and transformers have it so."""
_TRIED_ROWS = 120


class HeadwiseLinear:
    """A matrix for each head, `weight_HIO` float32: `[M, H, in]` -> `[M, H, out]` float32.

    A row's result does not depend, to the bit, on the number of rows, which are padded to a multiple of
    headwise_multiple().
    """

    def __init__(self, weight_HIO: torch.Tensor) -> None:
        self._weight_HIO = weight_HIO.contiguous()
        self._multiple = headwise_multiple(*weight_HIO.shape[1:], torch.get_num_threads())

    def __call__(self, x_MHI: torch.Tensor) -> torch.Tensor:
        missing = -len(x_MHI) % self._multiple
        x_HMI = F.pad(x_MHI.float(), (0, 0, 0, 0, 0, missing)).transpose(0, 1).contiguous()
        return torch.bmm(x_HMI, self._weight_HIO).transpose(0, 1)[: len(x_MHI)]


@cache
def headwise_multiple(num_in: int, num_out: int, num_threads: int) -> int:
    """Return a number of rows whose multiples MKL's batched products compute alike; found by trying."""
    x, weight = cancelling_operands(_TRIED_ROWS, num_in, num_out)
    x_HMI, weight_HIO = x.expand(2, -1, -1).contiguous(), weight.t().expand(2, -1, -1).contiguous()
    y = torch.bmm(x_HMI, weight_HIO)
    return sound_multiple(lambda n: torch.equal(torch.bmm(x_HMI[:, :n].contiguous(), weight_HIO), y[:, :n]))


class LatentProjection:
    """See engine.cpu.head_projection.Projection.

    `down` gives q, or the latent of `q_rank` that `q_up` makes q of, and beside it the latent that is kept, before its
    norm, and the key that is turned. Gains come times sqrt(width); `q_gain` is None where folded into `q_up`.
    `keys_HNC` makes keys of latents.
    """

    def __init__(
        self,
        latent: LatentAttention,
        down: PhasedLinear,
        q_up: PhasedLinear | None,
        q_gain: torch.Tensor | None,
        kv_gain: torch.Tensor,
        keys_HNC: torch.Tensor,
    ) -> None:
        self._latent, self._down, self._q_up, self._q_gain, self._kv_gain = latent, down, q_up, q_gain, kv_gain
        self._q_norm, self._kv_norm = (RmsNorm(width, _NORM_EPS) for width in (latent.q_rank, latent.kv_rank))
        self._keys = HeadwiseLinear(keys_HNC)

    def __call__(
        self, x: torch.Tensor, turns: torch.Tensor, num_answer_rows: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes, down = self._latent, self._down(x, num_answer_rows).float()
        q, kept, key = down.split([down.shape[1] - sizes.width, sizes.kv_rank, sizes.rope_dim], 1)
        if self._q_up is not None:
            q = self._q_up(self._q_norm(q, self._q_gain), num_answer_rows).float()
        q_MHN, q_MHR = q.unflatten(1, (-1, sizes.nope_dim + sizes.rope_dim)).split([sizes.nope_dim, sizes.rope_dim], 2)
        turned = _turned(torch.cat([q_MHR, key[:, None]], 1), turns)
        q_MHD = torch.cat([self._keys(q_MHN), turned[:, :-1]], 2)
        kept_MD = torch.cat([self._kv_norm(kept, self._kv_gain), turned[:, -1]], 1)
        return q_MHD.to(dtype), kept_MD.to(dtype)[:, None]


class LatentOutput:
    """What becomes of attention over latents: each head's values, and the output projection of these.

    `values_HCV` makes values of latents.
    """

    def __init__(self, latent: LatentAttention, values_HCV: torch.Tensor, output: PhasedLinear) -> None:
        self._latent, self._values, self._output = latent, HeadwiseLinear(values_HCV), output
        self.is_uniform = output.is_uniform

    def __call__(self, mixed: torch.Tensor, num_answer_rows: int) -> torch.Tensor:
        """`[M, H * (C + R)]`, of which the last R columns of each head mean nothing -> `[M, hidden]`."""
        latents_MHC = mixed.unflatten(1, (-1, self._latent.width))[..., : self._latent.kv_rank]
        return self._output(self._values(latents_MHC).flatten(1), num_answer_rows)


def _turned(x_MHR: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return columns of heads turned by `turns` `[M, 1, R / 2]`, the two parts of a pair side by side.

    Not as complex numbers: torch multiplies the last few of those with other roundings than the others.
    """
    (x, y), (cosine, sine) = x_MHR.unflatten(2, (-1, 2)).unbind(3), torch.view_as_real(turns).unbind(3)
    return torch.stack([x * cosine - y * sine, x * sine + y * cosine], 3).flatten(2)
