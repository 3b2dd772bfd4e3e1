"""What the parsers of all families share: the text of an answer in, what it says and calls out."""

import json
from collections.abc import Collection
from typing import Any, ClassVar, NoReturn, TypeGuard

from gateway.tokenization.stop_strings import overlap
from gateway.tool_calling.call_header import read_head
from gateway.tool_calling.events import (
    ContentDelta,
    MalformedToolCall,
    OutputEvent,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from gateway.tool_calling.json_scanner import ObjectScanner
from gateway.tool_calling.step_parser import StepParser

SPACE = " \t\r\n"


class CallParser(StepParser):
    """Reads calls behind the marker `opening`, alone or in a list, until `closing`.

    Pure; a family's is a subclass.

    What the events say does not depend on how the text is cut into pieces. Only what may become a marker or a call is
    held back. White space around calls is not said; everything else that is no call is, to the letter.
    """

    opening: ClassVar[str]
    closing: ClassVar[str] = ""
    separators: ClassVar[str] = ""
    is_thinking = False  # it knows nothing of reasoning

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the functions that the client knows."""
        super().__init__(self._outside)
        self.names = names
        self._blank = ""
        self._is_blank = True
        self._num_calls = 0
        self._has_closed = False
        self._forget_call()

    def finish(self, is_cut: bool = False) -> list[OutputEvent]:
        """Return the rest, now that nothing follows: what was no call after all is said, cut off or not."""
        if self._is_announced:
            self._break(self._text)
        elif self._step != self._between:
            self._say(self._read + self._text)
        if self._blank and not self._has_closed:
            self._events.append(ContentDelta(self._blank))
        self._text = self._blank = ""
        return self._taken()

    # Steps: each takes from `_text` what it can, and returns whether the next one has something to do.

    def _outside(self) -> bool:
        """In what is said."""
        said, found, rest = self._text.partition(self.opening)
        kept = 0 if found else overlap(said, self.opening)
        self._say(said[: len(said) - kept])
        self._text = rest if found else said[len(said) - kept :]
        if found:
            self._lead, self._step = found, self._opened
        return bool(found)

    def _opened(self) -> bool:
        """Behind the marker: a call, or a list of them."""
        self._lead += self._skip(SPACE)
        first = self._text[:1]
        if first == "[" and not self._is_list:
            self._is_list = True
            self._lead += self._take(1)
        elif first == "]" and self._is_list:  # the empty list: no call, and nothing said
            self._take(1)
            self._forget_call()
            self._step = self._between
        elif first == "{":
            self._step = self._head
        else:
            return bool(first) and self._no_call()
        return True

    def _head(self) -> bool:
        """In a call's name."""
        try:
            head = read_head(self._text)
        except ValueError:
            return self._other_order()
        if head is None:
            return False
        name, end = head
        if not self._is_known(name):
            return self._no_call()
        self._announce(name)
        self._object.append(self._take(end))
        self._step = self._arguments
        return True

    def _arguments(self) -> bool:
        """In a call's arguments, passed on as they come."""
        if part := self._scan():
            self._events.append(ToolCallArguments(self._num_calls - 1, part))
        if self._scanner.is_done:
            return self._argued()
        return self._scanner.is_broken and self._break()

    def _tail(self) -> bool:
        """Behind a call's arguments: the end of its object."""
        self._scan()
        if self._scanner.is_done:
            return self._close(_call_of(self._object) is not None)
        return self._scanner.is_broken and self._break()

    def _whole(self) -> bool:
        """In a call that does not begin with its name: nothing is known of it until it is complete."""
        self._scan()
        if not self._scanner.is_done:
            return self._scanner.is_broken and self._no_call()
        if (call := _call_of(self._object)) is None:
            return self._no_call()
        name, arguments = call
        spelled = json.dumps(arguments)
        if object_of(spelled) is None:  # 1e999 is an infinity by now, which is no JSON
            return self._no_call()
        self._announce(name)
        self._events.append(ToolCallArguments(self._num_calls - 1, spelled))
        return self._close(True)

    def _between(self) -> bool:
        """Behind a call: another one, the end of the calls, or something said."""
        self._skip(SPACE + self.separators)
        first = self._text[:1]
        if not first:
            return False
        if self._is_list and first in ",]":
            self._is_list = self._take(1) == ","
        elif first == "{":
            self._step = self._head
        elif self.closing.startswith(self._text) and self._text != self.closing:
            return False
        else:
            self._text = self._text.removeprefix(self.closing)
            self._step = self._outside
        return True

    # What a family may see otherwise.

    def _is_known(self, name: str) -> bool:
        """Return whether it is a name: any will do behind a marker, for the client may tell the model better."""
        return _is_name(name)

    def _other_order(self) -> bool:
        self._step = self._whole
        return True

    def _argued(self) -> bool:
        """The arguments are complete; the object that holds them is not yet."""
        self._scanner, self._step = ObjectScanner(depth=1), self._tail
        return True

    # What the steps do.

    def _scan(self) -> str:
        part = self._take(self._scanner.read(self._text))
        self._object.append(part)
        return part

    def _skip(self, characters: str) -> str:
        return self._take(len(self._text) - len(self._text.lstrip(characters)))

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _say(self, text: str) -> None:
        if self._is_blank and (not text or text.isspace()):
            self._blank += text
            return
        text, self._blank, self._is_blank = self._blank + text, "", False
        if text:
            self._events.append(ContentDelta(text))

    def _announce(self, name: str) -> None:
        self._is_announced = True
        self._events.append(ToolCallStarted(self._num_calls, name))
        self._num_calls += 1

    def _close(self, is_call: bool) -> bool:
        if not is_call:
            return self._break()
        self._events.append(ToolCallFinished(self._num_calls - 1))
        self._has_closed = self._is_blank = True
        is_list, self._blank = self._is_list, ""
        self._forget_call()
        self._is_list, self._step = is_list, self._between
        return True

    def _break(self, rest: str = "") -> bool:
        """An announced call turns out to be none."""
        self._events.append(MalformedToolCall(self._num_calls - 1, self._blank + self._read + rest))
        self._blank, self._is_blank = "", False
        self._forget_call()
        self._step = self._outside
        return True

    def _no_call(self) -> bool:
        """What looked like a call was none."""
        self._say(self._read)
        self._forget_call()
        self._step = self._outside
        return True

    def _forget_call(self) -> None:
        self._lead, self._object, self._scanner = "", [], ObjectScanner()
        self._is_announced = self._is_list = False

    @property
    def _read(self) -> str:
        """Return all that was taken from the text of the call in hand."""
        return self._lead + "".join(self._object)


def _call_of(parts: list[str]) -> tuple[str, dict[str, Any]] | None:
    call = object_of("".join(parts))
    if call is None:
        return None
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    return (name, arguments) if _is_name(name) and isinstance(arguments, dict) else None


def _is_name(name: Any) -> TypeGuard[str]:
    return isinstance(name, str) and name != "" and name.isprintable()


def object_of(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is, if it is one."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON, though Python's parser takes it")
