"""Reasoning between tags, before the answer: Qwen 3, DeepSeek-R1, QwQ, GLM-4.5, Magistral, Seed-OSS.

Some chat templates end the prompt with the opening tag: then the answer begins in thought.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.grammar.lark_text import terms
from gateway.reasoning.reasoning_format import GRAMMAR
from gateway.tokenization.stop_strings import overlap
from gateway.tool_calling.call_parser import SPACE, CallParser
from gateway.tool_calling.events import ContentDelta, OutputEvent, ReasoningDelta
from gateway.tool_calling.step_parser import StepParser
from gateway.tool_calling.tool_format import ToolFormat

MAX_SPACE_CHARS = 64
"""Before and between tags: of more, the rest is what it seems. Held back without end, each token would cost more."""


@dataclass(frozen=True)
class Tags:
    """A ReasoningFormat. `inner`: what a prompt that ends with the opening tag may have behind it."""

    opening: str
    closing: str
    inner: str = ""
    ends: Sequence[str] = ()
    headers: Sequence[str] = ()
    efforts: Sequence[str] = ()
    calls: ToolFormat | None = None

    @property
    def markers(self) -> Sequence[str]:
        return (self.opening, self.closing)

    @property
    def thought_end(self) -> str:
        return self.closing

    def begun(self, prompt: str, final: str) -> str:
        """Return the tag that the prompt ends with, the first character of an answer that goes on, or nothing.

        What a user says of tags opens nothing.
        """
        before = prompt.removesuffix(final).rstrip().removesuffix(self.inner).rstrip()
        is_open = before.endswith(self.opening) and self.closing not in final
        if is_open or final.rfind(self.opening) > final.rfind(self.closing):
            return self.opening
        if said := final.rpartition(self.closing)[2].strip():
            return said[:1]
        return self.closing if prompt.rstrip().endswith(self.closing) else ""

    def reader(self, begun: str, calls: CallParser | None) -> "TagsParser":
        return TagsParser(self, begun, calls)

    def before_grammar(self, begun: str, token_ids: Mapping[str, int], is_headed: bool) -> Sequence[str]:
        if begun not in ("", self.opening):  # the thought is over, and there is but one
            return []
        opening, closing = terms(self.opening, token_ids), terms(self.closing, token_ids)
        return [
            f"start: {'thought' if begun == self.opening else f'({opening} thought)?'} @{GRAMMAR}",
            "thought: inner GAP",
            f"inner[lazy]: TEXT {closing}" if self.closing not in token_ids else f"inner: TEXT {closing}",
            "TEXT: /(.|\\n)*/",
            "GAP: /\\n*/",
        ]

    def remembered(self, message: dict[str, Any], reasoning: str) -> dict[str, Any]:
        """Return the message with its reasoning by both names that templates know, which may drop it."""
        return message | {"reasoning_content": reasoning, "reasoning": reasoning}


class TagsParser(StepParser):
    """A ReasoningParser.

    Thought is what comes first, between the tags; newlines at the tags belong to neither side.
    """

    def __init__(self, tags: Tags, begun: str, calls: CallParser | None) -> None:
        first = {"": self._start, tags.opening: self._thinking, tags.closing: self._gap}
        super().__init__(first.get(begun, self._answer))
        self._tags = tags
        self._calls = calls
        self._has_thought = False

    @property
    def is_thinking(self) -> bool:
        return self._step == self._thinking

    def finish(self, is_cut: bool) -> list[OutputEvent]:
        if not self.is_thinking:
            self._say(self._text)
        elif thought := _without_newlines(self._text):
            self._events.append(ReasoningDelta(thought))
        self._text = ""
        self._events += self._calls.finish(is_cut) if self._calls is not None else []
        return self._taken()

    # Steps: each takes from `_text` what it can, and returns whether the next one has something to do.

    def _start(self) -> bool:
        """Before the first word: a tag, or the answer."""
        begun = self._text.lstrip(SPACE)
        is_far = len(self._text) - len(begun) > MAX_SPACE_CHARS
        if is_far or not (begun.startswith(self._tags.opening) or self._tags.opening.startswith(begun)):
            self._step = self._answer
        elif begun.startswith(self._tags.opening):
            self._text, self._step = begun.removeprefix(self._tags.opening), self._thinking
        else:
            return False
        return True

    def _thinking(self) -> bool:
        if not self._has_thought:
            self._text = self._text.lstrip("\n")
        thought, found, rest = self._text.partition(self._tags.closing)
        kept = 0 if found else overlap(thought, self._tags.closing)
        if thought := _without_newlines(thought[: len(thought) - kept]):
            self._events.append(ReasoningDelta(thought))
            self._has_thought = True
        self._text = rest if found else self._text[len(thought) :]
        if found:
            self._step = self._gap
        return bool(found)

    def _gap(self) -> bool:
        self._text = self._text.lstrip("\n")
        if self._text:
            self._step = self._answer
        return bool(self._text)

    def _answer(self) -> bool:
        self._say(self._text)
        self._text = ""
        return False

    def _say(self, text: str) -> None:
        if self._calls is not None:
            self._events += self._calls.feed(text)
        elif text:
            self._events.append(ContentDelta(text))


def _without_newlines(thought: str) -> str:
    """At its end."""
    return thought[: max(len(thought.rstrip("\n")), len(thought) - MAX_SPACE_CHARS)]
