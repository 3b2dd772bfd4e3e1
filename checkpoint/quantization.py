"""The quantization of a Hugging Face folder's matrices.

It is read from config.json or ModelOpt's hf_quant_config.json. A field that would lead to wrong results if it were
ignored is refused by name. The fields are those of compressed-tensors' QuantizationConfig, transformers'
FineGrainedFP8Config, FbgemmFp8Config, GPTQConfig and AwqConfig, and of ModelOpt's checkpoints.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from checkpoint.validation import is_whole
from contracts.errors import ConfigError

BLOCK = 128
NVFP4_GROUP = 16
"""Columns that share a scale."""
_COMPRESSED = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized")
_BY_GROUP = ("group", "dynamic")
"""The orders of compressed-tensors in which the columns of a group lie apart."""
_EXPORTED = "hf_quant_config.json"
_SHOWN = 4  # modules listed as skipped; some checkpoints list each module of a vision tower
_PATTERN = "re:"  # how a pattern begins
_ADVICE = "use another quantization of this model, its original weights or a GGUF file"


_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


class Scheme(StrEnum):
    """The form in which a matrix is stored."""

    FP8_ROWS = "FP8 with a scale for each matrix or row"
    FP8_BLOCKS = "FP8 with a scale for each block of 128 x 128"
    GPTQ = "INT4 as GPTQ packs it"
    AWQ = "INT4 as AWQ packs it"
    PACKED = "INT4 as compressed-tensors packs it"
    INT8_ROWS = "INT8 with a scale for each matrix or row"
    NVFP4 = "NVFP4, a scale for 16 columns"


@dataclass(frozen=True)
class Quantization:
    """The quantization of a folder.

    `method` is config.json's `quant_method`; `skipped` names modules that are not quantized, patterns among them. FP8:
    `rounds_activations` if activations are meant to be rounded, too. Packed integers of `bits`: `group_size` columns
    share a scale, all of them if it is -1; with `act_order` a group's columns may lie anywhere; `zero_shift` is added
    to the stored zero points, of which there are none if it `is_symmetric`.
    """

    method: str
    scheme: Scheme
    skipped: tuple[str, ...] = ()
    rounds_activations: bool = True
    group_size: int = -1
    act_order: bool = False
    zero_shift: int = 0
    bits: int = 4
    is_symmetric: bool = False

    @property
    def is_packed(self) -> bool:
        """Return whether several integers share a word, as those of few bits do."""
        return self.scheme in (Scheme.GPTQ, Scheme.AWQ, Scheme.PACKED)

    @property
    def is_int4(self) -> bool:
        return self.is_packed and self.bits == 4

    @property
    def is_fp8(self) -> bool:
        return self.scheme in (Scheme.FP8_ROWS, Scheme.FP8_BLOCKS)

    @property
    def has_kernels(self) -> bool:
        """Return whether a GPU can multiply such matrices as they are stored; others are widened."""
        return self.is_fp8 or self.is_int4

    def skips(self, module: str) -> bool:
        return any(_names(entry, module) for entry in self.skipped)

    def words(self) -> str:
        groups = "a whole row" if self.group_size == -1 else f"{self.group_size} columns"
        order = ", act order" if self.act_order else ""
        details = f", a scale for {groups}{order}" if self.is_packed else ""
        details += "" if self.is_packed or self.rounds_activations else ", weights only"
        others = f" and {len(self.skipped) - _SHOWN} more" if len(self.skipped) > _SHOWN else ""
        skipped = f"; as they were: {', '.join(self.skipped[:_SHOWN])}{others}" if self.skipped else ""
        return f"{self.form} ({self.method}){details}{skipped}"

    @property
    def form(self) -> str:
        """Return the scheme in words, with its bits."""
        return self.scheme.replace("INT4", f"INT{self.bits}") if self.is_packed else self.scheme


def read_quantization(config: dict[str, Any], exported: dict[str, Any], source: str) -> Quantization | None:
    """Return the quantization, or None for plain weights.

    `config` is config.json, `exported` is hf_quant_config.json or empty. Raise ConfigError with the field and what to
    do for what is not supported.
    """
    found = config.get("quantization_config")
    if not found and isinstance(older := config.get("compression_config"), dict):
        found = {"quant_method": "compressed-tensors", **older}
    if not found and not exported:
        return None
    if found and not isinstance(found, dict):
        raise ConfigError(f"{source}: quantization_config is {found!r}; a table is expected")
    fields = _Fields(found, source) if found else _Fields({"quant_method": "modelopt", **exported}, source, _EXPORTED)
    method = fields.one_of("quant_method", *_READERS)
    return _READERS[method](fields)


def refuse_other_packings(config: dict[str, Any], folder: Path) -> None:
    """Raise ConfigError for packed weights that config.json does not declare in the usual way.

    MLX has a table `quantization` of its own; GPTQ and AWQ had separate files before config.json named them.
    """
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and "quant_method" not in (config.get("quantization_config") or ()):
        raise ConfigError(f"{folder}: its weights are in MLX's format ('quantization' in config.json); {_ADVICE}")
    if config.get("quantization_config"):
        return
    for file, method in _OLD_FILES.items():
        if (folder / file).exists():
            table = f"config.json has no 'quantization_config' with 'quant_method': '{method}'"
            raise ConfigError(f"{folder}: {file} says that its weights are {method.upper()}'s, but {table}; {_ADVICE}")


def _names(entry: str, module: str) -> bool:
    """Return whether an entry names the module.

    Entries are whole names, "re:" patterns (compressed-tensors), globs (ModelOpt), or parts of names.
    """
    if entry.startswith(_PATTERN):
        return re.match(entry.removeprefix(_PATTERN), module) is not None
    if "*" in entry:
        return fnmatchcase(module, entry)
    return f".{entry}." in f".{module}."


class _Fields:
    """A table of a configuration file; values that it does not allow are refused by name."""

    def __init__(self, table: dict[str, Any], source: str, path: str = "quantization_config") -> None:
        self._table, self._source, self._path = table, source, path

    def get(self, name: str, default: Any = None) -> Any:
        value = self._table.get(name)
        return default if value is None else value

    def one_of(self, name: str, *allowed: Any, default: Any = None) -> Any:
        value = self.get(name, default)
        if value not in allowed:
            shown = ", ".join("null" if entry is None else str(entry) for entry in allowed)
            self.refuse(name, value, f"supported: {shown}")
        return value

    def absent(self, *names: str) -> None:
        for name in names:
            if value := self._table.get(name):
                self.refuse(name, value, "it is not supported")

    def table(self, name: str) -> "_Fields":
        value = self.get(name, {})
        if not isinstance(value, dict):
            self.refuse(name, value, "a table is expected")
        return _Fields(value, self._source, f"{self._path}.{name}")

    def names(self, *fields: str) -> tuple[str, ...]:
        """Return the entries of the first of these lists that is there."""
        name, value = next(((name, value) for name in fields if (value := self._table.get(name))), ("", []))
        if not isinstance(value, list):
            self.refuse(name, value, "a list is expected")
        for entry in value:
            self._require_name(name, entry)
        return tuple(value)

    def _require_name(self, name: str, entry: Any) -> None:
        if not isinstance(entry, str):
            self.refuse(name, entry, "names of modules are expected")
        try:
            re.compile(entry.removeprefix(_PATTERN) if entry.startswith(_PATTERN) else "")
        except (re.error, RecursionError, OverflowError) as error:
            self.refuse(name, entry, f"it is no pattern ({error})")

    def __bool__(self) -> bool:
        return bool(self._table)

    def tables(self, name: str) -> list["_Fields"]:
        """Return the tables in a table."""
        tables = self.table(name)
        return [tables.table(key) for key in tables._table]

    def same(self, other: "_Fields", *names: str) -> bool:
        return all(self._table.get(name) == other._table.get(name) for name in names)

    def refuse(self, name: str, value: Any, why: str) -> NoReturn:
        raise ConfigError(f"{self._source}: {self._path}.{name} is {value!r}; {why}: {_ADVICE}")


def _compressed_tensors(fields: _Fields) -> Quantization:
    fields.one_of("format", None, *_COMPRESSED)
    fields.absent("transform_config")
    fields.table("sparsity_config").one_of("format", None, "dense")
    first, *others = fields.tables("config_groups") or [fields.table("config_groups").table("group_0")]
    for other in others:
        if not first.same(other, "weights", "input_activations", "format"):
            fields.refuse("config_groups", "a mix of schemes", "one for all modules is supported")
    first.absent("output_activations")
    packing = first.one_of("format", None, *_COMPRESSED) or fields.get("format")
    _check_kv(fields)
    weights, skipped = first.table("weights"), fields.names("ignore")
    weights.one_of("dynamic", False, default=False)
    kind, bits = weights.one_of("type", "float", "int"), weights.one_of("num_bits", 8, 4)
    if packing == "pack-quantized":
        weights.one_of("type", "int")
        return _packed_integers(weights, first.table("input_activations"), skipped)
    if kind == "int":
        return _int8_rows(weights, first.table("input_activations"), skipped)
    if bits == 4 or packing == "nvfp4-pack-quantized":
        return _nvfp4_groups(weights, first.table("input_activations"), skipped)
    return _fp8_groups(weights, first.table("input_activations"), skipped)


def _fp8_groups(weights: _Fields, activations: _Fields, skipped: tuple[str, ...]) -> Quantization:
    strategy = weights.one_of("strategy", "tensor", "channel", "block")
    weights.one_of("symmetric", True, default=True)
    if strategy == "block":
        weights.one_of("block_structure", [BLOCK, BLOCK])
    if activations:
        activations.one_of("num_bits", 8)
        activations.one_of("type", "float")
        activations.one_of("symmetric", True, default=True)
        activations.one_of("strategy", "group" if strategy == "block" else "token", "tensor")
    if activations and strategy == "block":
        activations.one_of("group_size", BLOCK)
    scheme = Scheme.FP8_BLOCKS if strategy == "block" else Scheme.FP8_ROWS
    return Quantization("compressed-tensors", scheme, skipped, rounds_activations=bool(activations))


def _packed_integers(weights: _Fields, activations: _Fields, skipped: tuple[str, ...]) -> Quantization:
    """Read W4A16 and W8A16, or such weights beside activations of 8 bits, which stay as they are here."""
    strategy = weights.one_of("strategy", "group", "channel", "tensor")
    if activations:
        activations.one_of("num_bits", 8)
    is_symmetric = weights.one_of("symmetric", True, *((False,) if strategy != "tensor" else ()), default=True)
    order = weights.one_of("actorder", None, False, True, *_BY_GROUP, "weight", "static")
    return Quantization(
        "compressed-tensors",
        Scheme.PACKED,
        skipped,
        rounds_activations=bool(activations),
        group_size=_group_size(weights) if strategy == "group" else -1,
        act_order=order is True or order in _BY_GROUP,
        bits=weights.get("num_bits"),
        is_symmetric=is_symmetric,
    )


def _int8_rows(weights: _Fields, activations: _Fields, skipped: tuple[str, ...]) -> Quantization:
    """Read W8A8, or such weights alone; activations are not rounded here."""
    weights.one_of("num_bits", 8)
    weights.one_of("strategy", "channel", "tensor")
    if activations:
        activations.one_of("num_bits", 8)
        activations.one_of("type", "int")
        activations.one_of("strategy", "token", "tensor")
    is_symmetric = weights.one_of("symmetric", True, False, default=True)
    rounds = bool(activations)
    scheme = Scheme.INT8_ROWS
    return Quantization("compressed-tensors", scheme, skipped, rounds, bits=8, is_symmetric=is_symmetric)


def _nvfp4_groups(weights: _Fields, activations: _Fields, skipped: tuple[str, ...]) -> Quantization:
    """Read NVFP4; activations, which may be meant to be so too, are not rounded here."""
    weights.one_of("num_bits", 4)
    weights.one_of("strategy", "tensor_group")
    weights.one_of("group_size", NVFP4_GROUP)
    weights.one_of("symmetric", True, default=True)
    if activations:
        activations.one_of("num_bits", 4)
        activations.one_of("type", "float")
    return Quantization("compressed-tensors", Scheme.NVFP4, skipped, rounds_activations=bool(activations))


def _fp8(fields: _Fields) -> Quantization:
    """Read DeepSeek's blocks, which transformers writes too, or AutoFP8's matrices without a block size."""
    fields.one_of("fmt", "e4m3", default="e4m3")
    fields.one_of("activation_scheme", "dynamic", "static", default="dynamic")
    blocks = fields.one_of("weight_block_size", None, [BLOCK, BLOCK])
    if fields.get("kv_cache_scheme") != "static":
        _check_kv(fields)
    skipped = fields.names("modules_to_not_convert", "ignored_layers", "ignore")
    return Quantization("fp8", Scheme.FP8_BLOCKS if blocks else Scheme.FP8_ROWS, skipped)


def _fbgemm(fields: _Fields) -> Quantization:
    """Read FBGEMM's FP8, which has a scale per row.

    `activation_scale_ub` bounds the scale of a row of activations and so clips larger values; the row's own scale,
    which is used here, clips nothing.
    """
    return Quantization("fbgemm_fp8", Scheme.FP8_ROWS, fields.names("modules_to_not_convert"))


def _modelopt(fields: _Fields) -> Quantization:
    """Read hf_quant_config.json's table `quantization`, or config.json's fields without that table."""
    inner = fields.table("quantization") or fields
    algorithm = inner.one_of("quant_algo", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")
    inner.one_of("kv_cache_quant_algo", None, "FP8")
    _check_kv(inner)
    skipped = inner.names("exclude_modules", "ignore")
    if algorithm == "NVFP4":
        inner.one_of("group_size", NVFP4_GROUP, default=NVFP4_GROUP)
        return Quantization("modelopt", Scheme.NVFP4, skipped)
    return Quantization("modelopt", Scheme.FP8_ROWS, skipped)


def _check_kv(fields: _Fields) -> None:
    scheme = fields.table("kv_cache_scheme")
    if scheme:
        scheme.one_of("num_bits", 8)
        scheme.one_of("type", "float")
        scheme.one_of("strategy", "tensor", default="tensor")


def _gptq(fields: _Fields) -> Quantization:
    bits = fields.one_of("bits", 4, 8)
    fields.absent("dynamic", "is_marlin_format")
    layout = fields.one_of("checkpoint_format", "gptq", "gptq_v2", default=fields.get("format", "gptq"))
    return Quantization(
        "gptq",
        Scheme.GPTQ,
        group_size=_group_size(fields),
        act_order=bool(fields.get("desc_act", False)),
        zero_shift=1 if layout == "gptq" else 0,
        bits=bits,
    )


def _awq(fields: _Fields) -> Quantization:
    fields.one_of("bits", 4, default=fields.get("w_bit"))
    fields.one_of("version", "gemm", "GEMM", default="gemm")
    if (backend := fields.get("backend")) == "llm-awq":  # other backends name a kernel, not a layout
        fields.refuse("backend", backend, "its layout is not supported")
    fields.one_of("zero_point", True, default=True)
    return Quantization("awq", Scheme.AWQ, fields.names("modules_to_not_convert"), group_size=_group_size(fields))


def _group_size(fields: _Fields) -> int:
    size = fields.get("group_size", fields.get("q_group_size", BLOCK))
    if not is_whole(size) or (size < 1 and size != -1):
        fields.refuse("group_size", size, "a number of columns is expected, or -1 for a whole row")
    return size


_READERS: dict[str, Callable[[_Fields], Quantization]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
}
