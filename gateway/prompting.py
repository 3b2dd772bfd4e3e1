"""What the client said, as token ids."""

import asyncio
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from checkpoint import Checkpoint
from contracts.errors import ConfigError, RequestError
from gateway.detokenizer import Detokenizer
from gateway.schema import Message
from gateway.token_bytes import REPLACEMENT, raw_bytes
from gateway.tools.forms import ParserName, form_of, knows_tools
from gateway.tools.parser import object_of
from gateway.tools.request import MadeCall, Tool, described
from gateway.tools.telling import told

T = TypeVar("T")

LONG_CHARS = 20_000  # above, tokenizing takes longer than handing it to a thread


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


class Prompting:
    """Templates and tokenizer of one model. Raises ConfigError on a template that does not compile.

    `tool_form`: how the model writes calls; None if that is not known.
    """

    def __init__(self, checkpoint: Checkpoint, tool_parser: ParserName = "auto") -> None:
        self.tokenizer: Tokenizer = checkpoint.tokenizer()
        self.vocab_size = checkpoint.config.vocab_size
        self._specials = {"bos_token": checkpoint.bos_token or "", "eos_token": checkpoint.eos_token or ""}
        self._token_texts: dict[int, str] = {}
        self.tool_form = form_of(checkpoint.chat_template or "", tool_parser)
        self._knows_tools = knows_tools(checkpoint.chat_template or "")
        added = self.tokenizer.get_added_tokens_decoder().items()
        self._special_ids = {token.content: token_id for token_id, token in added if token.special}
        try:
            source = checkpoint.chat_template
            self._template = None if source is None else _environment().from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return await _aside(texts, lambda: [self._encode(text, add_special_tokens) for text in texts])

    async def offsets(self, prompts: Sequence[Sequence[int]], texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Where the text of each token begins in its prompt's text, which is the tokens' own but for what begins every
        prompt.
        """
        return await _aside(texts, lambda: list(map(self._offsets, prompts, texts)))

    def render(self, request: Conversation) -> str:
        """The conversation as the model was trained to see it. Raises RequestError."""
        messages, given = request.messages or [], request.chat_template_kwargs or {}
        is_open = bool(request.continue_final_message)
        if is_open and request.add_generation_prompt:
            why = "'continue_final_message' and 'add_generation_prompt' exclude each other"
            raise RequestError(why, "continue_final_message")
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        plain = [_plain(index, message) for index, message in enumerate(messages)]
        tools = [described(tool) for tool in request.tools or ()]
        if not self._knows_tools and self.tool_form is not None:
            plain, tools = told(plain, tools, self.tool_form), []
        try:
            opens_answer = request.add_generation_prompt is not False and not is_open
            names = {"tools": tools or None, "documents": None, "add_generation_prompt": opens_answer} | self._specials
            if taken := sorted(given.keys() & {"messages", *names}):
                raise RequestError(f"chat_template_kwargs: '{taken[0]}' is not for you to set", "chat_template_kwargs")
            text = self._template.render(names | given, messages=plain)
            return _cut_after(text, plain[-1]["content"]) if is_open else text
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error

    def special_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Of those texts that are special tokens."""
        return {text: self._special_ids[text] for text in texts if text in self._special_ids}

    def token_text(self, token_id: int) -> str:
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; of a character that spans tokens, its own bytes only."""
        text = self.token_text(token_id)
        raw = self.tokenizer.id_to_token(token_id)
        return raw_bytes(raw) if REPLACEMENT in text and raw is not None else text.encode()

    def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as the tokens that begin a text with it, and those that follow a space."""
        both = (
            self._encode(prefix + word.lstrip(), add_special_tokens=False) for word in words for prefix in ("", " ")
        )
        return tuple(dict.fromkeys(tuple(ids) for ids in both if ids))

    def require_known(self, token_ids: Sequence[int], param: str) -> None:
        """Raises RequestError on an id outside of the vocabulary."""
        if token_ids and not 0 <= max(token_ids) < self.vocab_size:
            raise RequestError(f"{param}: token id {max(token_ids)} is not below {self.vocab_size}", param)

    def _offsets(self, token_ids: Sequence[int], text: str) -> tuple[int, ...]:
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=False)
        lengths = [len(detokenizer.push(token_id)) for token_id in token_ids]
        whole = sum(lengths) + len(detokenizer.flush())
        starts = accumulate(lengths, initial=min(len(text) - whole, 0))
        return tuple(max(start, 0) for start, _ in zip(starts, lengths, strict=False))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # As a batch: only so the tokenizer lets go of the interpreter, and others' streams go on.
        return self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids


async def _aside(texts: Sequence[str], work: Callable[[], T]) -> T:
    """On a thread if they are long together."""
    return work() if sum(map(len, texts)) < LONG_CHARS else await asyncio.to_thread(work)


def _plain(index: int, message: Message) -> dict[str, Any]:
    at = f"messages[{index}]"
    if message.tool_calls and message.role != "assistant":
        raise RequestError("only a message of the assistant has 'tool_calls'", f"{at}.tool_calls")
    if message.role == "tool" and not message.tool_call_id:
        raise RequestError("a message of role 'tool' needs 'tool_call_id'", f"{at}.tool_call_id")
    content = "" if message.content is None and message.role == "assistant" else message.content
    if isinstance(content, list):
        content = "".join(_part(part, f"{at}.content[{number}]") for number, part in enumerate(content))
    if content is None:
        raise RequestError("a message needs 'content'", f"{at}.content")
    calls = [_made(call, f"{at}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls or ())]
    plain = msgspec.to_builtins(msgspec.structs.replace(message, tool_calls=None)) | {"content": content}
    return plain | ({"tool_calls": calls} if calls else {})


def _made(call: MadeCall, param: str) -> dict[str, Any]:
    """As chat templates know calls: with arguments that are an object."""
    given, at = call.function.arguments, f"{param}.function.arguments"
    arguments = object_of(given or "{}") if isinstance(given, str) else given
    if arguments is None or not _is_text(arguments):
        raise RequestError(f"{at} must be a JSON object, written as a string", at)
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


def _is_text(value: Any) -> bool:
    """Not so if half of a surrogate pair is in it, which JSON can spell and no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _cut_after(text: str, final: str) -> str:
    """Without what the template puts after the last message. Templates may strip a message."""
    at = text.rfind(final.strip())
    if at < 0:
        raise RequestError("the chat template does not show the last message as it is", "continue_final_message")
    whole = final.lstrip()
    return text[: at + len(whole if text.startswith(whole, at) else final.strip())]


def _part(part: dict[str, Any], param: str) -> str:
    if part.get("type") != "text":
        raise RequestError(f"content of type {part.get('type')!r} is not supported, only 'text'", param)
    if not isinstance(part.get("text"), str):
        raise RequestError("a text part needs 'text', a string", f"{param}.text")
    return part["text"]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """`{% generation %}` .. `{% endgeneration %}` around what is learned in training, as transformers knows it."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers; unlike jinja's own, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
