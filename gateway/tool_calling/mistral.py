"""Mistral: `[TOOL_CALLS]` and a list of calls; newer ones `[TOOL_CALLS]name[ARGS]{...}` for each.

https://docs.mistral.ai/capabilities/function_calling and mistral-common's tokenizers v3 (the list) and v11 on (names).
"""

import re
from dataclasses import replace

from gateway.tool_calling.call_parser import SPACE, CallParser, object_of
from gateway.tool_calling.tool_format import ToolFormat

MAX_HEAD_CHARS = 256

# Of a call by name, all before its arguments; and what may become that.
_HEAD = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
_BEGUN = re.compile(r"[\w.-]+(?:\[[\w\[\]]*)?\s*")


class MistralParser(CallParser):
    opening = "[TOOL_CALLS]"

    def _opened(self) -> bool:
        self._is_named = not self._is_list and bool(_BEGUN.match(self._text.lstrip(SPACE)[:1]))
        if not self._is_named:
            return super()._opened()
        self._lead += self._skip(SPACE)
        self._step = self._name
        return True

    def _name(self) -> bool:
        """In what comes before the arguments of a call by name."""
        head, brace, _ = self._text.partition("{")
        if len(head) > MAX_HEAD_CHARS or not _BEGUN.fullmatch(head):
            return self._no_call()
        if not brace:
            return False
        if (match := _HEAD.fullmatch(head)) is None:
            return self._no_call()
        self._lead += self._take(len(head))
        self._announce(match[1])
        self._step = self._arguments
        return True

    def _argued(self) -> bool:
        if not self._is_named:
            return super()._argued()
        self._is_named = False
        return self._close(object_of("".join(self._object)) is not None)


def form_of(template: str) -> ToolFormat:
    """Return what the model was trained on: names and arguments apart, or a list, perhaps behind a space."""
    if "[ARGS]" in template:
        return BY_NAME
    return replace(FORM, begin="[TOOL_CALLS] [") if "[TOOL_CALLS] [" in template else FORM


FORM = ToolFormat(
    parser=MistralParser,
    begin="[TOOL_CALLS][",
    join=", ",
    end="]",
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    id_prefix="",
    id_length=9,  # its templates refuse ids of any other length
)
BY_NAME = replace(FORM, begin="[TOOL_CALLS]", join="[TOOL_CALLS]", end="", before="", between="[ARGS]", after="")
