"""A conversation as the model was trained to see it.

The template is the checkpoint's, or the one that an operator gave (gateway.model_overrides).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from checkpoint import Checkpoint
from contracts.errors import RequestError
from gateway.grammar.compile_sandbox import CompileSandbox
from gateway.prompting.dropped_text_check import SentText, first_lost, sent_texts
from gateway.prompting.message_rewriting import (
    foldings,
    with_known_roles,
    with_single_calls,
    with_text_apart,
    with_text_later,
)
from gateway.prompting.plain_messages import PlainMessage, plain_message
from gateway.prompting.request_fields import Message
from gateway.prompting.template_features import TemplateFeatures, probe
from gateway.prompting.template_program import TemplateProgram, TemplateRefusal, compile_template
from gateway.reasoning.reasoning_format import ReasoningFormat
from gateway.reasoning.registry import thinking_of
from gateway.tokenization.tokenizer import PromptTokenizer
from gateway.tool_calling.registry import ParserName, form_of
from gateway.tool_calling.tool_choice import AnyTool, described
from gateway.tool_calling.tool_format import ToolFormat
from gateway.tool_calling.tool_prompt import plain_messages
from process.deep_stack_threads import DeepThreads

_MARK = "Here-the-Answer-goes-on "  # which a template that strips shows without its space


class Conversation(Protocol):
    """What the template needs of a request."""

    @property
    def messages(self) -> Sequence[Message] | None: ...

    @property
    def add_generation_prompt(self) -> bool | None: ...

    @property
    def continue_final_message(self) -> bool | None: ...

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...

    @property
    def tools(self) -> Sequence[AnyTool] | None: ...

    @property
    def reasoning_effort(self) -> str | None: ...


@dataclass(frozen=True)
class RenderedPrompt:
    """The text of a conversation, and what it has begun of the answer as ReasoningFormat knows it."""

    text: str
    begun: str


class ChatTemplate:
    """One template of a model.

    `names`: the texts of special tokens, by the variables that templates know them by. `thinking`, `tool_format`: how
    the model thinks aloud and how it writes calls; None if that is not known.
    """

    def __init__(
        self,
        program: TemplateProgram,
        features: TemplateFeatures,
        names: Mapping[str, str],
        thinking: ReasoningFormat | None,
        tool_format: ToolFormat | None,
    ) -> None:
        self._program, self._features, self._names = program, features, dict(names)
        self._thinking, self._tool_format = thinking, tool_format

    def render(self, request: Conversation) -> RenderedPrompt:
        """Return the prompt. Raises RequestError, also if a text of the client is not in it."""
        given, is_open = request.chat_template_kwargs or {}, bool(request.continue_final_message)
        plain = [
            plain_message(index, message, self._features.part_separator)
            for index, message in enumerate(request.messages or ())
        ]
        if is_open:
            _require_open_end(request, plain)
        needs_all_fields = self._tool_format is not None and self._tool_format.needs_all_fields
        tools = [described(tool, needs_all_fields) for tool in request.tools or ()]
        messages, shown_tools = with_known_roles(plain, self._features), tools
        if not self._features.tools and self._tool_format is not None:
            messages, shown_tools = plain_messages(messages, tools, self._tool_format), []
        names = {"tools": shown_tools or None, "documents": None} | self._names
        names["add_generation_prompt"] = request.add_generation_prompt is not False and not is_open
        names |= self._effort(request.reasoning_effort, given)
        if taken := sorted(given.keys() & {"messages", *names}):
            raise RequestError(f"chat_template_kwargs: '{taken[0]}' is not for you to set", "chat_template_kwargs")
        text = self._first_whole(messages, names | given, _sent(plain, tools, self._thinking), is_open)
        return RenderedPrompt(text, self._begun(text, plain[-1] if is_open else None))

    def _begun(self, text: str, final: PlainMessage | None) -> str:
        """Return what a prompt has begun of the answer. `final`: the message that the answer goes on with."""
        if self._thinking is None or (final is not None and final["role"] != "assistant"):
            return ""
        return self._thinking.begun(text, "" if final is None else final["content"])

    def _first_whole(
        self, messages: Sequence[PlainMessage], names: dict[str, Any], sent: Sequence[SentText], is_open: bool
    ) -> str:
        """Return the prompt of the first way to put the conversation that shows all of it."""
        faults: list[RequestError] = []
        for way in self._ways(messages):
            if is_open and way[-1]["content"] != messages[-1]["content"]:
                continue
            shown = self._thoughtful(_marked(way) if is_open else way)
            try:
                text = self._program.render(names | {"messages": shown})
            except TemplateRefusal as refusal:
                faults.append(RequestError(f"the chat template refuses these messages: {refusal}", "messages"))
                continue
            if (lost := first_lost(sent, text)) is None:
                return _cut_at_mark(text, way[-1]["content"]) if is_open else text
            faults.append(RequestError(f"{lost.param}: this model's chat template does not show it", lost.param))
        raise faults[0]

    def _ways(self, messages: Sequence[PlainMessage]) -> Iterator[Sequence[PlainMessage]]:
        """Yield the conversation as it is, then as it can also be put, as far as the template may need that."""
        if not self._features.several_calls:
            messages = with_single_calls(messages)
        both = [message for message in messages if "tool_calls" in message and message["content"]]
        if self._features.text_beside_calls or not both or any("reasoning" in message for message in both):
            yield from foldings(messages)
        if both:
            yield from foldings(with_text_apart(messages))
            yield from foldings(with_text_later(messages))

    def _thoughtful(self, messages: Sequence[PlainMessage]) -> list[PlainMessage]:
        """Return the messages with what the assistant thought as the template knows it, if it may."""
        return [
            message
            if (thought := message.get("reasoning")) is None
            else self._thinking.remembered(_without_reasoning(message), thought)
            if self._thinking is not None
            else _without_reasoning(message)
            for message in messages
        ]

    def _effort(self, effort: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the template is told: any effort but none switches thinking on where it can be switched.

        A model that does not think is told nothing, as with vLLM: clients with one setting for all models send it to
        all.
        """
        if effort is None:
            return {}
        names = {"reasoning_effort": effort}
        if "enable_thinking" not in given:
            names |= {"enable_thinking": effort != "none"}
        known = self._thinking.efforts if self._thinking is not None else ()
        if known and effort not in known:
            why = f"this model knows no 'reasoning_effort' of {effort}, only {', '.join(known)}"
            raise RequestError(why, "reasoning_effort")
        return {name: value for name, value in names.items() if name in self._program.names}


def _without_reasoning(message: PlainMessage) -> PlainMessage:
    return {name: value for name, value in message.items() if name != "reasoning"}


def _sent(
    messages: Sequence[PlainMessage], tools: Sequence[dict[str, Any]], thinking: ReasoningFormat | None
) -> list[SentText]:
    """Return what of a request the prompt has to show."""
    texts = sent_texts(messages, thinking.thought_end if thinking is not None else "")
    names = (tool["function"]["name"] for tool in tools)
    return [*texts, *(SentText(f"tools[{index}]", name, is_loose=True) for index, name in enumerate(names))]


def _require_open_end(request: Conversation, messages: Sequence[PlainMessage]) -> None:
    """Raise RequestError if there is no last message that an answer could go on with."""
    if request.add_generation_prompt:
        why = "'continue_final_message' and 'add_generation_prompt' exclude each other"
        raise RequestError(why, "continue_final_message")
    if "tool_calls" in messages[-1]:
        why = "'continue_final_message' can't go on with a message that has 'tool_calls'"
        raise RequestError(why, f"messages[{len(messages) - 1}].tool_calls")


def _marked(messages: Sequence[PlainMessage]) -> list[PlainMessage]:
    """Return the messages with a mark where the last ends: its text may also be in what comes behind."""
    *others, last = messages
    return [*others, last | {"content": last["content"] + _MARK}]


def _cut_at_mark(text: str, final: str) -> str:
    """Return `text` without what the template puts after the last message. Templates may strip a message."""
    at = text.rfind(_MARK.strip())
    if at < 0:
        raise RequestError("the chat template does not show the last message as it is", "continue_final_message")
    return text[:at] if text.startswith(_MARK, at) else text[:at].removesuffix(final[len(final.rstrip()) :])


class Prompting(PromptTokenizer):
    """The tokenizer and the chat templates of one model.

    Raises ConfigError on a template that does not compile.

    `tool_form`: how the model writes calls, `thinking`: how it thinks aloud; None if that is not known. `compilers`:
    threads that make grammars of what clients ask for, `trials`: where each is compiled first.
    """

    def __init__(self, checkpoint: Checkpoint, tool_parser: ParserName = "auto") -> None:
        super().__init__(checkpoint)
        self.compilers, self.trials = DeepThreads(4, "grammar"), CompileSandbox(checkpoint)
        names = {"bos_token": checkpoint.bos_token or "", "eos_token": checkpoint.eos_token or ""}
        sources = (checkpoint.chat_template, checkpoint.tool_template or checkpoint.chat_template)
        plain, with_tools = (None if source is None else _probed(source, names) for source in sources)
        self.thinking = None if plain is None else thinking_of(plain[0].source, self.special_tokens)
        self.tool_form = _tool_format(with_tools, self.thinking, tool_parser)
        self._template, self._tool_template = (
            None if probed is None else ChatTemplate(*probed, names, self.thinking, self.tool_form)
            for probed in (plain, with_tools)
        )

    def close(self) -> None:
        """End the threads and the process; what has not begun will not, else the process would stay for it."""
        super().close()
        for threads in (self.compilers, self.trials.thread):
            threads.shutdown(wait=False, cancel_futures=True)
        self.trials.close()

    def render(self, request: Conversation) -> str:
        """Return the conversation as the model was trained to see it. Raises RequestError."""
        return self.rendered(request).text

    def rendered(self, request: Conversation) -> RenderedPrompt:
        """Return the conversation with what it has begun of the answer. Raises RequestError."""
        return self._template_of(request).render(request)

    def _template_of(self, request: Conversation) -> ChatTemplate:
        if (template := self._tool_template if request.tools else self._template) is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        return template


def _probed(source: str, names: dict[str, str]) -> tuple[TemplateProgram, TemplateFeatures]:
    program = compile_template(source)
    return program, probe(program, names)


def _tool_format(
    template: tuple[TemplateProgram, TemplateFeatures] | None, thinking: ReasoningFormat | None, parser: ParserName
) -> ToolFormat | None:
    """Return how calls are written; None if the template knows tools in an unknown form."""
    if thinking is not None and thinking.calls is not None:
        return thinking.calls
    if template is None:
        return form_of("", parser, shows_tools=False)
    program, features = template
    known = form_of(program.source, parser, features.tools)
    return known if known is None or features.several_calls else replace(known, join="")
