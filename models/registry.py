"""The registry of architectures that the engine can run.

One file of this folder each, found by being here; and those that other installed distributions name in their entry
points of the group `tandem.models`, each a models.family.Family.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import models
from contracts.errors import ConfigError
from models.family import Family

GROUP = "tandem.models"
_NO_FAMILIES = {"config", "config_fields", "eagle3", "family", "registry"}

FAMILIES: dict[str, Family] = {
    name: importlib.import_module(f"models.{name}").FAMILY
    for _, name, _ in pkgutil.iter_modules(models.__path__)
    if name not in _NO_FAMILIES
}


def family_of(architecture: str, source: str) -> Family:
    """Return the family by the name that a config.json or a GGUF file uses.

    A config.json may only say its model_type, as the families here are called. Raises ConfigError that lists the
    supported ones.
    """

    def is_it(name: str, family: Family) -> bool:
        return architecture in (family.architecture, *family.also, family.gguf_architecture, name)

    if (found := _find(is_it)) is not None:
        return found
    supported = ", ".join(sorted({**FAMILIES, **installed_families()}))
    raise ConfigError(f"{source}: the architecture '{architecture}' is not supported; supported are {supported}")


def family_of_multimodal(architectures: Any) -> Family | None:
    """Return the family of a folder's text part where it has other parts beside it, else None."""

    def is_it(_: str, family: Family) -> bool:
        return family.multimodal is not None and architectures == [family.multimodal]

    known = [each for family in FAMILIES.values() for each in (family.architecture, *family.also)]
    is_text = isinstance(architectures, list) and any(name in known for name in architectures)
    return None if is_text else _find(is_it)


@cache
def installed_families() -> dict[str, Family]:
    """Return the families of other distributions, by the names of their entry points.

    Raises ConfigError for one that cannot be loaded, or is no family.
    """
    found = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        said = f"the entry point '{point.name}' = '{point.value}' of the group {GROUP}"
        try:
            family = point.load()
        except Exception as error:
            raise ConfigError(f"{said} cannot be loaded: {error}; mend or uninstall its distribution") from error
        if not isinstance(family, Family):
            raise ConfigError(f"{said} is a {type(family).__name__}; a models.family.Family is expected")
        found[point.name] = family
    return found


def _find(is_it: Callable[[str, Family], bool]) -> Family | None:
    return next((family for name, family in _all_families() if is_it(name, family)), None)


def _all_families() -> Iterator[tuple[str, Family]]:
    """Yield this folder's first: others are loaded only for what none of these is."""
    yield from FAMILIES.items()
    yield from installed_families().items()
