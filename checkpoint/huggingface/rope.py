"""The rotary embedding that a config.json states, and the scaling of its frequencies."""

import math
from typing import Any

from checkpoint.validation import require_amount
from contracts.errors import ConfigError
from models.config import RopeScaling, YarnScaling

_LLAMA3_BANDS = ("low_freq_factor", "high_freq_factor")


def rope_table(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the table of the rotary embedding, by its name in transformers 4 or 5.

    Theta may be in it or beside it, and the original context length, too.
    """
    scaling, parameters = (_table(config, name, source) for name in ("rope_scaling", "rope_parameters"))
    rope = scaling or parameters
    if "rope_theta" in parameters and not (rope.get("rope_theta") or config.get("rope_theta")):
        raise ConfigError(
            f"{source}: rope_scaling hides rope_parameters and the rope_theta in them: write both into one table"
        )
    if original := config.get("original_max_position_embeddings"):  # comes first, as in transformers
        rope = {**rope, "original_max_position_embeddings": original}
    if nested := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise ConfigError(f"{source}: rope_parameters of their own for '{nested[0]}' are not supported")
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1):
        raise ConfigError(
            f"{source}: partial_rotary_factor is {part}: rope that turns a part of each head is not supported"
        )
    return rope


def _table(config: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    table = config.get(name) or {}
    if not isinstance(table, dict):
        raise ConfigError(f"{source}/config.json: {name} is {table!r}; a table is expected")
    return table


def read_rope_scaling(scaling: dict[str, Any], stated: int, source: str) -> RopeScaling | YarnScaling | None:
    """Return the scaling; raise ConfigError for kinds that are not supported.

    `stated` is the context length in config.json.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind == "yarn":
        return _yarn(scaling, stated, source)
    if kind != "llama3":
        raise ConfigError(f"{source}: rope scaling '{kind}' is not supported; supported are default, llama3 and yarn")
    found = {name: scaling[name] for name in ("factor", *_LLAMA3_BANDS, "original_max_position_embeddings")}
    _require_amounts(found, source)
    low, high = (found[name] for name in _LLAMA3_BANDS)
    if low > high:  # Llama 4 Scout has both at 1
        raise ConfigError(
            f"{source}/config.json: low_freq_factor is {low}; no more than high_freq_factor, {high}, is expected"
        )
    return RopeScaling(
        factor=found["factor"],
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=found["original_max_position_embeddings"],
    )


def _yarn(scaling: dict[str, Any], stated: int, source: str) -> YarnScaling:
    """Return YaRN's constants; the defaults are transformers' and the paper's."""
    if scaling.get("mscale") or scaling.get("mscale_all_dim"):
        raise ConfigError(f"{source}: yarn with mscale is not supported")
    _require_amounts({"factor": scaling["factor"]}, source)
    factor = float(scaling["factor"])
    found = YarnScaling(
        factor,
        scaling.get("original_max_position_embeddings") or stated,
        scaling.get("beta_fast") or 32.0,
        scaling.get("beta_slow") or 1.0,
        scaling.get("attention_factor") or 0.1 * math.log(max(factor, 1.0)) + 1.0,
        scaling.get("truncate", True),
    )
    named = {name: getattr(found, name) for name in ("beta_fast", "beta_slow", "attention_factor")}
    _require_amounts({"original_max_position_embeddings": found.original_max_position, **named}, source)
    return found


def _require_amounts(stated: dict[str, Any], source: str) -> None:
    """Check numbers of the table."""
    for name, value in stated.items():
        require_amount(value, f"{name} of its rope scaling", f"{source}/config.json")
