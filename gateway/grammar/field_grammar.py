"""The grammar of one field of a request, and how JSON schemas and texts of grammars become one."""

from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, grammar_from

from contracts.errors import RequestError
from gateway.grammar.exact_schema import exact

MAX_GRAMMAR_CHARS = 64 << 10
"""The longest text of Lark and GBNF.

200 KB of terminals, each made of the next, keep llguidance at work for more than half a minute. Schemas that are too
large it refuses itself.
"""

WHITE_SPACE = {"whitespace_pattern": r"[ \n\r\t]{0,32}"}
"""Between the parts of JSON, for llguidance. There is an end to it, lest a small model fill its answer with nothing."""
NO_WHITE_SPACE = {"whitespace_flexible": False}


@dataclass(frozen=True)
class FieldGrammar:
    """What one field of a request, `param`, asks for.

    Nobody has read it yet: to read some of them ends the process. `parts`: grammars of parts of the field, by which
    the one that is at fault is found.
    """

    param: str
    grammar: str
    parts: tuple["FieldGrammar", ...] = ()


def json_grammar(schema: dict[str, Any], param: str, space: dict[str, Any] = WHITE_SPACE) -> FieldGrammar:
    """Return the grammar of JSON by a schema, with white space as `space` says.

    Raises RequestError, naming `param`, for values that llguidance does not take in.
    """
    try:
        grammar = LLMatcher.grammar_from_json_schema(exact(schema) | {"x-guidance": space})
    except ValueError as error:  # half of a surrogate pair, or an integer of more than 64 bits
        raise RequestError(f"{param} does not compile: {error}", param) from error
    return FieldGrammar(param, grammar)


def grammar_of_text(text: str, param: str) -> str:
    """Return the grammar that a client wrote in Lark or GBNF. Raises RequestError, naming `param`."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"{param} is longer than {MAX_GRAMMAR_CHARS} characters", param)
    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        raise RequestError(f"{param}: {error}", param) from error
