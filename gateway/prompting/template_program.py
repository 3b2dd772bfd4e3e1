"""A chat template as a program, compiled once as transformers does, for which templates are written."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contracts.errors import ConfigError

# A template is a program that sees what the client sends.
_ERRORS = (
    TemplateError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError, RecursionError,
)  # fmt: skip
_COMMENTS = frozenset(
    {"comment_begin", "comment", "comment_end", "linecomment_begin", "linecomment", "linecomment_end"}
)


class TemplateRefusal(Exception):
    """The template does not show this conversation; the message is the template's own."""


@dataclass(frozen=True)
class TemplateProgram:
    """`names`: the variables that it asks for. `source`: its text without comments."""

    program: Template
    names: frozenset[str]
    source: str

    def render(self, names: Mapping[str, Any]) -> str:
        """Return the text for these variables. Raises TemplateRefusal."""
        try:
            return self.program.render(names)
        except _ERRORS as error:
            raise TemplateRefusal(str(error)) from error


def compile_template(source: str) -> TemplateProgram:
    """Return the program of `source`. Raises ConfigError on a template that does not compile."""
    environment = _environment()
    try:
        names = find_undeclared_variables(environment.parse(source))
        tokens = environment.lex(source)
        text = "".join(value for _, kind, value in tokens if kind not in _COMMENTS)
        return TemplateProgram(environment.from_string(source), frozenset(names), text)
    except _ERRORS as error:
        raise ConfigError(f"the model's chat template does not compile: {error}") from error


class _Generation(Extension):
    """The tag `{% generation %}`, which marks what the assistant says for training; it changes nothing."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return an environment as transformers has it."""
    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
