"""The registry of architectures that the engine can run.

One file of this folder each, found by being here.
"""

import importlib
import pkgutil

import models
from contracts.errors import ConfigError
from models.family import Family

_NO_FAMILIES = {"config", "eagle3", "family", "registry"}

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
    for name, family in FAMILIES.items():
        if architecture in (family.architecture, family.gguf_architecture, name):
            return family
    supported = ", ".join(sorted(FAMILIES))
    raise ConfigError(f"{source}: the architecture '{architecture}' is not supported; supported are {supported}")
