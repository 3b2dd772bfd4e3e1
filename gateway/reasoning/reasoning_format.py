"""The way a family thinks aloud: what readers of answers, grammars and chat templates need to know."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gateway.tool_calling.call_parser import CallParser
from gateway.tool_calling.events import OutputEvent
from gateway.tool_calling.tool_format import ToolFormat

GRAMMAR = "grammar"
"""What the rules before a grammar call it."""


class ReasoningParser(Protocol):
    """Reads one answer: what is thought, said and called.

    Pure; how the text is cut into pieces changes nothing.

    `mark` is fed what is a special token among the form's markers, `feed` the text between. `is_cut`: the answer might
    have gone on where it ends.
    """

    @property
    def is_thinking(self) -> bool: ...

    def feed(self, text: str) -> list[OutputEvent]: ...

    def mark(self, marker: str) -> list[OutputEvent]: ...

    def finish(self, is_cut: bool) -> list[OutputEvent]: ...


class ReasoningFormat(Protocol):
    """The form of a family's reasoning.

    `markers`: texts of it that a tokenizer may hold as special tokens. `ends`: those that end an answer. `headers`:
    those behind which, until the next, nothing is thought or said.

    `begun` is what the prompt has already begun of the answer, for whatever of it matters here.
    """

    @property
    def markers(self) -> Sequence[str]: ...

    @property
    def ends(self) -> Sequence[str]: ...

    @property
    def headers(self) -> Sequence[str]: ...

    @property
    def thought_end(self) -> str:
        """What ends the reasoning in an earlier answer that was kept as text; empty if its text holds none."""
        ...

    @property
    def efforts(self) -> Sequence[str]:
        """What `reasoning_effort` may be; empty: whatever the template takes."""
        ...

    @property
    def calls(self) -> ToolFormat | None:
        """How it writes calls, if that is part of it."""
        ...

    def begun(self, prompt: str, final: str) -> str:
        """Return what `prompt` has begun of the answer.

        `final`: the text of the message that the answer goes on with, empty if it is a new one.
        """
        ...

    def reader(self, begun: str, calls: CallParser | None) -> ReasoningParser:
        """`calls` reads calls out of what is said; None if the client offers no tools."""
        ...

    def before_grammar(self, begun: str, token_ids: Mapping[str, int], is_headed: bool) -> Sequence[str]:
        """Rules of Lark: `start` is all that may come before GRAMMAR, and then GRAMMAR; empty: nothing may.

        `is_headed`: the grammar begins with the header of its own message. `token_ids`: of those markers that a
        grammar has to name as tokens.
        """
        ...

    def remembered(self, message: dict[str, Any], reasoning: str) -> dict[str, Any]:
        """An earlier message of the assistant with its reasoning, as the chat template knows it."""
        ...
