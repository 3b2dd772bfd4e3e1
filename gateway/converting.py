"""What came as JSON as one of our types, or an error that names the place and says what is allowed there."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

import msgspec

from contracts.errors import RequestError

Kind = TypeVar("Kind", bound=msgspec.Struct)


def converted(fields: dict[str, Any], kind: type[Kind], at: str = "") -> Kind:
    """`at`: where in the request they are. Raises RequestError naming the field."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        place = (at + path.rstrip("`").removeprefix("$")).removeprefix(".")
        param = ".".join(part for part in (place, _missing(message)) if part) or None
        message += _allowed(message, list(_types_at(kind, re.findall(r"\.(\w+)", path))))
        raise RequestError(f"{param}: {message}" if param else message, param) from error


def _missing(message: str) -> str | None:
    return message.split("`")[1] if "missing required field" in message else None


def _types_at(kind: Any, names: Sequence[str]) -> Iterator[Any]:
    """What may stand where `names` lead to: a type and all that it is put together from, a literal's words too."""
    if names and _is_object(kind):
        for field in msgspec.structs.fields(kind):
            if field.encode_name == names[0]:
                yield from _types_at(field.type, names[1:])
        return
    if not names:
        yield kind
    for part in get_args(kind):
        yield from _types_at(part, names)


def _is_object(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _allowed(message: str, types: Sequence[Any]) -> str:
    """The words that a field takes, which msgspec leaves out when it got another."""
    if not message.startswith("Invalid enum value"):
        return ""
    words = [repr(kind) for kind in types if isinstance(kind, str)]
    objects = ["an object"] if any(map(_is_object, types)) else []
    return f"; allowed: {', '.join([*words, *objects])}"
