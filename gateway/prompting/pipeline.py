"""The way from a request to what each of its answers needs, in stages.

Each stage is visited once, with the frozen result of the one before.

A chat: validate, render, tokenize, fit, the grammar of the answer, sampling options, requests. A completion has its
prompts instead of a conversation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from contracts.errors import RequestError
from contracts.sampling import SamplingParams
from gateway.prompting import sampling_options
from gateway.prompting.answer_grammar import AnswerPrefix, answer_grammar
from gateway.prompting.chat_template import Prompting
from gateway.prompting.completion_prompts import echoes, tokenize_prompts
from gateway.prompting.generation_request import GenerationRequest
from gateway.prompting.request_fields import ChatRequest, CompletionRequest, Detailed
from gateway.prompting.sampling_options import LogprobCounts, counts_of_chat, counts_of_completion
from gateway.prompting.token_budget import (
    FittedPrompt,
    ServingLimits,
    fit_chat,
    fit_completion,
    require_room,
    require_short,
)
from gateway.tool_calling.tool_choice import Calling, calling_of, narrowed


def with_allowed_tools(request: ChatRequest) -> ChatRequest:
    """Return the request with those of its tools alone that `tool_choice` allows. Raises RequestError."""
    tools, choice = narrowed(request.tools, request.tool_choice)
    if choice is request.tool_choice:
        return request
    return msgspec.structs.replace(request, tools=tools, tool_choice=choice)


async def prepare_chat(
    request: ChatRequest, prompting: Prompting, limits: ServingLimits, max_param: str = ""
) -> list[GenerationRequest]:
    """Return what each answer to a conversation needs.

    `max_param`: what the client calls the most tokens of an answer, if not as ChatRequest does. Raises RequestError.
    """
    calling = _validated(request, limits)
    if calling is None:  # the model does not hear of what it is not to call
        request = msgspec.structs.replace(request, tools=None)
    rendered = prompting.rendered(request)
    require_short(rendered.text, request, prompting, limits, "messages")
    [token_ids] = await prompting.encode([rendered.text], bool(request.add_special_tokens))
    prompt = fit_chat(token_ids, request, limits, max_param)
    before = AnswerPrefix(prompting.thinking, rendered.begun)
    grammar = await answer_grammar(request, prompting, calling, before)
    return await _requests(request, prompting, [prompt], counts_of_chat(request), before, grammar, calling)


async def prepare_completion(
    request: CompletionRequest, prompting: Prompting, limits: ServingLimits
) -> list[GenerationRequest]:
    """Return what each answer to the prompts of a completion needs. Raises RequestError."""
    if request.max_tokens == 0 and not request.echo:
        raise RequestError("'max_tokens' of 0 needs 'echo': true", "max_tokens")
    given = await tokenize_prompts(request, prompting, limits)
    fitted = fit_completion(given, request, limits)
    texts = await echoes(request, prompting, fitted, given)
    prompts = [replace(prompt, echo=text) for prompt, text in zip(fitted, texts, strict=True)]
    _require_stream_fields(request)
    grammar = await answer_grammar(request, prompting, None, AnswerPrefix())
    asks = await _requests(request, prompting, prompts, counts_of_completion(request), AnswerPrefix(), grammar)
    return await _echoed(asks, request, prompting, prompts) if request.echo else asks


def _validated(request: ChatRequest, limits: ServingLimits) -> Calling | None:
    """Return how the answers may call. Raises RequestError for fields that do not go together."""
    if request.top_logprobs and not request.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    require_room(1, request.n, limits)
    _require_stream_fields(request)
    return calling_of(request.tools, request.tool_choice, request.parallel_tool_calls)


def _require_stream_fields(request: Detailed) -> None:
    """Raise RequestError for a field that is of a stream alone, or of none."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("'stream_options' needs 'stream': true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("'prompt_logprobs' does not come in a stream; leave out 'stream'", "prompt_logprobs")


async def _requests(
    request: Detailed,
    prompting: Prompting,
    prompts: Sequence[FittedPrompt],
    counts: LogprobCounts,
    before: AnswerPrefix,
    grammar: str,
    calling: Calling | None = None,
) -> list[GenerationRequest]:
    """Return the answers to produce: choice `prompt * n + i`, as OpenAI numbers them."""
    thinking = before.thinking
    markers = () if calling is None or prompting.tool_form is None else prompting.tool_form.markers
    markers = [*markers, *(() if thinking is None else thinking.markers)]
    ends = () if thinking is None or request.ignore_eos else thinking.ends
    stop = request.stop or []
    common = partial(
        GenerationRequest,
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        prompt_logprobs=request.prompt_logprobs,
        returns_token_ids=bool(request.return_token_ids),
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        markers={token_id: marker for marker, token_id in prompting.special_ids(markers).items()},
        headers=() if thinking is None else thinking.headers,
        begun=before.begun,
    )
    end_ids = prompting.special_ids(ends).values()
    sampling = await sampling_options.build(request, prompting, counts, grammar, end_ids)
    asks = [ask for at, prompt in enumerate(prompts) for ask in _of_prompt(request, at, prompt, common, sampling)]
    sampling_options.require_light(asks[0].sampling, len(asks), request)
    return asks


def _of_prompt(
    request: Detailed,
    number: int,
    prompt: FittedPrompt,
    common: partial[GenerationRequest],
    sampling: partial[SamplingParams],
) -> Iterator[GenerationRequest]:
    """Yield the answers to one prompt, which differ by their draws."""
    options, count = sampling_options.for_prompt(sampling, request, prompt.max_tokens), request.n or 1
    for choice in range(count):
        yield common(
            index=number * count + choice,
            prompt=number,
            token_ids=prompt.token_ids,
            sampling=msgspec.structs.replace(options, choice=choice),
            echo=prompt.echo,
            answer_prefix=prompt.answer_prefix,
        )


async def _echoed(
    asks: Sequence[GenerationRequest], request: CompletionRequest, prompting: Prompting, prompts: Sequence[FittedPrompt]
) -> list[GenerationRequest]:
    """Return the answers with the places of their prompts' tokens in the text that is shown."""
    ids, texts = [prompt.token_ids for prompt in prompts], [prompt.echo for prompt in prompts]
    offsets = [()] * len(prompts) if request.logprobs is None else await prompting.offsets(ids, texts)
    is_only = request.max_tokens == 0
    return [replace(ask, echo_offsets=offsets[ask.prompt], is_echo_only=is_only) for ask in asks]
