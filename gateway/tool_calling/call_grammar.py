"""The grammar of answers that have to call, or whose calls obey their schemas, in llguidance's Lark."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher

from contracts.errors import RequestError
from gateway.grammar.exact_schema import exact
from gateway.grammar.field_grammar import NO_WHITE_SPACE, WHITE_SPACE, FieldGrammar, json_grammar
from gateway.grammar.json_quoted_lark import json_quoted
from gateway.grammar.lark_text import terms
from gateway.grammar.string_formats import without_unknown_formats
from gateway.tool_calling.custom_tools import INPUT, PARAMETERS
from gateway.tool_calling.tool_choice import Calling, CustomFunction, Function, schema_of
from gateway.tool_calling.tool_format import ToolFormat

_CALL_STYLE = NO_WHITE_SPACE | {"item_separator": ", ", "key_separator": ": "}
"""The spaces that chat templates show in earlier calls."""
_DEFINITION = "custom.format.grammar.definition"


def calls_grammar(
    calling: Calling,
    form: ToolFormat,
    token_ids: Mapping[str, int],
    answer: dict[str, Any] | None = None,
) -> str:
    """Return the grammar of an answer that may call, or has to.

    It is empty if nothing has to be enforced, or nothing can be since calls that may come begin without a marker.
    `token_ids`: of those markers that a grammar has to name as tokens. `answer`: schema of an answer that does not
    call. Nobody has read it yet.
    """
    is_bound = answer is not None or any(map(_is_bound, calling.functions.values()))
    if not calling.must and not (is_bound and (form.begin + form.before).startswith(form.parser.opening)):
        return ""
    is_amid_text = answer is None and not calling.must and not form.answer
    begin = _amid_text(form, token_ids) if is_amid_text else _alone(calling, form, token_ids, answer)
    # In free text each marker begins calls anew, so that a join with one in it would only compete with the text.
    joins = calling.in_parallel and form.join and not (is_amid_text and form.parser.opening in form.join)
    more = f" ({terms(form.join, token_ids)} call)*" if joins else ""
    one = " | ".join(f"call_{index}" for index in calling.functions)
    calls = [_call(index, function, calling.must, form, token_ids) for index, function in calling.functions.items()]
    lark = "\n".join(["%llguidance {}", *begin, f"calls: call{more}", f"call: {one}", *calls])
    inputs = [
        {"name": f"input_{index}", "lark_grammar": _quoted(grammar, index)}
        for index, function in calling.functions.items()
        if (grammar := _lark_of(function)) is not None
    ]
    return json.dumps({"grammars": [{"lark_grammar": lark}, *inputs]}) if inputs else LLMatcher.grammar_from_lark(lark)


def parameter_grammars(calling: Calling) -> Iterator[FieldGrammar]:
    """Yield the grammar of each function's arguments alone, by which the function at fault is found.

    Raises RequestError, naming the tool, for values that llguidance does not take in.
    """
    for index, function in calling.functions.items():
        if isinstance(function, CustomFunction) and (given := function.input_grammar) is not None:
            is_lark, param = given.syntax == "lark", f"tools[{index}].{_DEFINITION}"
            own = LLMatcher.grammar_from_lark if is_lark else LLMatcher.grammar_from_regex
            yield FieldGrammar(param, own(given.definition))
            continue
        yield json_grammar(_enforced(function, calling.must), f"tools[{index}].function.parameters")


def _is_bound(function: Function) -> bool:
    """Return whether the arguments are held to something even if no call has to come."""
    return bool(function.strict) or (isinstance(function, CustomFunction) and function.input_grammar is not None)


def _lark_of(function: Function) -> str | None:
    """Return the grammar in Lark of a custom tool's input, if it has one."""
    given = function.input_grammar if isinstance(function, CustomFunction) else None
    return given.definition if given is not None and given.syntax == "lark" else None


def _quoted(grammar: str, index: int) -> str:
    param = f"tools[{index}].{_DEFINITION}"
    try:
        return json_quoted(grammar)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param} can't be enforced: {error}", param) from error


def _enforced(function: Function, must: bool) -> dict[str, Any]:
    schema = schema_of(function) if must or _is_bound(function) else {"type": "object"}
    if isinstance(function, CustomFunction) and (given := function.input_grammar) is not None:
        schema = PARAMETERS | {"properties": {INPUT: {"type": "string", "pattern": f"^(?:{given.definition})$"}}}
    if not function.strict:
        schema = without_unknown_formats(schema)
    return exact(schema) | {"x-guidance": _CALL_STYLE}


def _alone(
    calling: Calling, form: ToolFormat, token_ids: Mapping[str, int], answer: dict[str, Any] | None
) -> list[str]:
    """Nothing but calls, or else an answer, which obeys its schema if it has one."""
    start = f"start: {terms(form.begin, token_ids)} calls {terms(form.end, token_ids)}"
    if calling.must:
        return [start]
    said = "said: /(.|\\n)*/"
    if answer is not None:
        said = f"said: %json {json.dumps(exact(answer) | {'x-guidance': WHITE_SPACE})}"
    return [f"{start} | answer", f"answer: {terms(form.answer, token_ids)} said", said]


def _amid_text(form: ToolFormat, token_ids: Mapping[str, int]) -> list[str]:
    """Any text, but behind the marker calls."""
    marker = form.parser.opening
    rest, end = terms(form.begin.removeprefix(marker), token_ids), terms(form.end, token_ids)
    begun = f"TEXT {terms(marker, token_ids)}"
    head = f"head: {begun}" if marker in token_ids else f"head[lazy]: {begun}"
    return ["start: turn* said", "said: TEXT", "TEXT: /(.|\\n)*/", head, f"turn: head {rest} calls {end}"]


def _call(index: int, function: Function, must: bool, form: ToolFormat, token_ids: Mapping[str, int]) -> str:
    before, after = terms(form.before + function.name + form.between, token_ids), terms(form.after, token_ids)
    if _lark_of(function) is not None:
        opening, closing = json.dumps(f'{{"{INPUT}": "'), json.dumps('"}')
        arguments = f"{opening} @input_{index} {closing}"
    else:
        arguments = f"%json {json.dumps(_enforced(function, must))}"
    return f"call_{index}: {before} args_{index} {after}\nargs_{index}: {arguments}"
