"""The grammar of a request's answers: their format, their calls, behind what the model thinks aloud."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from contracts.errors import RequestError
from gateway.grammar.field_grammar import FieldGrammar
from gateway.grammar.structured_outputs import grammar_of, preceded, schema_of_format
from gateway.prompting.chat_template import Prompting
from gateway.prompting.request_fields import Common
from gateway.reasoning.reasoning_format import GRAMMAR, ReasoningFormat
from gateway.tool_calling.call_grammar import calls_grammar, parameter_grammars
from gateway.tool_calling.tool_choice import Calling


@dataclass(frozen=True)
class AnswerPrefix:
    """What may come before the answer that a grammar is meant for."""

    thinking: ReasoningFormat | None = None
    begun: str = ""

    def allow(self, grammar: str, prompting: Prompting, is_headed: bool = False) -> str:
        """The grammar, of the answer behind the reasoning."""
        if self.thinking is None:
            return grammar
        rules = self.thinking.before_grammar(self.begun, prompting.grammar_ids(self.thinking.markers), is_headed)
        return preceded(rules, GRAMMAR, grammar) if rules else grammar


async def answer_grammar(request: Common, prompting: Prompting, calling: Calling | None, before: AnswerPrefix) -> str:
    """Made and tried on threads: a large schema takes long enough to be seen in the streams of others.

    One that compiled before waits for no trial. Empty if any answer will do.

    Raises RequestError, naming the field, for what can't be obeyed, and Unavailable if there is nobody to try it.
    """
    if request.response_format is None and request.structured_outputs is None and calling is None:
        return ""
    loop = asyncio.get_running_loop()
    whole = await loop.run_in_executor(prompting.compilers, _whole, request, prompting, calling, before)
    if whole.grammar and prompting.trials.known(whole.grammar) != "":
        await loop.run_in_executor(prompting.trials.thread, _try, whole, request, prompting)
    return whole.grammar


@dataclass(frozen=True)
class _Whole:
    """`parts`: what single fields ask for, by which the one that is at fault is found."""

    grammar: str
    parts: Iterable[FieldGrammar] = ()


def _try(whole: _Whole, request: Common, prompting: Prompting) -> None:
    if not (error := prompting.trials.verdict(whole.grammar)):
        return
    for part in whole.parts:  # only now: each takes as long to read as its part of the whole
        if fault := prompting.trials.fault(part.grammar):
            raise RequestError(f"{part.param} does not compile: {fault}", part.param)
    given = {"structured_outputs": request.structured_outputs, "response_format": request.response_format}
    param = next((name for name, value in given.items() if value is not None), "tools")
    raise RequestError(f"{param} can't be obeyed: {error}", param)


def _whole(request: Common, prompting: Prompting, calling: Calling | None, before: AnswerPrefix) -> _Whole:
    wanted = grammar_of(request.response_format, request.structured_outputs, prompting.marker_ids)
    given = [] if wanted is None else [*wanted.parts, wanted]
    alone = _Whole("" if wanted is None else before.allow(wanted.grammar, prompting), given)
    if calling is None:
        return alone
    if (form := prompting.tool_form) is None:
        why = "this model's chat template writes tool calls in an unknown form; TANDEM_TOOL_PARSER can name one"
        raise RequestError(why, "tools")
    if given and calling.must:
        param = "structured_outputs" if request.structured_outputs else "response_format"
        raise RequestError(f"'{param}' and a 'tool_choice' that asks for a call exclude each other", param)
    if request.structured_outputs is not None or _is_structural(request):
        return alone
    answer = schema_of_format(request.response_format)
    calls = calls_grammar(calling, form, prompting.grammar_ids(form.markers), answer)
    if not calls:
        return alone
    return _Whole(before.allow(calls, prompting, is_headed=True), chain(given, parameter_grammars(calling)))


def _is_structural(request: Common) -> bool:
    return request.response_format is not None and request.response_format.structural_tag is not None
