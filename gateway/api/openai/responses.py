"""OpenAI's Responses API, as far as nothing has to be stored: one answer to what `input` holds."""

import msgspec

from contracts.errors import TandemError
from contracts.events import FinishReason
from contracts.sampling import SamplingParams
from gateway.api.error_body import error_of
from gateway.api.openai.responses_input import honoured_tools
from gateway.api.openai.responses_items import Body, CustomCallItem, FunctionCallItem, MessageItem, OutputItem
from gateway.api.openai.schema import ResponsesRequest
from gateway.api.response_formatter import LogprobEntries
from gateway.api.single_answer import SingleAnswer
from gateway.generation.generation_state import OutputDelta, ShownToken
from gateway.generation.output_parser import OutputParserSpec
from gateway.generation.usage import Usage
from gateway.tool_calling.events import ContentDelta, OutputEvent, ReasoningDelta
from gateway.tool_calling.tool_choice import FlatCustomTool


class ResponsesFormatter(SingleAnswer):
    """Bodies and events of one response; owned by the one who writes it, because its events are numbered.

    `sampling`: of the answer. `reading`: see SingleAnswer. `entries`: how log-probabilities are told; None if the
    client does not want them.
    """

    ending = b""

    def __init__(
        self,
        id: str,
        model: str,
        created: int,
        request: ResponsesRequest,
        sampling: SamplingParams,
        reading: OutputParserSpec | None = None,
        entries: LogprobEntries | None = None,
    ) -> None:
        super().__init__(reading)
        self.id, self._model, self._created = id, model, created
        self._sampling, self._entries = sampling, entries
        self._items: list[OutputItem] = []
        self._num_events = 0
        self._untold: list[ShownToken] = []
        tools = honoured_tools(request)
        self._custom = frozenset(tool.name for tool in tools if isinstance(tool, FlatCustomTool))
        asked = _asked(request) | {"tools": tools}
        self._asked = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in asked.items()}

    def opening(self, index: int, usage: Usage) -> list[Body]:
        started = self._body("in_progress", None)
        return [
            {"type": "response.created", "response": started},
            {"type": "response.in_progress", "response": started},
        ]

    def whole(self, choices: list[Body], usage: Usage) -> Body:
        self._end()
        return self._body(self._status, usage)

    def closing(self, usage: Usage, include_usage: bool) -> list[Body]:
        ending = self._end()
        return [*ending, {"type": f"response.{self._status}", "response": self._body(self._status, usage)}]

    def failure(self, error: TandemError) -> Body:
        status, body = error_of(error)
        return {"type": "error", "code": str(status), "message": body["error"]["message"], "param": None}

    def refusal(self, error: TandemError) -> Body:
        return error_of(error)[1]

    def encode(self, body: Body) -> bytes:
        numbered = body | {"sequence_number": self._num_events}
        self._num_events += 1
        return b"event: %s\ndata: %s\n\n" % (body["type"].encode(), msgspec.json.encode(numbered))

    @property
    def _status(self) -> str:
        return "incomplete" if self.finish == FinishReason.LENGTH else "completed"

    def _events(self, piece: OutputDelta) -> list[OutputEvent]:
        self._untold += piece.shown
        return super()._events(piece)

    def _more(self, event: ReasoningDelta | ContentDelta) -> list[Body]:
        is_thought, last = isinstance(event, ReasoningDelta), self._items[-1] if self._items else None
        goes_on = isinstance(last, MessageItem) and last.is_thought == is_thought and not event.parting
        begun = [] if goes_on else self._begin(self._words(is_thought))
        message = self._items[-1]
        assert isinstance(message, MessageItem)
        return [*begun, message.delta(event.text, self._logprobs(is_thought))]

    def _logprobs(self, is_thought: bool) -> list[Body]:
        """Return those of the tokens since the last words.

        A message has its own alone, not those of reasoning."""
        tokens, self._untold = self._untold, []
        return [] if is_thought or self._entries is None else list(map(self._entries.content, tokens))

    def _begin_call(self, name: str, call_id: str) -> list[Body]:
        return self._begin(self._call(name, call_id))

    def _more_arguments(self, text: str) -> list[Body]:
        return [told] if (told := self._items[-1].delta(text)) else []

    def _end_call(self, is_whole: bool) -> list[Body]:
        return self._close("completed" if is_whole else "incomplete")

    def _call(self, name: str, call_id: str) -> OutputItem:
        self._untold.clear()
        index = len(self._items)
        kind, prefix = (CustomCallItem, "ctc") if name in self._custom else (FunctionCallItem, "fc")
        return kind(f"{prefix}_{self.id}_{index}", index, call_id, name)

    def _words(self, is_thought: bool) -> MessageItem:
        index = len(self._items)
        name = f"{'rs' if is_thought else 'msg'}_{self.id}"
        return MessageItem(name if index < 2 else f"{name}_{index}", index, is_thought)

    def _begin(self, item: OutputItem) -> list[Body]:
        closed = self._close("completed")
        self._items.append(item)
        return [*closed, *item.added()]

    def _close(self, status: str) -> list[Body]:
        """The last item, unless that has happened."""
        return self._items[-1].done(status) if self._items and self._items[-1].is_open else []

    def _end(self) -> list[Body]:
        """An answer without a word is an empty message."""
        begun = [] if self._items else self._begin(self._words(is_thought=False))
        if isinstance(last := self._items[-1], MessageItem) and last.is_open:
            last.logprobs += self._logprobs(last.is_thought)
        return [*begun, *self._close(self._status)]

    def _body(self, status: str, usage: Usage | None) -> Body:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": [item.body() for item in self._items],
            "previous_response_id": None,
            "store": False,
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "usage": None if usage is None else _usage(usage),
            **self._asked,
        }


def _asked(request: ResponsesRequest) -> Body:
    """Return what of a request comes back on its response.

    It is kept as JSON: metadata of 8 MB took 180 MB as objects, for as long as the answer took.
    """
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
        "text": {"format": (request.text and request.text.format) or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "truncation": request.truncation or "disabled",
        "max_tool_calls": request.max_tool_calls,
        "top_logprobs": request.top_logprobs or 0,
    }


def _usage(usage: Usage) -> Body:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
