"""Structural tags, free text of which parts have a form, as a grammar in llguidance's Lark.

vLLM's `structured_outputs.structural_tag` and `response_format` of type `structural_tag`. Free text ends by a lexeme
that is lazy: what ends it belongs to the same rule.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from contracts.errors import RequestError
from gateway.grammar.exact_schema import exact
from gateway.grammar.field_grammar import WHITE_SPACE, FieldGrammar, grammar_of_text, json_grammar
from gateway.grammar.lark_text import terms
from gateway.grammar.string_formats import without_unknown_formats
from gateway.grammar.structural_tag_formats import (
    AnyTextFormat,
    ConstStringFormat,
    Format,
    GrammarFormat,
    JsonSchemaFormat,
    LegacyStructuralTag,
    OptionalFormat,
    OrFormat,
    PlusFormat,
    RegexFormat,
    RepeatFormat,
    SequenceFormat,
    StarFormat,
    StructuralTag,
    TagFormat,
    TagsWithSeparatorFormat,
    TriggeredTagsFormat,
)
from gateway.json_decoding import converted

MAX_DEPTH = 32
"""The most formats in each other."""

Ends = Sequence[str] | None
"""What ends free text: nothing but the answer's end if it is empty; None where it could not be told."""


def structural_tag_grammar(given: dict[str, Any], param: str, token_ids: Mapping[str, int]) -> FieldGrammar:
    """Return the grammar of a structural tag.

    `token_ids`: of markers that a grammar has to name as tokens. Raises RequestError, naming the part at fault.
    """
    wanted, text = _read(given, param), _text_of(given, param)
    marked = {marker: token_id for marker, token_id in token_ids.items() if json.dumps(marker)[1:-1] in text}
    rules = _Rules(marked)
    start = rules.add(wanted, f"{param}.format" if "format" in given else param, ())
    return rules.grammar(start, param)


def _read(given: dict[str, Any], param: str) -> Format:
    try:
        if "structures" in given or "triggers" in given:
            return converted(given, LegacyStructuralTag, param).format()
        return converted(given, StructuralTag, param).format
    except RecursionError as error:
        raise RequestError(f"{param} is nested too deeply", param) from error


def _text_of(given: dict[str, Any], param: str) -> str:
    try:
        return json.dumps(given, ensure_ascii=False)
    except RecursionError as error:
        raise RequestError(f"{param} is nested too deeply", param) from error


class _Rules:
    """The rules of one structural tag so far, and the grammars that they name."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        self._lines: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._parts: list[FieldGrammar] = []
        self._depth = 0
        self._makers: dict[type, Callable[[Any, str, Ends], str]] = {
            ConstStringFormat: self._const,
            JsonSchemaFormat: self._schema,
            AnyTextFormat: self._any_text,
            GrammarFormat: self._sub_grammar,
            RegexFormat: self._regex,
            SequenceFormat: self._sequence,
            OrFormat: self._or,
            OptionalFormat: lambda one, at, ends: self._repeated(one, at, ends, "?"),
            PlusFormat: lambda one, at, ends: self._repeated(one, at, ends, "+"),
            StarFormat: lambda one, at, ends: self._repeated(one, at, ends, "*"),
            RepeatFormat: self._repeat,
            TagFormat: self._tag,
            TriggeredTagsFormat: self._triggered,
            TagsWithSeparatorFormat: self._separated,
        }

    def grammar(self, start: str, param: str) -> FieldGrammar:
        """Return the whole, which begins with the rule `start`."""
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._lines])
        first = {"lark_grammar": lark}
        return FieldGrammar(param, json.dumps({"grammars": [first, *self._grammars]}), tuple(self._parts))

    def add(self, wanted: Format, at: str, ends: Ends) -> str:
        """Return the name of a rule for `wanted` and for what ends it. `at`: where it is in the request."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RequestError(f"{at}: more than {MAX_DEPTH} formats are in each other", at)
        body = self._makers[type(wanted)](wanted, at, ends)
        self._depth -= 1
        return self._rule(body)

    def _rule(self, body: str, lazy: bool = False) -> str:
        name = f"part_{len(self._lines)}"
        self._lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _closed(self, body: str, ends: Ends) -> str:
        """Return `body`, which is no free text, and one of the ends behind it."""
        return f"{body} {self._one_of(ends)}" if ends else body

    def _one_of(self, texts: Sequence[str]) -> str:
        return "(" + " | ".join(terms(text, self._token_ids) or '""' for text in texts) + ")"

    def _text(self, excludes: Sequence[str], most: str = "*") -> str:
        """Return the name of a terminal of any text without `excludes`."""
        name = f"TEXT_{len(self._lines)}"
        without = "".join(f" & {self._without(text)}" for text in excludes if text)
        self._lines.append(f"{name}: /(.|\\n){most}/{without}")
        return name

    def _without(self, text: str) -> str:
        """Return the name of a terminal of all that does not hold `text`."""
        name = f"WITHOUT_{len(self._lines)}"
        self._lines.append(f"HOLDS_{name}: /(.|\\n)*/ {json.dumps(text)} /(.|\\n)*/")
        self._lines.append(f"{name}: ~HOLDS_{name}")
        return name

    def _until(self, text: str, ends: Sequence[str]) -> str:
        """Return the terminal `text` up to the first of `ends`."""
        return "(" + " | ".join(self._head(text, end) for end in ends) + ")"

    def _head(self, text: str, end: str) -> str:
        """Return a rule of `text` up to `end`. A token ends it by itself."""
        is_lazy = not any(marker in end for marker in self._token_ids)
        return self._rule(f"{text} {terms(end, self._token_ids)}", lazy=is_lazy)

    def _const(self, wanted: ConstStringFormat, at: str, ends: Ends) -> str:
        return self._closed(terms(wanted.value, self._token_ids) or '""', ends)

    def _schema(self, wanted: JsonSchemaFormat, at: str, ends: Ends) -> str:
        if wanted.json_schema is False:
            raise RequestError(f"{at}.json_schema: nothing fits false", f"{at}.json_schema")
        schema = {} if wanted.json_schema is True else wanted.json_schema
        schema, space = without_unknown_formats(schema), WHITE_SPACE
        if wanted.max_whitespace_cnt is not None:
            space = {"whitespace_pattern": rf"[ \n\r\t]{{0,{wanted.max_whitespace_cnt}}}"}
        self._parts.append(json_grammar(schema, f"{at}.json_schema", space))
        return self._closed(f"%json {json.dumps(exact(schema) | {'x-guidance': space})}", ends)

    def _any_text(self, wanted: AnyTextFormat, at: str, ends: Ends) -> str:
        most = "*" if wanted.max_chars is None else f"{{0,{wanted.max_chars}}}"
        return self._free(self._text(wanted.excludes, most), at, ends)

    def _free(self, text: str, at: str, ends: Ends) -> str:
        if ends is None or (ends and not all(ends)):
            why = "any text needs an end: let it stand last, or in a tag with an 'end', or before a 'const_string'"
            raise RequestError(f"{at}: {why}", at)
        return self._until(text, ends) if ends else text

    def _sub_grammar(self, wanted: GrammarFormat, at: str, ends: Ends) -> str:
        return self._closed(self._named(grammar_of_text(wanted.grammar, f"{at}.grammar"), f"{at}.grammar"), ends)

    def _regex(self, wanted: RegexFormat, at: str, ends: Ends) -> str:
        return self._closed(self._named(LLMatcher.grammar_from_regex(wanted.pattern), f"{at}.pattern"), ends)

    def _named(self, grammar: str, param: str) -> str:
        """Return how the rules name another grammar, which is checked by itself if the whole does not compile."""
        self._parts.append(FieldGrammar(param, grammar))
        name = f"grammar_{len(self._grammars)}"
        own = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
        self._grammars.append(own | {"name": name})
        return f"@{name}"

    def _sequence(self, wanted: SequenceFormat, at: str, ends: Ends) -> str:
        """Add what stands in a row; a constant text behind free text is its end."""
        names: list[str] = []
        elements, index = wanted.elements, 0
        while index < len(elements):
            place, own = f"{at}.elements[{index}]", elements[index]
            following = elements[index + 1] if index + 1 < len(elements) else None
            if following is None:
                names.append(self.add(own, place, ends))
            elif isinstance(own, AnyTextFormat) and isinstance(following, ConstStringFormat) and following.value:
                names.append(self.add(own, place, [following.value]))
                index += 1
                if index + 1 == len(elements) and ends:
                    names.append(self._one_of(ends))
            else:
                names.append(self.add(own, place, None))
            index += 1
        return " ".join(names) or self._closed('""', ends)

    def _or(self, wanted: OrFormat, at: str, ends: Ends) -> str:
        return " | ".join(self.add(one, f"{at}.elements[{i}]", ends) for i, one in enumerate(wanted.elements))

    def _repeated(
        self, wanted: OptionalFormat | PlusFormat | StarFormat | RepeatFormat, at: str, ends: Ends, times: str
    ) -> str:
        return self._closed(f"({self.add(wanted.content, f'{at}.content', None)}){times}", ends)

    def _repeat(self, wanted: RepeatFormat, at: str, ends: Ends) -> str:
        if 0 <= wanted.max < wanted.min:
            raise RequestError(f"{at}.max is less than 'min'", f"{at}.max")
        most = "" if wanted.max < 0 else wanted.max
        return self._repeated(wanted, at, ends, f"{{{wanted.min},{most}}}")

    def _tag(self, wanted: TagFormat, at: str, ends: Ends, num_given: int = 0) -> str:
        """Add a tag, without the first `num_given` characters of its beginning, which have come already."""
        own = wanted.ends if any(wanted.ends) else ends
        inner = self.add(wanted.content, f"{at}.content", own)
        body = f"{terms(wanted.begin[num_given:], self._token_ids)} {inner}".strip()
        return self._closed(body, ends) if any(wanted.ends) else body

    def _tags(self, tags: Sequence[TagFormat], at: str) -> str:
        names = [self._rule(self._tag(tag, f"{at}.tags[{i}]", None)) for i, tag in enumerate(tags)]
        return "(" + " | ".join(names) + ")"

    def _triggered(self, wanted: TriggeredTagsFormat, at: str, ends: Ends) -> str:
        is_alone = wanted.at_least_one and wanted.stop_after_first
        first = self._tags(wanted.tags, at) if wanted.at_least_one else ""
        if is_alone:
            return self._closed(first, ends)
        text = self._text(wanted.excludes)
        turn = self._rule(" | ".join(self._turns(wanted, at, text)))
        rest = self._free(text, at, ends)
        if wanted.stop_after_first:
            return f"{self._closed(turn, ends)} | {rest}"
        return f"{first} {turn}* {rest}".strip()

    def _turns(self, wanted: TriggeredTagsFormat, at: str, text: str) -> list[str]:
        """Return for each trigger the text before it, itself, and the tags that it begins."""
        by_trigger: dict[str, list[str]] = {}
        for index, tag in enumerate(wanted.tags):
            place = f"{at}.tags[{index}]"
            fitting = [trigger for trigger in wanted.triggers if tag.begin.startswith(trigger)]
            if len(fitting) != 1:
                why = f"begins with {len(fitting)} of the triggers; it must be exactly one"
                raise RequestError(f"{place}.begin {why}", f"{place}.begin")
            rest = self._rule(self._tag(tag, place, None, len(fitting[0])))
            by_trigger.setdefault(fitting[0], []).append(rest)
        return [f"{self._head(text, trigger)} ({' | '.join(rests)})" for trigger, rests in by_trigger.items()]

    def _separated(self, wanted: TagsWithSeparatorFormat, at: str, ends: Ends) -> str:
        one = self._rule(self._tags(wanted.tags, at))
        more = "" if wanted.stop_after_first else f" ({terms(wanted.separator, self._token_ids)} {one})*"
        return self._closed(f"{one}{more}" if wanted.at_least_one else f"({one}{more})?", ends)
