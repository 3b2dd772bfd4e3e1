"""A family's way to write calls, as data: for grammars, and for telling a model how to call."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.tool_calling.call_parser import CallParser


@dataclass(frozen=True)
class ToolFormat:
    """The form of a family's calls.

    `begin`, the calls with `join` between them, `end`; a call is `before` name `between` arguments `after`.

    `markers`: texts of it that a tokenizer may hold as special tokens. `answer` comes before an answer that does not
    call. `id_prefix`, `id_length`: of a call's id. With no `join` an answer calls once. `needs_all_fields`: its chat
    templates take no tool without a description or parameters.
    """

    parser: type[CallParser]
    begin: str
    join: str
    end: str
    markers: tuple[str, ...]
    before: str = '{"name": "'
    between: str = '", "arguments": '
    after: str = "}"
    answer: str = ""
    needs_all_fields: bool = False
    id_prefix: str = "call_"
    id_length: int = 24

    def spell(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and its arguments as JSON, as the model would write them."""
        spelled = (self.before + name + self.between + arguments + self.after for name, arguments in calls)
        return self.begin + self.join.join(spelled) + self.end

    def new_id(self) -> str:
        return self.id_prefix + secrets.token_hex(self.id_length)[: self.id_length]
