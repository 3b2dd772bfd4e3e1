"""The checks of numbers in a model's file, which refuse by name what can't be computed with."""

import math
from typing import Any

from contracts.errors import ConfigError

_MOST_COUNT, _MOST_AMOUNT = 2**31 - 1, 1e18
_SHOWN = 60
"""Characters shown of a value: some files have a list where one number belongs."""


def require_count(value: Any, name: str, file: object) -> None:
    """Raise ConfigError unless the value is a whole number above 0."""
    if not is_whole(value) or not 0 < value <= _MOST_COUNT:
        raise ConfigError(f"{file}: {name} is {_shown(value)}; a whole number from 1 to {_MOST_COUNT} is expected")


def require_head_dim(value: Any, name: str, file: object) -> None:
    """Raise ConfigError unless the value is an even count of columns, which RoPE turns in pairs."""
    require_count(value, name, file)
    if value % 2:
        raise ConfigError(f"{file}: {name} is {value}; an even number is expected, as RoPE turns pairs of columns")


def require_amount(value: Any, name: str, file: object, above: float = 0) -> None:
    """Raise ConfigError unless the value is a number above `above` and of a plausible size."""
    is_number = is_whole(value) or (isinstance(value, float) and math.isfinite(value))
    if not is_number or not above < value <= _MOST_AMOUNT:
        raise ConfigError(
            f"{file}: {name} is {_shown(value)}; a number above {above}, and at most {_MOST_AMOUNT:g}, is expected"
        )


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}.."
