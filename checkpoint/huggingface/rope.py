"""The rotary embedding that a config.json states, and the scaling of its frequencies."""

import math
from typing import Any

from checkpoint.validation import require_amount
from contracts.errors import ConfigError
from models.config import FrequencyScaling, LinearScaling, LongRopeScaling, Rope, RopeScaling, YarnScaling
from models.config_fields import FULL, WINDOWED
from models.family import Family

_LLAMA3_BANDS = ("low_freq_factor", "high_freq_factor")
_LOCAL_THETA = 10000.0  # of windowed layers, where config.json does not say, as in transformers


def rope_fields(config: dict[str, Any], family: Family, head_dim: int, source: str) -> dict[str, Any]:
    """Return the fields of a ModelConfig that say how positions turn q and k.

    Newer folders may have a table for each kind of layer.
    """
    whole, windowed = config, None
    kinds = [name for name, value in _table(config, "rope_parameters", source).items() if isinstance(value, dict)]
    if family.ropes_by_kind and kinds:
        tables = config["rope_parameters"]
        if {*tables} - {FULL, WINDOWED} or FULL not in tables:
            raise ConfigError(f"{source}: rope_parameters are of {sorted(tables)}; {FULL} and {WINDOWED} are expected")
        whole = config | {"rope_parameters": tables[FULL]}
        windowed = tables.get(WINDOWED) or {}
    rope = rope_table(whole, source)
    fields = {
        "rope_theta": rope.get("rope_theta") or config.get("rope_theta") or family.rope_theta,
        "rope_scaling": read_rope_scaling(rope, config["max_position_embeddings"], source),
        "rotary_dim": _rotary_dim(rope, config, family, head_dim, source),
    }
    if windowed is not None:
        theta = windowed.get("rope_theta", _LOCAL_THETA)
        require_amount(theta, "rope_theta", f"{source}/config.json", above=1)
        scaling = read_rope_scaling(windowed, config["max_position_embeddings"], source)
        fields["window_rope"] = Rope(theta, scaling)
    return fields


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
    return rope


def _rotary_dim(rope: dict[str, Any], config: dict[str, Any], family: Family, head_dim: int, source: str) -> int:
    """Return how many columns of a head are turned, 0 for all."""
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if family.partial_rotary is None:
        if part not in (None, 1):
            raise ConfigError(
                f"{source}: partial_rotary_factor is {part}: rope that turns a part of each head is not supported"
            )
        return 0
    part = family.partial_rotary if part is None else part
    require_amount(part, "partial_rotary_factor", f"{source}/config.json")
    width = int(head_dim * part)
    if not 0 < width <= head_dim or width % 2:
        raise ConfigError(f"{source}: partial_rotary_factor is {part} of {head_dim} columns; an even part is expected")
    return 0 if width == head_dim else width


def _table(config: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    table = config.get(name) or {}
    if not isinstance(table, dict):
        raise ConfigError(f"{source}/config.json: {name} is {table!r}; a table is expected")
    return table


def read_rope_scaling(scaling: dict[str, Any], stated: int, source: str) -> FrequencyScaling | None:
    """Return the scaling; raise ConfigError for kinds that are not supported.

    `stated` is the context length in config.json. Up to it `dynamic` changes nothing, and beyond it each length has
    frequencies of its own, which cached keys could not follow: contexts end there.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "dynamic"):
        return None
    if kind in ("longrope", "su") or (kind == "yarn" and "long_factor" in scaling):  # as older Phi-3s call it
        return _longrope(scaling, stated, source)
    if kind == "yarn":
        return _yarn(scaling, stated, source)
    if kind == "linear":
        _require_amounts({"factor": scaling["factor"]}, source)
        return LinearScaling(float(scaling["factor"]))
    if kind != "llama3":
        supported = "default, dynamic, linear, llama3, longrope and yarn"
        raise ConfigError(f"{source}: rope scaling '{kind}' is not supported; supported are {supported}")
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
    _require_amounts({"factor": scaling["factor"]}, source)
    factor = float(scaling["factor"])
    shares = [scaling.get(name) or 0.0 for name in ("mscale", "mscale_all_dim")]
    for share in filter(None, shares):
        _require_amounts({"mscale": share}, source)
    share, shared = shares if all(shares) else (1.0, 0.0)
    found = YarnScaling(
        factor,
        scaling.get("original_max_position_embeddings") or stated,
        scaling.get("beta_fast") or 32.0,
        scaling.get("beta_slow") or 1.0,
        scaling.get("attention_factor") or _yarn_length(factor, share) / _yarn_length(factor, shared),
        scaling.get("truncate", True),
    )
    named = {name: getattr(found, name) for name in ("beta_fast", "beta_slow", "attention_factor")}
    _require_amounts({"original_max_position_embeddings": found.original_max_position, **named}, source)
    return found


def _yarn_length(factor: float, share: float) -> float:
    return 0.1 * share * math.log(max(factor, 1.0)) + 1.0


def _longrope(scaling: dict[str, Any], stated: int, source: str) -> LongRopeScaling:
    """Return LongRoPE's constants; the defaults are transformers'."""
    original = scaling.get("original_max_position_embeddings")
    if original is None:
        raise ConfigError(f"{source}/config.json lacks 'original_max_position_embeddings', which longrope needs")
    short, long = (_factors(scaling, name, source) for name in ("short_factor", "long_factor"))
    if len(short) != len(long):
        raise ConfigError(
            f"{source}: short_factor has {len(short)} numbers, long_factor {len(long)}; one each a pair is meant"
        )
    if unread := [name for name in ("short_mscale", "long_mscale") if scaling.get(name)]:
        raise ConfigError(f"{source}: longrope with {unread[0]} is not supported")
    _require_amounts({"original_max_position_embeddings": original}, source)
    factor = scaling.get("factor") or stated / original
    _require_amounts({"factor": factor}, source)
    length = scaling.get("attention_factor")
    if length is None:
        length = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    _require_amounts({"attention_factor": length}, source)
    return LongRopeScaling(short, long, original, float(length))


def _factors(scaling: dict[str, Any], name: str, source: str) -> tuple[float, ...]:
    values = scaling[name]
    if not isinstance(values, list):
        raise ConfigError(f"{source}/config.json: {name} is {values!r}; a list of numbers is expected")
    for value in values:
        _require_amounts({name: value}, source)
    return tuple(map(float, values))


def _require_amounts(stated: dict[str, Any], source: str) -> None:
    """Check numbers of the table."""
    for name, value in stated.items():
        require_amount(value, f"{name} of its rope scaling", f"{source}/config.json")
