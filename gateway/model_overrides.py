"""What an operator sets in place of what a model's files say."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from checkpoint import Advice, Checkpoint
from checkpoint.huggingface.folder import advice_of
from contracts.errors import ConfigError
from gateway.settings import GatewaySettings


def overridden(checkpoint: Checkpoint, settings: GatewaySettings) -> Checkpoint:
    """Return `checkpoint` with the template and the advice of `settings`. Raises ConfigError."""
    advice = _advice(checkpoint, settings)
    if not settings.chat_template:
        return replace(checkpoint, advice=advice)
    return replace(checkpoint, advice=advice, chat_template=_template(settings.chat_template), tool_template=None)


def _template(given: str) -> str:
    """Return the text of a file; what has a brace and is none is the template itself, as with vLLM."""
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if "{" in given:
            return given
        raise ConfigError(f"chat_template is {given!r}, which can't be read: {error}") from error


def _advice(checkpoint: Checkpoint, settings: GatewaySettings) -> Advice:
    advice = _chosen(checkpoint, settings.generation_config)
    given = settings.override_generation_config
    if unknown := sorted(given.keys() - asdict(advice).keys()):
        names = ", ".join(asdict(advice))
        raise ConfigError(f"override_generation_config has {unknown[0]!r}; it may have {names}")
    return advice_of(asdict(advice) | given, "override_generation_config") if given else advice


def _chosen(checkpoint: Checkpoint, source: str) -> Advice:
    if source in ("", "auto"):
        return checkpoint.advice
    if source == "vllm":
        return Advice()
    file = Path(source) / "generation_config.json"
    return advice_of(_read(file), str(file))


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"generation_config names {file.parent}; {file.name} there can't be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must be a JSON object")
    return found
