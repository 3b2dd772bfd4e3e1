"""Names of devices, as settings have them."""

import re

from contracts.errors import ConfigError


def gpu_index(device: str, *others: str) -> int | None:
    """N of `cuda:N`, None of `cuda`.

    Raises ConfigError for another name, which says what `others` would do.
    """
    found = re.fullmatch(r"cuda(?::([0-9]+))?", device)
    if found is None:
        supported = ", ".join([*others, "cuda"])
        raise ConfigError(f"the device '{device}' is not supported; supported are {supported} and cuda:N")
    return None if found[1] is None else int(found[1])
