"""The LoRA adapters that an engine has loaded, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from contracts.errors import AdapterMissing, ConfigError
from contracts.request import AdapterRef


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter, with the weights as its device computes with them; sequences keep it until they end."""

    ref: AdapterRef
    weights: Any


LoadAdapter = Callable[[str, str], LoadedAdapter]
"""(name, path) -> the adapter; raises ConfigError for one that can't be served, by the name of what is wrong."""


class Adapters:
    """Which adapters requests may name. Nobody who runs already notices that one is unloaded.

    `load` is None on a device, or with kernels, that compute the model alone.
    """

    def __init__(self, load: LoadAdapter | None = None) -> None:
        self._load = load
        self._loaded: dict[str, LoadedAdapter] = {}

    @property
    def are_served(self) -> bool:
        """Return whether adapters can be loaded."""
        return self._load is not None

    @property
    def refs(self) -> tuple[AdapterRef, ...]:
        """Return those that are loaded, in the order of their loading."""
        return tuple(adapter.ref for adapter in self._loaded.values())

    def load(self, name: str, path: str) -> AdapterRef:
        """Load an adapter under a name. One that is loaded already stays as it is.

        Raises ConfigError for one that can't be served, and for a name that other weights have.
        """
        if self._load is None:
            raise ConfigError("this engine serves no adapters: set enable_lora")
        adapter, known = self._load(name, path), self._loaded.get(name)
        if known is not None and known.ref != adapter.ref:
            raise ConfigError(f"the adapter '{name}' is loaded already, with other weights; unload it first")
        return self._loaded.setdefault(name, adapter).ref

    def unload(self, name: str) -> None:
        """Forget an adapter; what runs with it goes on. Raises ConfigError for one that is not loaded."""
        if name not in self._loaded:
            raise ConfigError(f"no adapter '{name}' is loaded; there are {', '.join(self._loaded) or 'none'}")
        del self._loaded[name]

    def find(self, ref: AdapterRef | None) -> LoadedAdapter | None:
        """Return the adapter of a request, None for the model alone. Raises AdapterMissing."""
        if ref is None:
            return None
        adapter = self._loaded.get(ref.name)
        if adapter is None:
            raise AdapterMissing(f"the adapter '{ref.name}' is not loaded on this worker")
        if adapter.ref != ref:
            raise AdapterMissing(f"the adapter '{ref.name}' has other weights on this worker")
        return adapter
