"""The download of models from the Hugging Face hub.

It is imported only for that: its client takes half a second of a core to load.
"""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from contracts.errors import ConfigError

_FILES = ["*.json", "*.jinja", "*.safetensors"]
_ELSEWHERE = ["[!0-9]*/*.json", "*/*.safetensors"]
"""Folders hold the same weights in other layouts, and chat templates; those with a number are of modules.json."""
_BESIDE = ["consolidated*.safetensors", "adapter_model.safetensors"]  # Mistral's own copy of the weights; LoRA's
_LOST: type[Exception] = HfHubHTTPError.__bases__[0]
"""HTTPError of httpx or of httpx2, whichever the hub's client uses.

hf_xet, which fetches most weights, raises RuntimeError when its connection is lost.
"""


def download(model: str) -> Path:
    """Return the folder of a model id such as "org/name", fetched unless it is in the local cache.

    Raise ConfigError if that fails.
    """
    try:
        return Path(snapshot_download(model, allow_patterns=_FILES, ignore_patterns=[*_ELSEWHERE, *_BESIDE]))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"cannot reach the Hugging Face hub, and '{model}' is not in its local cache; "
            f"download it where there is a network and give the folder's path instead"
        ) from error
    except HFValidationError as error:
        raise ConfigError(f"'{model}' is neither a path that exists nor a hub id: {error}") from error
    except HfHubHTTPError as error:
        raise ConfigError(f"cannot download '{model}' from the Hugging Face hub: {error}") from error
    except (_LOST, RuntimeError, OSError) as error:
        raise ConfigError(
            f"cannot download '{model}' from the Hugging Face hub: {type(error).__name__}: {error}; try again, "
            f"what was fetched is kept; or give the path of a folder that holds the model"
        ) from error
