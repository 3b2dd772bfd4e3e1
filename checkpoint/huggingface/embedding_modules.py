"""What sentence-transformers' files say of embeddings: modules.json, and the folder of the pooling."""

from pathlib import Path
from typing import Any

from checkpoint.checkpoint import EmbeddingForm
from checkpoint.huggingface.json_files import read_json, read_tables

_MODE, _LAST = "pooling_mode", "lasttoken"


def embedding_form(path: Path) -> EmbeddingForm:
    """Return how embeddings are made of rows.

    Without modules.json that of the last token is normalised, as vLLM has it. Raises ConfigError for damaged files.
    """
    modules = read_tables(path / "modules.json")
    if not modules:
        return EmbeddingForm()
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if unread := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        return EmbeddingForm(f"modules.json has the module '{unread[0]}', which is not supported")
    folders = [str(module.get("path", "")) for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    stated = read_json(path / folders[0] / "config.json", required=False) if folders else {_MODE: _LAST}
    if other := _other_pooling(stated):
        return EmbeddingForm(f"{folders[0]}/config.json asks for {other}; supported is {_LAST}")
    return EmbeddingForm(is_normalized="Normalize" in kinds)


def _other_pooling(stated: dict[str, Any]) -> str:
    """Return what is not the last token.

    Both forms of the file are read: a flag for each mode, or their names.
    """
    names = stated.get(_MODE)
    wanted = [names] if isinstance(names, str) else names if isinstance(names, list) else _flagged(stated)
    return next((str(name) for name in wanted if name != _LAST), "" if wanted else "no pooling")


def _flagged(stated: dict[str, Any]) -> list[str]:
    return [
        name.removeprefix(f"{_MODE}_") for name, value in stated.items() if name.startswith(_MODE) and value is True
    ]
