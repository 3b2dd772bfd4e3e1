"""LoRA adapters (Hu et al. 2021) in the format of PEFT.

That is adapter_config.json beside adapter_model.safetensors. A field that would lead to other answers than PEFT's if it
were ignored is refused by name.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.huggingface.json_files import read_json
from checkpoint.validation import is_whole
from contracts.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ALL_LINEAR = "all-linear"
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""What `init_lora_weights` may say. With others (PiSSA, OLoRA, CorDA, LoftQ..) PEFT changes the model's own weights as
it opens the adapter."""
_HARMLESS = (
    *(
        "peft_type",
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights", "lora_dropout"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "runtime_config"),
    *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    *("qalora_group_size", "ensure_weight_tying"),
)
"""The fields that are read here, or that change nothing about a trained adapter."""


@dataclass(frozen=True)
class LoraConfig:
    """What an adapter's configuration says of its matrices.

    `rank` and `alpha` are those of modules that no key of the patterns names; a key is the end of a module's name, or a
    regular expression of it. `targets` names modules by their ends, or by a regular expression.
    """

    rank: int
    alpha: float
    is_rank_stabilized: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: tuple[str, ...] | str
    source: Path

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the model."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """Return what the product of a module's two matrices is multiplied by.

        It is alpha over the rank, or over its root with rank stabilization (Kalajdzievski 2023).
        """
        rank = self.rank_of(module)
        return _by_pattern(self.alpha_pattern, module, self.alpha) / (
            math.sqrt(rank) if self.is_rank_stabilized else rank
        )

    def require_target(self, module: str) -> None:
        """Raise ConfigError for a module that `target_modules` does not name: PEFT would pass it over."""
        if isinstance(self.targets, str):
            is_named = self.targets.lower() == _ALL_LINEAR or re.fullmatch(self.targets, module) is not None
        else:
            is_named = any(module == target or module.endswith(f".{target}") for target in self.targets)
        if not is_named:
            raise ConfigError(f"{self.source}: there are weights for '{module}', which target_modules does not name")


@dataclass(frozen=True)
class LoraFolder:
    """An adapter's files. `digest` is of all that its answers depend on beside the model, 16 bytes."""

    path: Path
    config: LoraConfig
    digest: bytes

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS


def open_lora(path: str) -> LoraFolder:
    """Return an adapter's files. Raises ConfigError that names what is missing, or can't be served."""
    folder = Path(path)
    fields = read_json(folder / CONFIG, missing="is no folder of a LoRA adapter")
    config, weights = _config(fields, folder / CONFIG), folder / WEIGHTS
    if not weights.is_file():
        raise ConfigError(f"{folder} lacks {WEIGHTS}; adapters in other formats are not supported")
    digest = hashlib.blake2b(repr(_numbers(config)).encode(), digest_size=16, person=b"lora adapter")
    with weights.open("rb") as stream:
        while data := stream.read(1 << 20):
            digest.update(data)
    return LoraFolder(folder, config, digest.digest())


def _numbers(config: LoraConfig) -> tuple[object, ...]:
    patterns = (sorted(pattern.items()) for pattern in (config.rank_pattern, config.alpha_pattern))
    return config.rank, config.alpha, config.is_rank_stabilized, *patterns


def _config(fields: dict[str, Any], source: Path) -> LoraConfig:
    table = _Table(fields, source)
    table.require("peft_type", fields.get("peft_type") == "LORA", "adapters of type LORA are served")
    table.require("bias", fields.get("bias", "none") == "none", "adapters that bring biases are not served")
    is_plain = fields.get("init_lora_weights") in _PLAIN_STARTS
    table.require("init_lora_weights", is_plain, "it changes the model's own weights; save the adapter as plain LoRA")
    for name in sorted(fields.keys() - set(_HARMLESS)):
        table.require(name, not fields[name], "it is not supported")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    table.require("r", _is_rank(rank), "a whole number from 1 on is expected")
    table.require("lora_alpha", _is_number(alpha), "a number is expected")
    return LoraConfig(
        rank=int(rank or 0),
        alpha=float(alpha or 0),
        is_rank_stabilized=bool(fields.get("use_rslora")),
        rank_pattern=table.pattern("rank_pattern", _is_rank, "ranks"),
        alpha_pattern=table.pattern("alpha_pattern", _is_number, "numbers"),
        targets=table.targets("target_modules"),
        source=source,
    )


class _Table:
    """The fields of an adapter's configuration; what can't be served is refused by name."""

    def __init__(self, fields: dict[str, Any], source: Path) -> None:
        self._fields, self._source = fields, source

    def require(self, name: str, is_sound: bool, why: str) -> None:
        if not is_sound:
            raise ConfigError(f"{self._source}: {name} is {self._fields.get(name)!r}; {why}")

    def pattern(self, name: str, is_value: Callable[[Any], bool], what: str) -> dict[str, Any]:
        """Return a table whose keys name modules, or are patterns of their names."""
        table: Any = self._fields.get(name) or {}
        is_sound = isinstance(table, dict) and all(map(_compiles, table)) and all(map(is_value, table.values()))
        self.require(name, is_sound, f"a table of modules' names, or patterns of them, and {what} is expected")
        return table

    def targets(self, name: str) -> tuple[str, ...] | str:
        targets: Any = self._fields.get(name)
        is_pattern = isinstance(targets, str) and _compiles(targets)
        is_list = isinstance(targets, list) and bool(targets) and all(isinstance(each, str) for each in targets)
        self.require(name, is_pattern or is_list, f"modules' names, a pattern of them, or '{_ALL_LINEAR}' is expected")
        return tuple(targets) if isinstance(targets, list) else str(targets)


def _by_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first key that fits the end of a module's name, as PEFT finds it."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _compiles(pattern: str) -> bool:
    try:
        re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _is_rank(value: Any) -> bool:
    return is_whole(value) and value > 0


def _is_number(value: Any) -> bool:
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))
