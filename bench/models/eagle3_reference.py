"""An EAGLE3 head written plainly from its formulas, one row at a time, in float64 (Li et al. 2025).

What trains heads and what runs them is compared with this.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from models.config import RopeScaling
from models.eagle3 import Eagle3Config

Pair = tuple[Tensor, Tensor]
"""The key and the value of one row, `[num_kv_heads, head_dim]` each."""


class Eagle3Reference:
    """A head.

    `tensors` have canonical names (models.eagle3). `embedding` `[vocab, hidden]` and `head` `[vocab, hidden]` are the
    target's, for what the head has not of its own.
    """

    def __init__(
        self, config: Eagle3Config, tensors: Mapping[str, Tensor], embedding: Tensor | None = None,
        head: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self._tensors = {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}
        self._embedding = self._tensors.get("embed_tokens.weight", embedding)
        self._head = self._tensors.get("lm_head.weight", head)
        offsets = tensors.get("d2t")
        # d2t is an offset: the draft's token i is the target's i + d2t[i].
        self._targets = torch.arange(config.draft_vocab_size) + (0 if offsets is None else offsets)
        self._rows: list[list[Pair]] = [[] for _ in range(config.num_layers)]

    def fuse(self, aux: Tensor) -> Tensor:
        """Return the feature `[H]` of a position: g = fc([h_low; h_mid; h_high]), `aux` `[fc_width]`."""
        config, x = self.config, aux.double()
        if config.norm_before_fc:
            x = self._norm(x, "input_norm")
        if config.fc_norm:
            parts = x.chunk(len(config.aux_layers))
            x = torch.cat([self._norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)])
        return self._tensors["fc.weight"] @ x

    def row(self, feature: Tensor, token: int, position: int) -> tuple[Tensor, Tensor]:
        """Compute one row, which later rows see.

        Return the logits `[draft_vocab]` and the next draft's feature.

        `feature` `[H]` of `position`, `token` the one after it.
        """
        assert self._embedding is not None and self._head is not None, "the target's embedding and head are missing"
        x = feature.double()
        for index in range(self.config.num_layers):
            embedded = self._embedding[token].double() if index == 0 else None
            x = self._layer(index, x, embedded, position)
        normed = self._norm(x, "norm")
        return self._head.double() @ normed, normed if self.config.norm_output else x

    def draft(self, aux: Tensor, tokens: Sequence[int], k: int) -> list[int]:
        """Return k greedy drafts after `tokens` `[n + 1]`; `aux` `[n, fc_width]` lacks the last."""
        logits, feature = self.read(aux, tokens)
        drafts = [self.target_id(logits)]
        kept = [len(rows) for rows in self._rows]
        while len(drafts) < k:
            logits, feature = self.row(feature, drafts[-1], len(tokens) - 2 + len(drafts))
            drafts.append(self.target_id(logits))
        for rows, count in zip(self._rows, kept, strict=True):
            del rows[count:]  # rows of drafts go; the accepted are computed anew from what the target knows of them
        return drafts

    def read(self, aux: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Compute the rows of `tokens` that are not there yet, and return the last; `aux` as in `draft`."""
        first = len(self._rows[0])
        assert first < len(aux) == len(tokens) - 1, "a row has the target's states of one token and the next token"
        found = [self.row(self.fuse(aux[i]), tokens[i + 1], i) for i in range(first, len(aux))]
        return found[-1]

    def forget(self, num_rows: int) -> None:
        """Keep the first rows alone, as after a rejected draft."""
        for rows in self._rows:
            del rows[num_rows:]

    def target_id(self, logits: Tensor) -> int:
        return int(self._targets[logits.argmax()])

    def _layer(self, index: int, x: Tensor, embedded: Tensor | None, position: int) -> Tensor:
        prefix = f"layers.{index}."
        if embedded is not None:
            normed = self._norm(x, prefix + "hidden_norm")
            residual = normed if self.config.norm_before_residual else x
            both = torch.cat([self._norm(embedded, prefix + "input_layernorm"), normed])
        else:
            residual, both = x, self._norm(x, prefix + "input_layernorm")
        x = residual + self._attention(index, both, position)
        normed = self._norm(x, prefix + "post_attention_layernorm")
        gate, up = (self._tensors[f"{prefix}mlp.{name}_proj.weight"] @ normed for name in ("gate", "up"))
        return x + self._tensors[prefix + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def _attention(self, index: int, x: Tensor, position: int) -> Tensor:
        config, prefix = self.config, f"layers.{index}.self_attn."
        q, k, v = (self._projected(prefix + name, x).view(-1, config.head_dim) for name in "qkv")
        if config.qk_norm:
            q, k = self._norm(q, prefix + "q_norm"), self._norm(k, prefix + "k_norm")
        rows = self._rows[index]
        rows.append((self._turned(k, position), v))
        keys, values = (torch.stack([row[part] for row in rows]) for part in (0, 1))
        shared = config.num_heads // config.num_kv_heads
        mixed = []
        for head, query in enumerate(self._turned(q, position)):
            scores = keys[:, head // shared] @ query / math.sqrt(config.head_dim)
            mixed.append(scores.softmax(0) @ values[:, head // shared])
        out = self._tensors[prefix + "o_proj.weight"] @ torch.cat(mixed)
        return out + self._tensors.get(prefix + "o_proj.bias", 0.0)

    def _projected(self, name: str, x: Tensor) -> Tensor:
        return self._tensors[name + "_proj.weight"] @ x + self._tensors.get(name + "_proj.bias", 0.0)

    def _turned(self, x: Tensor, position: int) -> Tensor:
        """Rotate the pairs (x[i], x[i + D / 2]) of each head by position * theta^(-2 i / D) (Su et al. 2021)."""
        config = self.config
        frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).double() / config.head_dim)
        if config.rope_scaling is not None:
            assert isinstance(config.rope_scaling, RopeScaling), "the reference has no YaRN"
            frequencies = config.rope_scaling.scaled(frequencies)
        first, second = x.chunk(2, -1)
        cos, sin = torch.cos(position * frequencies), torch.sin(position * frequencies)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * gain."""
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)
        return x * scale * self._tensors[name + ".weight"]
