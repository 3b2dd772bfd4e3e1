"""What came as JSON as one of our types, or an error that names the place and what is allowed."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec

from contracts.errors import RequestError

Kind = TypeVar("Kind", bound=msgspec.Struct)


def converted(fields: dict[str, Any], kind: type[Kind], at: str = "") -> Kind:
    """Return `fields` as a `kind`. Raises RequestError naming the field.

    Numbers and booleans may be in quotes, as with vLLM: low-code tools send them so.
    `at`: where in the request they are.
    """
    fields = fields | {name: whole(fields[name]) for name in _whole_fields(kind) if name in fields}
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        message, path = _parts(str(error))
        place = (at + _with_key(path, fields, kind)).removeprefix(".")
        param = ".".join(part for part in (place, _missing(message)) if part) or None
        names = re.findall(r"\.(\w+)", path)
        message = _told(message, list(_types_at(kind, names)), list(_types_at(kind, names[:-1])))
        raise RequestError(f"{param}: {message}" if param else message, param) from error


def whole(value: Any) -> Any:
    """Return 1.0 as 1, of a list each such item.

    JSON has one kind of number, and some clients write what is whole with a point. vLLM takes it.
    """
    if isinstance(value, list):  # of a million token ids, mostly without a Python loop
        return list(map(_whole, value)) if float in set(map(type, value)) else value
    return _whole(value)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


@cache
def _whole_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Those that take whole numbers, or lists of them, and no others."""
    taken = {field.encode_name: list(_types_at(field.type, ())) for field in msgspec.structs.fields(kind)}
    return tuple(name for name, types in taken.items() if int in types and float not in types)


def words_of(part: Any, kinds: Mapping[str, str], param: str) -> str:
    """Return the words of a part of a message. Raises RequestError naming `param`.

    `kinds`: the types that are taken, and the field that has their words; the first is named to who sends another.
    """
    kind = part.get("type") if isinstance(part, dict) else part
    field = kinds.get(kind) if isinstance(part, dict) and isinstance(kind, str) else None
    if field is None:
        raise RequestError(f"content of type {kind!r} is not supported, only {next(iter(kinds))!r}", param)
    if not isinstance(part.get(field), str):
        raise RequestError(f"a {field} part needs '{field}', a string", f"{param}.{field}")
    return part[field]


def _parts(text: str) -> tuple[str, str]:
    """The message and the path. The message may quote the client, whose words may look like either."""
    message, _, path = text.rpartition(" - at `$")
    return (message, path.removesuffix("`")) if message else (text, "")


def _missing(message: str) -> str | None:
    return message.split("`")[1] if message.startswith("Object missing required field") else None


def _with_key(path: str, fields: dict[str, Any], kind: type[msgspec.Struct]) -> str:
    """Return the path with the key of the first wrong value, for which msgspec writes [...]."""
    name, dots, rest = path.removeprefix(".").partition("[...]")
    types = [field.type for field in msgspec.structs.fields(kind) if field.encode_name == name]
    if dots and types:
        return f".{name}.{_wrong_key(fields[name], types[0])[:64]}{rest}"
    return path


def _wrong_key(given: dict[str, Any], kind: Any) -> str:
    """Return the key of the wrong one, found by halves: each of half a million alone takes seconds."""
    left = list(given.items())
    while len(left) > 1:
        half = left[: len(left) // 2]
        try:
            msgspec.convert(dict(half), kind, strict=False)
        except msgspec.ValidationError:
            left = half
        else:
            left = left[len(half) :]
    return left[0][0]


def _types_at(kind: Any, names: Sequence[str]) -> Iterator[Any]:
    """Yield what may stand where `names` lead to: a type and its parts, a literal's words too."""
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


def _told(message: str, types: Sequence[Any], owners: Sequence[Any]) -> str:
    """Return msgspec's message, with the words that a field takes, or the pattern of a text in words.

    `owners`: the objects that the field may be of, which it may tell apart.
    """
    if message.startswith("Invalid value"):
        tags = dict.fromkeys(repr(kind.__struct_config__.tag) for kind in owners if _is_object(kind))
        return f"{message}; allowed: {', '.join(tags)}"
    if message.startswith("Expected `str` matching regex"):
        patterns = [kind.description for kind in types if isinstance(kind, msgspec.Meta) and kind.description]
        return f"Expected {patterns[0]}" if patterns else message
    if not message.startswith("Invalid enum value"):
        return message
    words = [repr(kind) for kind in types if isinstance(kind, str)]
    objects = ["an object"] if any(map(_is_object, types)) else []
    return f"{message}; allowed: {', '.join([*words, *objects])}"
