"""Fields of a config.json that several families state alike."""

from typing import Any

from contracts.errors import ConfigError
from models.config import Experts, Recurrence

FULL, WINDOWED, RECURRENT = "full_attention", "sliding_attention", "linear_attention"


def windowed_layers(kinds: Any, num_layers: int, source: str) -> tuple[int, ...]:
    """Return the layers that `layer_types` says have a window; raise ConfigError for other kinds."""
    if len(kinds) != num_layers or not {*kinds} <= {WINDOWED, FULL}:
        raise ConfigError(f"{source}: layer_types must say {WINDOWED} or {FULL} for each layer")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == WINDOWED)


def recurrent_fields(config: dict[str, Any], source: str, as_qwen3_next: bool = False) -> dict[str, Any]:
    """Return the recurrent layers of a config.json, and the gate of the others.

    `as_qwen3_next`: see Recurrence. Raises ConfigError for what would give wrong text if it were ignored.
    """
    num_layers, step = config["num_hidden_layers"], config.get("full_attention_interval", 4)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [RECURRENT if (layer + 1) % step else FULL for layer in range(num_layers)]
    if len(kinds) != num_layers or {*kinds} != {RECURRENT, FULL}:
        raise ConfigError(f"{source}: layer_types must say {RECURRENT} or {FULL} for each layer, and have both")
    if not config.get("attn_output_gate", True):
        raise ConfigError(f"{source}: attn_output_gate is false: attention without a gate is not supported")
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    counts = {name: config[f"linear_{name}"] for name in names}
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise ConfigError(f"{source}: linear_{name} is {count!r}; a whole number above 0 is expected")
    values, keys = counts["num_value_heads"], counts["num_key_heads"]
    if values % keys:
        raise ConfigError(f"{source}: linear_num_value_heads is {values}, no multiple of linear_num_key_heads, {keys}")
    return {
        "recurrence": Recurrence(
            num_key_heads=keys,
            num_value_heads=values,
            key_dim=counts["key_head_dim"],
            value_dim=counts["value_head_dim"],
            conv_width=counts["conv_kernel_dim"],
            as_qwen3_next=as_qwen3_next,
        ),
        "recurrent_layers": tuple(layer for layer, kind in enumerate(kinds) if kind == RECURRENT),
        "output_gate": True,
    }


def mixture(config: dict[str, Any], source: str, width: int, renormalize: bool, **features: Any) -> Experts:
    """Return the mixture of a config.json.

    Its experts are `width` wide; `features` are fields of Experts.
    """
    count = config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]
    top_k, step = config["num_experts_per_tok"], config.get("decoder_sparse_step", 1)
    if not 1 <= top_k <= count or step < 1:
        raise ConfigError(f"{source}: {top_k} of {count} experts in every layer of {step} are not supported")
    layers = range(config["num_hidden_layers"])
    dense = [layer for layer in layers if layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % step]
    return Experts(count, top_k, width, renormalize, tuple(dense), **features)


def shared_mixture(config: dict[str, Any], source: str, **features: Any) -> Experts:
    """Return the mixture of a config.json in DeepSeek's words, with shared experts.

    These are as one of their width together, which all tokens go through. `features` are fields of Experts.
    """
    count, top_k, width = (
        config[name] for name in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    )
    num_groups, top_groups = features.get("num_groups", 1), features.get("top_groups", 1)
    if config.get("moe_layer_freq", 1) != 1:
        raise ConfigError(f"{source}: moe_layer_freq is {config['moe_layer_freq']}; only 1 is supported")
    is_whole = num_groups == 1 or (count % num_groups == 0 and count >= 2 * num_groups)
    if not is_whole or not 1 <= top_groups <= num_groups or not 1 <= top_k <= count // num_groups * top_groups:
        raise ConfigError(
            f"{source}: {top_k} of {count} experts in {top_groups} of {num_groups} groups (num_experts_per_tok, "
            "n_routed_experts, topk_group, n_group) are not supported"
        )
    return Experts(
        count,
        top_k,
        width,
        dense_layers=tuple(range(config["first_k_dense_replace"])),
        shared_size=width * (config["n_shared_experts"] or 0),
        gates_shared=False,
        scale=float(config["routed_scaling_factor"]),
        **features,
    )


def gguf_mixture(metadata: dict[str, Any], source: str, renormalize: bool, **features: Any) -> Experts | None:
    """Return the mixture of a GGUF file, or None; raise ConfigError for one that can't be computed."""
    count = metadata.get("expert_count", 0)
    if count == 0:
        return None
    top_k = metadata["expert_used_count"]
    if not 1 <= top_k <= count:
        raise ConfigError(f"{source}: {top_k} of {count} experts are not supported")
    width = metadata.get("expert_feed_forward_length", metadata["feed_forward_length"])
    return Experts(count, top_k, width, renormalize, **features)


EXPERT_TENSORS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""The kinds of tensors that a layer of a mixture has in a GGUF file."""
