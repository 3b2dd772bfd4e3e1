"""The settings of a service, and errors that say which one to set and how."""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import CliApp, SettingsError

from contracts.errors import ConfigError

S = TypeVar("S")


def flag_and_variable(name: str) -> str:
    return f"--{name.replace('_', '-')} or {variable(name)}"


def variable(name: str) -> str:
    return f"TANDEM_{name.upper()}"


def read_settings(kind: type[S], argv: Sequence[str], places: Callable[[str], str] = flag_and_variable) -> S:
    """Read settings from the command line, the environment and defaults, in this order.

    An unknown option ends the process with code 2, like argparse. Raise ConfigError that names each wrong setting, its
    value, what is allowed, and by `places` where it is set.
    """
    try:
        return CliApp.run(kind, cli_args=list(argv))
    except ValidationError as error:
        wrong = [_describe(str(item["loc"][0]), item, places) for item in error.errors()]
        raise ConfigError("; ".join(wrong)) from error
    except SettingsError as error:
        raise ConfigError(str(error)) from error


def _describe(name: str, item: ErrorDetails, places: Callable[[str], str]) -> str:
    words = item["msg"].removeprefix("Value error, ")
    for theirs, ours in (("Input should be", "it must be"), ("String should have", "it must have")):
        words = words.replace(theirs, ours)
    # What stands before @ may be a password.
    shown = re.sub(r"(?<=://)[^'\"]*@|(?<=^['\"])[^'\"/]*@", "...@", repr(item["input"]))
    return f"{name} is {shown}: {words} (set by {places(name)})"
