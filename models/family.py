"""What sets one family of decoder-only transformers apart from the others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Table = dict[str, Any]
ReadConfig = Callable[[Table, str], Table]
"""(config.json's table, its folder) -> fields of models.config.ModelConfig; ConfigError for what can't be served."""
ReadGguf = Callable[[Table, str], Table]
"""(metadata, the architecture's without its prefix, the file) -> fields of ModelConfig."""


@dataclass(frozen=True)
class TensorNames:
    """How a family's safetensors are stored, where it is not as Llama's are.

    `renamed`: pieces of stored names and what stands for each in Llama's, replaced in this order. `left_out`: prefixes
    of what belongs to other parts of a model, as a vision tower; `drafting`: of layers that predict further tokens
    (MTP), which are not read either. `stacked_experts`: those of a layer may be one tensor, `[experts, n, k]`.
    `fused`: modules that are stored as one, one below the other, by the end of that one's name. `gain_offset` is added
    to the gains of norms. `interleaved`: rows of q and k have the two parts of a rotary pair side by side.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()
    drafting: tuple[str, ...] = ()
    stacked_experts: bool = False
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gain_offset: float = 0.0
    interleaved: bool = False


@dataclass(frozen=True)
class GgufForm:
    """How a family's GGUF files are made.

    `read` gives fields of a ModelConfig that it has beyond Llama's. `tensors` are the kinds of a layer's tensors it
    adds, `expert_tensors` those of a mixture; `scales` is the metadata that `read` makes use of, and that else
    multiplies something unknown. `interleaved` as in TensorNames: llama.cpp's converter permutes the rows of q and k of
    some families. `turns_part`: rope may turn a part of each head. `ends`: tokens that end an answer whatever a file
    says, where its vocabulary has them.
    """

    read: ReadGguf | None = None
    tensors: tuple[str, ...] = ()
    expert_tensors: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    interleaved: bool = False
    turns_part: bool = False
    ends: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """`architecture` as in config.json, `also`: others; `gguf_architecture` as in a GGUF file.

    `multimodal`: the architecture of a folder whose `text_config` is of this family. `read`: fields that its
    config.json states in words of its own. `names`, `gguf`: how its weights are stored; no GGUF files are read of a
    family without the latter.

    `qkv_bias`: q, k and v have one. `reads_attention_bias`: `read` looks at the field of that name, which is refused
    else. `qk_norm`: q and k of each head are normalised before rope. `defaults`, `rope_theta`, `head_dim`, `window`,
    `first_window`: where config.json does not say, as in transformers; `head_dim` is None where it follows from the
    hidden size. `partial_rotary`: the share of a head that is turned where config.json does not say; None: all of it,
    whatever it says. `ropes_by_kind`: rope_parameters may have a table for each kind of layer.

    `window` is None where the family has none, 0 where it has one if config.json says. `switches_window`: only where
    config.json says use_sliding_window. `first_window`: only layers from max_window_layers on, or of their kind in
    layer_types; without that every `window_step`th of them.
    """

    architecture: str
    gguf_architecture: str
    multimodal: str | None = None
    also: tuple[str, ...] = ()
    read: ReadConfig | None = None
    names: TensorNames = TensorNames()
    gguf: GgufForm | None = None
    defaults: Table = field(default_factory=dict)
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10000.0
    head_dim: int | None = None
    partial_rotary: float | None = None
    ropes_by_kind: bool = False
    window: int | None = None
    switches_window: bool = False
    first_window: int | None = None
    window_step: int = 1
