"""JSON files of a model's folder."""

import json
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError


def read_json(path: Path, required: bool = True, missing: str = "is not a model folder") -> dict[str, Any]:
    """Return the table in a file, empty where it may be missing.

    `missing`: what its folder is said to be where it may not. Raises ConfigError.
    """
    if not path.exists() and not required:
        return {}
    table = _parsed(path, missing)
    if not isinstance(table, dict):
        raise ConfigError(f"cannot read {path}: it holds no table")
    return table


def read_tables(path: Path) -> list[dict[str, Any]]:
    """Return the list of tables in a file, empty if there is none. Raises ConfigError."""
    if not path.exists():
        return []
    tables = _parsed(path, "is not a model folder")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"cannot read {path}: it holds no list of tables")
    return tables


def _parsed(path: Path, missing: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path.parent} {missing}: {path.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
