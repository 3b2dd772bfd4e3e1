"""Llama 3.1 to 3.3: `{"name": ..., "parameters": ...}`, perhaps behind `<|python_tag|>`.

More calls follow a `;`.

https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling
"""

from collections.abc import Collection

from gateway.tool_calling.call_parser import SPACE, CallParser
from gateway.tool_calling.tool_format import ToolFormat


class Llama3JsonParser(CallParser):
    """Without the marker, only an answer that begins with a call of a known function is taken for one."""

    opening = "<|python_tag|>"
    separators = ";"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._is_marked = False
        self._step = self._start

    def _start(self) -> bool:
        self._say(self._skip(SPACE))
        if self._text:
            self._step = self._head if self._text[0] == "{" else self._outside
        return bool(self._text)

    def _opened(self) -> bool:
        self._is_marked = True
        return super()._opened()

    def _is_known(self, name: str) -> bool:
        return super()._is_known(name) if self._is_marked else name in self.names

    def _other_order(self) -> bool:
        return super()._other_order() if self._is_marked else self._no_call()


FORM = ToolFormat(
    parser=Llama3JsonParser,
    begin="",
    join="; ",
    end="",
    markers=("<|python_tag|>",),
    between='", "parameters": ',
)
