"""The index of tensors in safetensors files, checked before anything is loaded.

engine.model_loader.checkpoint_weights reads the tensors.
"""

import json
from pathlib import Path

from contracts.errors import ConfigError

_MAX_HEADER_NBYTES = 100_000_000


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return tensor name -> file.

    Raise ConfigError if a file is missing, cut short, or its header can't be read.
    """
    files = weight_files(folder)
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors file; other weight formats are not supported")
    return {name: file for file in files for name in tensor_names(file)}


def weight_files(folder: Path) -> list[Path]:
    """Return the model's own files, sorted; others may lie beside them.

    Raise ConfigError for an index that can't be read.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        return [folder / name for name in _listed(index)]
    return [single] if single.exists() else sorted(folder.glob("*.safetensors"))


def _listed(index: Path) -> list[str]:
    try:
        return sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"cannot read {index}: {error!r}") from error


def tensor_names(file: Path) -> list[str]:
    """Return the names in a header: 8 bytes of length, then JSON (huggingface/safetensors, README)."""
    try:
        with file.open("rb") as stream:
            nbytes = int.from_bytes(stream.read(8), "little")
            if nbytes > _MAX_HEADER_NBYTES:
                raise ValueError(f"a header of {nbytes} bytes")
            header = json.loads(stream.read(nbytes))
        ends = {name: int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"}
    except FileNotFoundError as error:
        raise ConfigError(f"{file} is missing: the download is incomplete") from error
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ConfigError(f"{file} is not a sound safetensors file ({error!r}); download it again") from error
    end = 8 + nbytes + max(ends.values(), default=0)
    if file.stat().st_size < end:
        raise ConfigError(f"{file} is cut short: {file.stat().st_size} of {end} bytes; download it again")
    return list(ends)
