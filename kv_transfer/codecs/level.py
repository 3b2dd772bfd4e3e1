"""The levels of compression, by name."""

from collections.abc import Sequence
from dataclasses import dataclass

from contracts.errors import ConfigError
from contracts.kv_loss import EXACT

SETTINGS = ("auto", "off")
"""The values of the setting that are not the name of a level."""


@dataclass(frozen=True, slots=True)
class CodecLevel:
    """One level; `number` stands for it in a payload, and is never given to another.

    `key_step`, `value_step`: the width of a quantization step, in standard deviations of the values of one head in a
    run of pages; 0.0 takes the narrowest that 8 bits hold. None: bit for bit.
    """

    name: str
    number: int
    key_step: float | None = None
    value_step: float | None = None

    @property
    def is_lossless(self) -> bool:
        return self.key_step is None


LEVELS = {
    level.name: level
    for level in (
        CodecLevel("lossless", 1),
        CodecLevel("8bit", 2, 0.0, 0.0),
        CodecLevel("6bit", 3, 0.07, 0.07),
        CodecLevel("4bit", 4, 0.26, 0.26),
        CodecLevel("3bit", 5, 0.5, 0.5),
    )
}
"""The levels by name, the most exact first. A name says about how many bits a value takes."""

EXACT_PAGES = 1
"""The pages at the start of a prompt that every level keeps bit for bit.

Its first tokens are attended to by all others (attention sinks), and unlike them.
"""

BY_NUMBER = {level.number: level for level in LEVELS.values()}


def loss_of(level: str) -> str:
    """Return the loss of KV that was coded at a level, see contracts.kv_loss.

    Raises KeyError for no such level.
    """
    return EXACT if LEVELS[level].is_lossless else level


def accepted_loss(levels: Sequence[str]) -> str:
    """Return the loss of KV that is taken where these levels, as `allowed_levels` gives them, are allowed."""
    return loss_of(levels[-1]) if levels else EXACT


def allowed_levels(setting: str) -> list[str]:
    """Return the names of the levels that an operator's `--kv-codec` allows, the most exact first.

    `auto` allows what loses nothing, a name that level and what loses nothing. Raises ConfigError on another value.
    """
    if setting == "off":
        return []
    if setting != "auto" and setting not in LEVELS:
        raise ConfigError(f"kv_codec is '{setting}'; it must be one of {', '.join((*SETTINGS, *LEVELS))}")
    return [name for name, level in LEVELS.items() if level.is_lossless or name == setting]
