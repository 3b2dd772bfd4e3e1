"""What the client said, as token ids."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Annotated, Any, ClassVar, NoReturn, Protocol, TypeVar

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from checkpoint import Checkpoint
from contracts.errors import ConfigError, RequestError
from gateway.api.openai.schema import Message
from gateway.grammar.compile_sandbox import CompileSandbox
from gateway.json_decoding import words_of
from gateway.reasoning.registry import thinking_of
from gateway.tokenization.detokenizer import Detokenizer
from gateway.tokenization.token_bytes import REPLACEMENT, raw_bytes
from gateway.tool_calling.made_arguments import arguments_of, is_text
from gateway.tool_calling.registry import ParserName, form_of, knows_tools
from gateway.tool_calling.tool_choice import MadeCall, Tool, described
from gateway.tool_calling.tool_prompt import plain_messages
from process.deep_stack_threads import DeepThreads

T = TypeVar("T")

LONG_CHARS = 20_000  # above, tokenizing takes longer than handing it to a thread
HUGE_CHARS = 1_000_000
"""Above, one at a time: tokenizing takes more than 100 bytes of memory for each of its characters."""

_PARTS = {"text": "text", "refusal": "refusal"}
_MARK = "Here-the-Answer-goes-on "  # which a template that strips shows without its space
_TAKES_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+\w+(?:\.content\b|\[\s*['\"]content['\"]\s*\])")
"""A loop over the parts of a message, of which the template says itself how they follow each other."""

# A template is a program that sees what the client sends.
_TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError, RecursionError,
)  # fmt: skip


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
    def tools(self) -> Sequence[Tool] | None: ...

    @property
    def reasoning_effort(self) -> str | None: ...


@dataclass(frozen=True)
class CompiledTemplate:
    """`names`: what it asks for. `joint`: between the parts of a message, as vLLM has them."""

    program: Template
    names: set[str]
    knows_tools: bool
    joint: str


class Prompting:
    """Templates and tokenizer of one model. Raises ConfigError on a template that does not compile.

    `tool_form`: how the model writes calls, `thinking`: how it thinks aloud; None if that is not known. `compilers`:
    threads that make grammars of what clients ask for, `trials`: where each is compiled first.
    """

    def __init__(self, checkpoint: Checkpoint, tool_parser: ParserName = "auto") -> None:
        self.tokenizer: Tokenizer = checkpoint.tokenizer()
        self.vocab_size, self.advice = checkpoint.config.vocab_size, checkpoint.advice
        self._specials = {"bos_token": checkpoint.bos_token or "", "eos_token": checkpoint.eos_token or ""}
        self._token_texts: dict[int, str] = {}
        self.compilers, self.trials = DeepThreads(4, "grammar"), CompileSandbox(checkpoint)
        self._huge = ThreadPoolExecutor(1, "huge-prompt")
        self._longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)
        added = self.tokenizer.get_added_tokens_decoder().items()
        self._special_ids = {token.content: token_id for token_id, token in added if token.special}
        self._grammar_ids = {
            token.content: token_id for token_id, token in added if token.special or _is_bracketed(token.content)
        }
        self.thinking = thinking_of(checkpoint.chat_template or "", self._special_ids)
        own_calls = self.thinking.calls if self.thinking is not None else None
        with_tools = checkpoint.tool_template or checkpoint.chat_template
        self.tool_form = own_calls or form_of(with_tools or "", tool_parser)
        self._template, self._tool_template = map(_compiled, (checkpoint.chat_template, with_tools))

    def close(self) -> None:
        """What has not begun will not: else the process would stay until it is done."""
        for threads in (self.compilers, self.trials.thread, self._huge):
            threads.shutdown(wait=False, cancel_futures=True)
        self.trials.close()

    def least_tokens(self, text: str) -> int:
        """No fewer can spell it: none is longer than the longest."""
        return -(-len(text) // self._longest_token)

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return await self._aside(texts, lambda: [self._encode(text, add_special_tokens) for text in texts])

    async def decode(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Special tokens too."""
        return await self._aside(prompts, lambda: self.tokenizer.decode_batch(prompts, skip_special_tokens=False))

    async def offsets(self, prompts: Sequence[Sequence[int]], texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Where the text of each token begins in its prompt's text, which is the tokens' own but for what begins every
        prompt.
        """
        return await self._aside(texts, lambda: list(map(self._offsets, prompts, texts)))

    def render(self, request: Conversation) -> str:
        """The conversation as the model was trained to see it. Raises RequestError."""
        messages, given = request.messages or [], request.chat_template_kwargs or {}
        is_open = bool(request.continue_final_message)
        if is_open and request.add_generation_prompt:
            why = "'continue_final_message' and 'add_generation_prompt' exclude each other"
            raise RequestError(why, "continue_final_message")
        if (template := self._template_of(request)) is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        plain = [self._plain(index, message, template.joint) for index, message in enumerate(messages)]
        needs_all_fields = self.tool_form is not None and self.tool_form.needs_all_fields
        tools = [described(tool, needs_all_fields) for tool in request.tools or ()]
        if not template.knows_tools and self.tool_form is not None:
            plain, tools = plain_messages(plain, tools, self.tool_form), []
        try:
            opens_answer = request.add_generation_prompt is not False and not is_open
            names = {"tools": tools or None, "documents": None, "add_generation_prompt": opens_answer} | self._specials
            names |= self._effort(request.reasoning_effort, given, template.names)
            if taken := sorted(given.keys() & {"messages", *names}):
                raise RequestError(f"chat_template_kwargs: '{taken[0]}' is not for you to set", "chat_template_kwargs")
            shown = _marked(plain) if is_open else plain
            text = template.program.render(names | given, messages=shown)
            return _cut_at_mark(text, plain[-1]["content"]) if is_open else text
        except _TEMPLATE_ERRORS as error:
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error

    def begun(self, request: Conversation, prompt: str) -> str:
        """What `prompt`, which is `request` rendered, has begun of the answer, as `thinking` knows it."""
        if self.thinking is None:
            return ""
        if not request.continue_final_message:
            return self.thinking.begun(prompt, "")
        last, template = (request.messages or [])[-1], self._template_of(request)
        if last.role != "assistant" or template is None:
            return ""
        return self.thinking.begun(prompt, _plain(0, last, template.joint)["content"])

    def special_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Of those texts that are special tokens."""
        return {text: self._special_ids[text] for text in texts if text in self._special_ids}

    def grammar_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Of those texts that no text in a grammar matches, since they are tokens: special ones, and for llguidance
        also those in angle brackets that a tokenizer adds as plain ones, such as Qwen 3's tags.
        """
        return {text: self._grammar_ids[text] for text in texts if text in self._grammar_ids}

    def token_text(self, token_id: int) -> str:
        """Amid others: SentencePiece shows the space of a token that begins a text to nobody."""
        text = self._token_texts.get(token_id)
        if text is None:
            alone, twice = (self.tokenizer.decode([token_id] * times, skip_special_tokens=False) for times in (1, 2))
            text = self._token_texts[token_id] = alone if REPLACEMENT in alone else twice[len(alone) :]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; of a character that spans tokens, its own bytes only."""
        text = self.token_text(token_id)
        raw = self.tokenizer.id_to_token(token_id)
        return raw_bytes(raw) if REPLACEMENT in text and raw is not None else text.encode()

    async def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as the tokens that begin a text with it, and those that follow a space."""
        both = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
        return tuple(dict.fromkeys(tuple(ids) for ids in await self.encode(both, add_special_tokens=False) if ids))

    def require_known(self, token_ids: Sequence[int], param: str) -> None:
        """Raises RequestError on an id outside of the vocabulary."""
        if token_ids and not 0 <= max(token_ids) < self.vocab_size:
            raise RequestError(f"{param}: token id {max(token_ids)} is not below {self.vocab_size}", param)

    def known_ids(self, value: Any) -> list[int] | None:
        """Token ids of the vocabulary; None for whatever else, and for ids that need a closer look, as 1.0 does.

        In one pass: to look at the types and bounds of 8192 ids one after the other held all other answers up by more
        than a millisecond.
        """
        try:
            return msgspec.convert(value, list[Annotated[int, msgspec.Meta(ge=0, lt=self.vocab_size)]])
        except msgspec.ValidationError:
            return None

    async def _aside(self, prompts: Sequence[Sized], work: Callable[[], T]) -> T:
        """On a thread if they are long together."""
        length = sum(map(len, prompts))
        if length < LONG_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._huge if length > HUGE_CHARS else None, work)

    def _template_of(self, request: Conversation) -> CompiledTemplate | None:
        return self._tool_template if request.tools else self._template

    def _plain(self, index: int, message: Message, joint: str) -> dict[str, Any]:
        """With what the assistant thought, if the model's template may know what to do with it."""
        plain, thought = _plain(index, message, joint), message.reasoning or message.reasoning_content
        if not thought or message.role != "assistant" or self.thinking is None:
            return plain
        return self.thinking.remembered(plain, thought)

    def _effort(self, effort: str | None, given: Mapping[str, Any], asked: set[str]) -> dict[str, Any]:
        """Return what the template is told: any effort but none switches thinking on where it can be switched. A model
        that does not think is told nothing, as with vLLM: clients with one setting for all models send it to all.
        """
        if effort is None:
            return {}
        names = {"reasoning_effort": effort}
        if "enable_thinking" not in given:
            names |= {"enable_thinking": effort != "none"}
        known = self.thinking.efforts if self.thinking is not None else ()
        if known and effort not in known:
            why = f"this model knows no 'reasoning_effort' of {effort}, only {', '.join(known)}"
            raise RequestError(why, "reasoning_effort")
        return {name: value for name, value in names.items() if name in asked}

    def _offsets(self, token_ids: Sequence[int], text: str) -> tuple[int, ...]:
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=False)
        lengths = [len(detokenizer.push(token_id)) for token_id in token_ids]
        whole = sum(lengths) + len(detokenizer.flush())
        starts = accumulate(lengths, initial=min(len(text) - whole, 0))
        return tuple(max(start, 0) for start, _ in zip(starts, lengths, strict=False))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # As a batch: only so the tokenizer lets go of the interpreter, and others' streams go on; as with decode.
        return self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids


def _compiled(source: str | None) -> CompiledTemplate | None:
    if source is None:
        return None
    environment = _environment()
    try:
        asked = find_undeclared_variables(environment.parse(source))
        joint = "" if _TAKES_PARTS.search(source) else "\n"
        return CompiledTemplate(environment.from_string(source), asked, knows_tools(source), joint)
    except _TEMPLATE_ERRORS as error:
        raise ConfigError(f"the model's chat template does not compile: {error}") from error


def _is_bracketed(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")


def _plain(index: int, message: Message, joint: str) -> dict[str, Any]:
    at = f"messages[{index}]"
    if message.function_call is not None:
        raise RequestError("'function_call' is not supported; use 'tool_calls' instead", f"{at}.function_call")
    if message.tool_calls and message.role != "assistant":
        raise RequestError("only a message of the assistant has 'tool_calls'", f"{at}.tool_calls")
    if message.role == "tool" and not message.tool_call_id:
        raise RequestError("a message of role 'tool' needs 'tool_call_id'", f"{at}.tool_call_id")
    content = "" if message.content is None and message.role == "assistant" else message.content
    if isinstance(content, list):
        content = joint.join(words_of(part, _PARTS, f"{at}.content[{number}]") for number, part in enumerate(content))
    if content is None:
        raise RequestError("a message needs 'content'", f"{at}.content")
    calls = [_made(call, f"{at}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls or ())]
    said = msgspec.structs.replace(message, tool_calls=None, reasoning=None, reasoning_content=None)
    plain = msgspec.to_builtins(said) | {"content": content}
    return plain | ({"tool_calls": calls} if calls else {})


def _made(call: MadeCall, param: str) -> dict[str, Any]:
    """Return the call as chat templates know one: with arguments that are an object."""
    given, at = call.function.arguments, f"{param}.function.arguments"
    arguments = arguments_of(given) if isinstance(given, str) else given
    if not is_text(arguments):
        raise RequestError(f"{at} has half of a surrogate pair in it, which is no text", at)
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


def _marked(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With a mark where the last message ends: its own text may well be in what the template puts after it."""
    *others, last = messages
    return [*others, last | {"content": last["content"] + _MARK}]


def _cut_at_mark(text: str, final: str) -> str:
    """Without what the template puts after the last message. Templates may strip a message."""
    at = text.rfind(_MARK.strip())
    if at < 0:
        raise RequestError("the chat template does not show the last message as it is", "continue_final_message")
    return text[:at] if text.startswith(_MARK, at) else text[:at].removesuffix(final[len(final.rstrip()) :])


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says, for those who train on it; here it changes nothing."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers has it, for which templates are written."""
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
    """Unlike jinja's own: no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
