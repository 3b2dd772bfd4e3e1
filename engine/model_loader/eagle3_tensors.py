"""The tensors of an EAGLE3 head, with the target's where it has none."""

import numpy as np
import torch
from safetensors import safe_open

from checkpoint.huggingface.eagle3_folder import Eagle3Folder
from contracts.errors import ConfigError
from engine.model_loader.decoder_tensors import ModelTensors
from models.config import ModelConfig
from models.eagle3 import optional_tensors, required_tensors


class Eagle3Tensors:
    """float32 tensors by their canonical names (models.eagle3).

    `target`: the tensors of the model that the head drafts for. `interleaved`: rows of q and k have the two parts of a
    rotary pair side by side, and not in halves as a checkpoint has them. All methods raise ConfigError for a tensor of
    another shape than the head's config.json says, or that cannot be read.
    """

    def __init__(
        self, folder: Eagle3Folder, target: ModelTensors, target_config: ModelConfig, interleaved: bool
    ) -> None:
        self.config, self._interleaved = folder.config, interleaved
        self._folder, self._target, self._target_config = folder, target, target_config
        self._shapes = required_tensors(folder.config) | optional_tensors(folder.config)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in float32."""
        return self._stored(name).float()

    def gain(self, name: str) -> torch.Tensor:
        """Return the gain of a norm, `name` without its ending."""
        return self.tensor(f"{name}.weight")

    def projection(self, layer: int, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight `[n, k]` of q, k, v or o, and its bias if the head has biases."""
        prefix = f"layers.{layer}.self_attn.{name}_proj"
        weight = self._turned(name, self.tensor(f"{prefix}.weight"))
        return weight, self._turned(name, self.tensor(f"{prefix}.bias")) if self.config.attention_bias else None

    def head_gain(self, layer: int, name: str) -> torch.Tensor | None:
        """Return the gain of the norm over each head of q or k, if there is one."""
        if not self.config.qk_norm:
            return None
        return self._turned(name, self.gain(f"layers.{layer}.self_attn.{name}_norm"))

    def own_embedding(self) -> torch.Tensor | None:
        """Return the head's own embedding as it is stored; None where the target's serves."""
        return self._stored("embed_tokens.weight") if "embed_tokens.weight" in self._folder.files else None

    def output(self) -> torch.Tensor:
        """Return what makes logits of its last rows, `[draft_vocab, hidden]`, the target's if it has none."""
        if "lm_head.weight" in self._folder.files:
            return self.tensor("lm_head.weight")
        is_tied = self._target_config.tied_embeddings
        return self._target.embedding() if is_tied else self._target.fused("", "head")

    def targets(self) -> np.ndarray:
        """Return the target's token of each drafted one, `[draft_vocab]` int32: `d2t` says how far it is off.

        Raises ConfigError for one that the target does not have.
        """
        own = torch.arange(self.config.draft_vocab_size)
        if self.config.has_reduced_vocabulary:
            file, stored = self._folder.files["d2t"]
            with safe_open(file, "pt") as tensors:
                own = own + tensors.get_tensor(stored)
        if not 0 <= int(own.min()) <= int(own.max()) < self.config.vocab_size:
            raise ConfigError(f"{self._folder.path}: d2t leads outside of the target's {self.config.vocab_size} tokens")
        return own.to(torch.int32).numpy()

    def _stored(self, name: str) -> torch.Tensor:
        file, stored = self._folder.files[name]
        with safe_open(file, "pt") as tensors:
            found = tensors.get_tensor(stored)
        if tuple(found.shape) != self._shapes[name]:
            raise ConfigError(
                f"{file}: the tensor '{stored}' is {list(found.shape)}; the head's config.json says "
                f"{list(self._shapes[name])}"
            )
        return found

    def _turned(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return rows of q and k with the parts of rotary pairs where they are to be; a checkpoint has halves."""
        if name not in ("q", "k") or not self._interleaved:
            return tensor
        halves = tensor.view(-1, 2, self.config.head_dim // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
