"""What sentence-transformers' files say of embeddings: modules.json, and the folder of the pooling."""

from pathlib import Path
from typing import Any

from checkpoint.checkpoint import EmbeddingForm
from checkpoint.huggingface.json_files import read_json, read_tables

_POOLINGS = "pooling_mode_"
_LAST = "pooling_mode_lasttoken"


def embedding_form(path: Path) -> EmbeddingForm:
    """Return how embeddings are made of rows.

    Without these files that of the last token is normalised, as vLLM has it. Raises ConfigError for damaged files.
    """
    modules = read_tables(path / "modules.json")
    if not modules:
        return EmbeddingForm()
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if unread := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        return EmbeddingForm(f"modules.json has the module '{unread[0]}', which is not supported")
    folders = [str(module.get("path", "")) for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    stated = read_json(path / folders[0] / "config.json") if folders else {_LAST: True}
    if other := _other_pooling(stated):
        return EmbeddingForm(f"{folders[0]}/config.json asks for {other}; supported is {_LAST}")
    return EmbeddingForm(is_normalized="Normalize" in kinds)


def _other_pooling(stated: dict[str, Any]) -> str:
    wanted = [name for name, value in stated.items() if name.startswith(_POOLINGS) and value is True]
    return next((name for name in wanted if name != _LAST), "" if _LAST in wanted else "no pooling")
