"""The head as it is trained: all positions of many sequences at once, several drafts deep.

Row i of step 0 has what the target knows of token i and the embedding of token i + 1. Row i of step s has the head's
own row i of step s - 1 and the embedding of token i + 1 + s, at position i + s: what a draft of s + 1 tokens from
position i computes, given that those before were right (training-time test, Li et al. 2025). It sees the rows 0 to i of
step 0, and of each later step its own column alone.

B sequences of T tokens, H columns, N heads, K of them for keys and values, of D columns, V drafted tokens.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.rotary_embedding import rope_frequencies
from models.config import ModelConfig
from models.eagle3 import Eagle3Config
from tools.eagle3.target import TargetModel, rotate_halves

INIT_STD, INIT_GAIN, DEEP = 0.02, 0.3, ("o_proj.weight", "down_proj.weight")
"""How weights are drawn, what the final gain is of the target's, so that nothing is said with certainty at first, and
the matrices that add to the residual, which begin smaller."""


class DraftAttention(nn.Module):
    """The attention of the first layer; names of the matrices as in a checkpoint."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        q_width, kv_width = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
        self.q_proj = nn.Linear(2 * config.hidden_size, q_width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=False)
        self._config = config

    def forward(
        self, x: Tensor, rotations: tuple[Tensor, Tensor], earlier: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the rows `[B, T, H]` of a step and its keys and values `[B, K, T, D]`.

        `x` `[B, T, 2 H]`; `earlier`: keys and values of the steps before, in order.
        """
        config = self._config
        q, k, v = (
            part(x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate_halves(q, *rotations), rotate_halves(k, *rotations)
        if not earlier:
            shared = config.num_heads != config.num_kv_heads
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        else:
            with torch.autocast(q.device.type, enabled=False):  # softmax would be widened in memory, too
                mixed = self._with_columns(q, earlier[0], [*earlier[1:], (k, v)])
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), (k, v)

    def _with_columns(self, q: Tensor, first: tuple[Tensor, Tensor], columns: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return attention over step 0 up to each row, and over each row's own column of later steps."""
        config, (batch, _, length, dim) = self._config, q.shape
        groups = config.num_heads // config.num_kv_heads
        q = q.reshape(batch, config.num_kv_heads, groups, length, dim) * dim**-0.5
        keys, values = (part[:, :, None] for part in first)
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        # The columns are padded, since products of rows that begin at odd addresses are slow.
        own = torch.stack([(q * k[:, :, None]).sum(-1) for k, _ in columns], -1)
        own = F.pad(own, (0, -len(columns) % 8), value=float("-inf"))
        scores = torch.cat([(q @ keys.transpose(-1, -2)).masked_fill(future, float("-inf")), own], -1)
        shares = scores.softmax(-1)
        first_shares, own_shares = shares.split([length, own.shape[-1]], -1)
        mixed = first_shares @ values
        for share, (_, v) in zip(own_shares.unbind(-1), columns, strict=False):
            mixed = mixed + share[..., None] * v[:, :, None]
        return mixed.reshape(batch, config.num_heads, length, dim)


class DraftNorm(nn.Module):
    """RMSNorm in the type of its rows, as they are served."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps).to(x.dtype)


class DraftMlp(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """The first layer: it takes the embedding beside the feature."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMlp(config)
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            DraftNorm(config.hidden_size, config.norm_eps) for _ in names
        )
        self._norm_before_residual = config.norm_before_residual

    def forward(
        self, embedded: Tensor, feature: Tensor, rotations: tuple[Tensor, Tensor], earlier: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        normed = self.hidden_norm(feature)
        residual = normed if self._norm_before_residual else feature
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        mixed, pair = self.self_attn(both, rotations, earlier)
        x = residual + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), pair


class Eagle3Draft(nn.Module):
    """A head of one layer.

    `drafted` `[V]`: the target's ids of the tokens that it can say, ascending.

    `aux_scale` `[fc_width]`: columns of aux rows are multiplied by it before `fc` while it is trained, since some are a
    thousand times larger than others. In a checkpoint it is a part of `fc`.
    """

    drafted: Tensor
    embedding: Tensor
    aux_scale: Tensor

    def __init__(self, config: Eagle3Config, embedding: Tensor, drafted: Tensor) -> None:
        super().__init__()
        assert config.num_layers == 1, "heads of one layer are trained"
        assert not (config.norm_before_fc or config.fc_norm or config.attention_bias or config.qk_norm)
        self.config = config
        self.fc = nn.Linear(config.fc_width, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DraftLayer(config)])
        self.norm = DraftNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("drafted", drafted, persistent=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("aux_scale", torch.ones(config.fc_width), persistent=False)

    @torch.no_grad()
    def start_from(self, target: TargetModel, sample: Tensor) -> None:
        """Draw the weights; what predicts tokens begins as the target's own.

        The last aux layer goes through `fc`. `sample` `[B, T]`: tokens by which the columns of aux rows are measured.
        """
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=INIT_STD / 2**0.5 if name.endswith(DEEP) else INIT_STD)
        aux = target.rows(sample).aux[:, 1:].float()  # the first token's are like no other's
        self.aux_scale.copy_(aux.square().mean((0, 1)).clamp(min=1e-8).rsqrt())
        hidden = self.config.hidden_size
        self.fc.weight[:, -hidden:] += torch.eye(hidden, device=self.fc.weight.device)
        self.lm_head.weight.copy_(target.head[self.drafted])
        self.norm.weight.copy_(target.final_gain * INIT_GAIN)

    def rows(self, aux: Tensor, tokens: Tensor, num_steps: int) -> Iterator[Tensor]:
        """Yield for each step the rows `[B, T, H]` that `lm_head` reads.

        Row i of step s is for token i + 2 + s. `aux` `[B, T, fc_width]`, `tokens` `[B, T]`. Rows beyond a sequence's
        end are of no use.
        """
        feature, pairs = self.fc(aux * self.aux_scale.to(aux.dtype)), []
        cos, sin = self._rotations(tokens.shape[1] + num_steps, aux)
        for step in range(num_steps):
            embedded = F.embedding(F.pad(tokens[:, 1 + step :], (0, 1 + step)), self.embedding)
            here = slice(step, step + tokens.shape[1])
            feature, pair = self.layers[0](embedded, feature, (cos[here], sin[here]), pairs)
            pairs.append(pair)
            normed = self.norm(feature)
            feature = normed if self.config.norm_output else feature
            yield normed

    def _rotations(self, num_positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        turns = rope_frequencies(_as_model(self.config), num_positions).to(like.device)
        return turns.real.to(like.dtype), turns.imag.to(like.dtype)

    @torch.no_grad()
    def fold(self) -> None:
        """Make the scale of aux rows a part of `fc`, as it is served."""
        self.fc.weight *= self.aux_scale
        self.aux_scale.fill_(1.0)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: weights in bfloat16, `d2t` as an offset, `t2d` as a mask."""
        tensors = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in self.named_parameters()}
        assert bool((self.aux_scale == 1).all()), "fold the scale of aux rows first"
        drafted = self.drafted.cpu()
        is_drafted = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        is_drafted[drafted] = True
        return tensors | {"d2t": drafted - torch.arange(len(drafted)), "t2d": is_drafted}


def _as_model(config: Eagle3Config) -> ModelConfig:
    """Return what the rotary embedding reads of a head."""
    return ModelConfig(
        family="llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        max_model_len=config.max_model_len,
        tied_embeddings=False,
        rope_scaling=config.rope_scaling,
    )
