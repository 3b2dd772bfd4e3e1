"""What an EAGLE3 head is: shapes, names of tensors, and the target's layers that it reads.

At position i the head (Li et al. 2025) sees what the target computed of token i (`aux_layers`, fused to one row) and
the embedding of token i + 1; one layer later it knows about token i + 2. Two dialects store such heads. They differ in
names and in what a layer id means; checkpoint.huggingface.eagle3_folder reads both.
"""

from dataclasses import dataclass
from enum import Enum

from models.config import FrequencyScaling

FIRST_LAYER = "layers.0."


class Eagle3Dialect(Enum):
    """The writer of a folder: SpecForge, as SGLang reads it, or speculators, as vLLM reads it."""

    SPECFORGE = "SpecForge"
    SPECULATORS = "speculators"


@dataclass(frozen=True)
class Eagle3Config:
    """Shapes and constants of a head.

    `aux_layers`: the head reads what goes into these layers of the target, the sum of the residual; the number of
    layers means what comes out of the last. `vocab_size` is the target's; only `draft_vocab_size` of its tokens are
    ever drafted.

    Four norms differ between heads. `norm_before_residual`: what the first layer adds to is the normalised feature.
    `norm_before_fc`: the joined aux rows are normalised as one; `fc_norm`: each by itself. `norm_output`: the next
    draft gets the head's last row after the final norm, else before it (EAGLE 3.1).
    """

    dialect: Eagle3Dialect
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: FrequencyScaling | None
    max_model_len: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    qk_norm: bool = False

    @property
    def rotary_width(self) -> int:
        """The columns of a head that are turned."""
        return self.head_dim

    @property
    def fc_width(self) -> int:
        """The columns of the joined aux rows."""
        return len(self.aux_layers) * self.target_hidden_size

    @property
    def has_reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size != self.vocab_size


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers that both dialects take where none are stated: early, middle and late."""
    return (2, num_layers // 2, num_layers - 3)


def aux_layers_of(stated: tuple[int, ...] | None, dialect: Eagle3Dialect, num_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose inputs a head reads.

    A SpecForge id names the layer whose output is read, as SGLang takes it: the input of the next. A speculators id
    names the layer whose input is read, as vLLM takes it. The defaults are inputs in both.
    """
    if stated is None:
        return default_aux_layers(num_layers)
    return tuple(layer + 1 for layer in stated) if dialect is Eagle3Dialect.SPECFORGE else stated


def canonical_name(stored: str) -> str:
    """Return a tensor's name as speculators has it: SpecForge calls the first layer `midlayer`."""
    return stored.removeprefix("model.").replace("midlayer.", FIRST_LAYER, 1)


def required_tensors(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the floating-point tensors without which a head cannot run."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, config.fc_width), "norm.weight": (hidden,)}
    if config.has_reduced_vocabulary:
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    if config.hidden_size != config.target_hidden_size:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (config.fc_width,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(len(config.aux_layers))}
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_tensors(config, index).items()}
    return shapes


def optional_tensors(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of those that a head may have of its own; the target's serve in their place."""
    return {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
    }


def _layer_tensors(config: Eagle3Config, index: int) -> dict[str, tuple[int, ...]]:
    """Return those of one layer: the first takes the embedding beside the feature, twice the width."""
    hidden, inner = config.hidden_size, config.intermediate_size
    width = 2 * hidden if index == 0 else hidden
    rows = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    rows = {name: heads * config.head_dim for name, heads in rows.items()}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": (n, width) for name, n in rows.items()}
    shapes["self_attn.o_proj.weight"] = (hidden, rows["q"])
    if config.attention_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (n,) for name, n in rows.items()}
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    shapes |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (hidden, inner)
    norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if index == 0 else ()))
    return shapes | {f"{name}.weight": (hidden,) for name in norms}
