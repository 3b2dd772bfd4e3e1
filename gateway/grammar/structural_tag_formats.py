"""The formats of structural tags as JSON, in the words of xgrammar's structural_tag.py.

vLLM takes them. Those that name single tokens, XML styles and `dispatch` are not among them.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_PARTS = 1024
Repeats = Annotated[int, Meta(ge=0, le=1024)]


class _StructuralFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """What they share: a field that is not known could mean anything."""


class ConstStringFormat(_StructuralFormat, frozen=True, tag="const_string"):
    value: str


class JsonSchemaFormat(_StructuralFormat, frozen=True, tag="json_schema"):
    """`max_whitespace_cnt`: of characters in a row between the parts of JSON."""

    json_schema: bool | dict[str, Any]
    style: Literal["json"] = "json"
    any_order: Literal[False] = False
    max_whitespace_cnt: Annotated[int, Meta(ge=0, le=32)] | None = None


class AnyTextFormat(_StructuralFormat, frozen=True, tag="any_text"):
    """`excludes`: what must not be in it."""

    excludes: list[str] = []
    max_chars: Annotated[int, Meta(ge=0, le=65536)] | None = None


class GrammarFormat(_StructuralFormat, frozen=True, tag="grammar"):
    """`grammar` is Lark or EBNF; which of them is seen in it."""

    grammar: str
    syntax: Literal["ebnf", "lark"] = "ebnf"


class RegexFormat(_StructuralFormat, frozen=True, tag="regex"):
    pattern: str


class SequenceFormat(_StructuralFormat, frozen=True, tag="sequence"):
    elements: Annotated[list["Format"], Meta(max_length=MAX_PARTS)]


class OrFormat(_StructuralFormat, frozen=True, tag="or"):
    elements: Annotated[list["Format"], Meta(min_length=1, max_length=MAX_PARTS)]


class OptionalFormat(_StructuralFormat, frozen=True, tag="optional"):
    content: "Format"


class PlusFormat(_StructuralFormat, frozen=True, tag="plus"):
    content: "Format"


class StarFormat(_StructuralFormat, frozen=True, tag="star"):
    content: "Format"


class RepeatFormat(_StructuralFormat, frozen=True, tag="repeat"):
    """`max` of -1: without end."""

    min: Repeats
    max: Annotated[int, Meta(ge=-1, le=1024)]
    content: "Format"


class TagFormat(_StructuralFormat, frozen=True, tag="tag"):
    """`begin`, content, and one of the ends."""

    begin: str
    content: "Format"
    end: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PARTS)]

    @property
    def ends(self) -> list[str]:
        return [self.end] if isinstance(self.end, str) else self.end


Tags = Annotated[list[TagFormat], Meta(min_length=1, max_length=MAX_PARTS)]
Trigger = Annotated[str, Meta(min_length=1)]
Triggers = Annotated[list[Trigger], Meta(min_length=1, max_length=MAX_PARTS)]


class TriggeredTagsFormat(_StructuralFormat, frozen=True, tag="triggered_tags"):
    """Any text; where a trigger comes in it, it begins a tag."""

    triggers: Triggers
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[str] = []


class TagsWithSeparatorFormat(_StructuralFormat, frozen=True, tag="tags_with_separator"):
    """Tags, and nothing but the separator between them."""

    tags: Tags
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstStringFormat
    | JsonSchemaFormat
    | AnyTextFormat
    | GrammarFormat
    | RegexFormat
    | SequenceFormat
    | OrFormat
    | OptionalFormat
    | PlusFormat
    | StarFormat
    | RepeatFormat
    | TagFormat
    | TriggeredTagsFormat
    | TagsWithSeparatorFormat
)


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True):
    """A structural tag of today's form."""

    format: Format
    type: Literal["structural_tag"] = "structural_tag"


class LegacyStructure(msgspec.Struct, frozen=True, kw_only=True):
    """A tag of the older form; without a schema its content is any JSON."""

    begin: str
    end: str
    schema: bool | dict[str, Any] | None = None

    def tag(self) -> TagFormat:
        """Return it as a tag of today's form."""
        schema = True if self.schema is None else self.schema
        return TagFormat(begin=self.begin, content=JsonSchemaFormat(json_schema=schema), end=self.end)


class LegacyStructuralTag(msgspec.Struct, frozen=True, kw_only=True):
    """A structural tag of the older form, which vLLM still takes."""

    structures: Annotated[list[LegacyStructure], Meta(min_length=1, max_length=MAX_PARTS)]
    triggers: Triggers
    type: Literal["structural_tag"] = "structural_tag"

    def format(self) -> TriggeredTagsFormat:
        """Return it as a format of today's form."""
        return TriggeredTagsFormat(triggers=self.triggers, tags=[one.tag() for one in self.structures])
