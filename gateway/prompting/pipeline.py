"""From a request to what each of its answers needs: token ids, sampling, and how the text ends."""

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from contracts.codec import encode
from contracts.errors import RequestError
from contracts.sampling import SamplingParams
from gateway.api.openai.schema import ChatRequest, Common, CompletionRequest, Detailed
from gateway.json_decoding import whole
from gateway.prompting.answer_grammar import AnswerPrefix, answer_grammar
from gateway.prompting.chat_template import Prompting
from gateway.tool_calling.tool_choice import Calling, calling_of

DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 256
MAX_LOGIT_BIAS = 100.0
"""More counts as this much, as with vLLM."""
MAX_SAMPLING_NBYTES = 32 << 20
"""Of all answers of a request together."""


@dataclass(frozen=True)
class GenerationRequest:
    """One answer to produce. `prompt` numbers the prompts of a request; `index` is the choice the client sees.

    `echo` is shown before the answer; with `echo_offsets` the prompt's tokens are, too, and that is where they begin in
    it. `is_echo_only`: nothing of the answer is shown. `prompt_logprobs`: how many alternatives the client wants.
    `markers`: special tokens, by id, that are shown though others are skipped; behind those of `headers` no stop string
    is looked for until the next marker. `before`: the token whose text the answer goes on from; empty if it is a text
    of its own. `begun`: what the prompt has begun of the answer's form (thinking/).
    """

    index: int
    prompt: int
    token_ids: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    echo: str = ""
    echo_offsets: tuple[int, ...] = ()
    is_echo_only: bool = False
    prompt_logprobs: int | None = None
    returns_token_ids: bool = False
    priority: int = 0
    cache_salt: str = ""
    markers: Mapping[int, str] = field(default_factory=dict)
    headers: Collection[str] = ()
    answer_prefix: tuple[int, ...] = ()
    begun: str = ""

    @property
    def has_details(self) -> bool:
        return self.returns_token_ids or self.prompt_logprobs is not None


@dataclass(frozen=True)
class LogprobCounts:
    """How many alternatives the engine tells beside each token; None: not even the token's own log-probability."""

    answer: int | None
    prompt: int | None


@dataclass(frozen=True)
class ServingLimits:
    """`max_answers`: of a request, since no more are ever worked on at once."""

    max_model_len: int
    eos_token_ids: tuple[int, ...]
    max_answers: int


async def prepare_chat(
    request: ChatRequest, prompting: Prompting, limits: ServingLimits, max_param: str = ""
) -> list[GenerationRequest]:
    """`max_param`: what the client calls the most tokens of an answer, if not as ChatRequest does.

    Raises RequestError.
    """
    if request.top_logprobs and not request.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    _require_room(1, request.n, limits)
    calling = calling_of(request.tools, request.tool_choice, request.parallel_tool_calls)
    if calling is None:  # the model does not hear of what it is not to call
        request = msgspec.structs.replace(request, tools=None)
    wanted = request.max_completion_tokens or request.max_tokens
    prompt = prompting.render(request)
    _require_short(prompt, request, prompting, limits, "messages")
    [whole] = await prompting.encode([prompt], bool(request.add_special_tokens))
    token_ids = _truncated(whole, request, wanted, limits)
    param = max_param or ("max_completion_tokens" if request.max_completion_tokens else "max_tokens")
    max_tokens = _max_tokens(len(token_ids), wanted, limits, param, "messages")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    counts = LogprobCounts(logprobs, request.prompt_logprobs)
    before = AnswerPrefix(prompting.thinking, prompting.begun(request, prompt))
    last = tuple(token_ids[-1:]) if request.continue_final_message else ()
    return await _choices(request, prompting, [_Prompt(token_ids, max_tokens, last)], counts, before, calling)


async def prepare_completion(
    request: CompletionRequest, prompting: Prompting, limits: ServingLimits
) -> list[GenerationRequest]:
    """Raises RequestError."""
    if request.max_tokens == 0 and not request.echo:
        raise RequestError("'max_tokens' of 0 needs 'echo': true", "max_tokens")
    wanted = 1 if request.max_tokens == 0 else request.max_tokens  # token 0 costs what the prompt costs
    whole = await _prompts(request, prompting, limits)
    prompts = [_truncated(ids, request, wanted or DEFAULT_COMPLETION_TOKENS, limits) for ids in whole]
    max_tokens = [_completion_tokens(len(ids), wanted, limits) for ids in prompts]
    echoes = await _echoes(request, prompting, prompts, whole)
    of_echo = request.logprobs if request.echo else None
    asked = [count for count in (request.prompt_logprobs, of_echo) if count is not None]
    counts = LogprobCounts(request.logprobs, max(asked, default=None))
    given = zip(prompts, max_tokens, echoes, strict=True)
    raw = [_Prompt(ids, most, tuple(ids[-1:]), echo) for ids, most, echo in given]
    asks = await _choices(request, prompting, raw, counts, AnswerPrefix())
    if not request.echo:
        return asks
    offsets = [()] * len(prompts) if request.logprobs is None else await prompting.offsets(prompts, echoes)
    is_only = request.max_tokens == 0
    return [replace(ask, echo_offsets=offsets[ask.prompt], is_echo_only=is_only) for ask in asks]


def _completion_tokens(num_prompt: int, wanted: int | None, limits: ServingLimits) -> int:
    room = limits.max_model_len - num_prompt
    default = min(DEFAULT_COMPLETION_TOKENS, room) if room > 0 else None
    return _max_tokens(num_prompt, wanted or default, limits, "max_tokens", "prompt")


def _max_tokens(num_prompt: int, wanted: int | None, limits: ServingLimits, param: str, prompt_param: str) -> int:
    """Return how long the answer may get: what is wanted, as far as the prompt leaves room for it, as vLLM does.

    Raises RequestError where the prompt leaves none, or where no prompt would leave what is wanted.
    """
    room = limits.max_model_len - num_prompt
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens", prompt_param)
    if room < 1:
        raise RequestError(
            f"{_longest(limits)}; the prompt has {num_prompt}, which leaves no room for an answer",
            prompt_param,
        )
    if wanted is not None and wanted > limits.max_model_len:
        raise RequestError(f"{_longest(limits)}; {param} is {wanted}", param)
    return min(wanted or room, room)


def _longest(limits: ServingLimits) -> str:
    """In OpenAI's words: by them litellm and others know this error from other bad requests."""
    return f"this model's maximum context length is {limits.max_model_len} tokens"


async def _prompts(request: CompletionRequest, prompting: Prompting, limits: ServingLimits) -> list[list[int]]:
    if ids := prompting.known_ids(request.prompt):
        _require_room(1, request.n, limits)
        return [ids]
    given = whole(request.prompt)
    many = given if isinstance(given, list) and not _is_ids(given) else [given]
    if not many or len(many) > MAX_PROMPTS:
        raise RequestError(f"'prompt' must be 1 to {MAX_PROMPTS} prompts", "prompt")
    _require_room(len(many), request.n, limits)
    many = list(map(whole, many))
    for prompt in many:
        if isinstance(prompt, str):
            _require_short(prompt, request, prompting, limits, "prompt")
        else:
            _require_ids(prompt, prompting)
    texts = [prompt for prompt in many if isinstance(prompt, str)]
    encoded = iter(await prompting.encode(texts, add_special_tokens=request.add_special_tokens is not False))
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in many]


def _require_room(num_prompts: int, n: int | None, limits: ServingLimits) -> None:
    """What never fits is no overload: the client would come again for ever."""
    if (wanted := num_prompts * (n or 1)) > limits.max_answers:
        why = f"{wanted} answers are asked for at once; this gateway works on at most {limits.max_answers}"
        raise RequestError(why, "n" if (n or 1) > 1 else "prompt")


def _require_short(text: str, request: Common, prompting: Prompting, limits: ServingLimits, param: str) -> None:
    """Before it is tokenized, which takes seconds and a gigabyte for the largest that a body holds."""
    least = prompting.least_tokens(text)
    if request.truncate_prompt_tokens is None and least >= limits.max_model_len:
        why = f"the prompt has {least} at the least, which leaves no room for an answer"
        raise RequestError(f"{_longest(limits)}; {why}", param)


def _require_ids(prompt: Any, prompting: Prompting) -> None:
    if prompt == []:
        raise RequestError("the prompt has no tokens", "prompt")
    if not _is_ids(prompt):
        raise RequestError("'prompt' must be a string, a list of strings, token ids, or a list of token ids", "prompt")
    if min(prompt) < 0:
        raise RequestError(f"prompt: token id {min(prompt)} is negative", "prompt")
    prompting.require_known(prompt, "prompt")


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and set(map(type, prompt)) == {int}  # without a Python loop over thousands


def _truncated(token_ids: list[int], request: Common, wanted: int | None, limits: ServingLimits) -> list[int]:
    """At most `truncate_prompt_tokens` of them; -1: as many as leave room for the answer."""
    keep = request.truncate_prompt_tokens
    if keep == 0:
        raise RequestError("'truncate_prompt_tokens' must be at least 1, or -1", "truncate_prompt_tokens")
    if keep is not None and keep < 0:
        keep = max(limits.max_model_len - (wanted or 1), 1)
    if keep is None or keep >= len(token_ids):
        return token_ids
    return token_ids[:keep] if request.truncation_side == "right" else token_ids[len(token_ids) - keep :]


async def _echoes(
    request: CompletionRequest, prompting: Prompting, prompts: list[list[int]], whole: list[list[int]]
) -> list[str]:
    """The client's own texts where nothing was cut off."""
    if not request.echo:
        return [""] * len(prompts)
    given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    is_own = [isinstance(given[at], str) and ids is whole[at] for at, ids in enumerate(prompts)]
    decoded = iter(await prompting.decode([ids for ids, own in zip(prompts, is_own, strict=True) if not own]))
    return [given[at] if own else next(decoded) for at, own in enumerate(is_own)]


@dataclass(frozen=True)
class _Prompt:
    """One of a request, and the most tokens of each answer to it. `before`: as of GenerationRequest."""

    token_ids: list[int]
    max_tokens: int
    answer_prefix: tuple[int, ...]
    echo: str = ""


async def _choices(
    request: Detailed,
    prompting: Prompting,
    prompts: Sequence[_Prompt],
    counts: LogprobCounts,
    before: AnswerPrefix,
    calling: Calling | None = None,
) -> list[GenerationRequest]:
    """Choice `prompt * n + i`, as OpenAI numbers them."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("'stream_options' needs 'stream': true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("'prompt_logprobs' does not come in a stream; leave out 'stream'", "prompt_logprobs")
    grammar, thinking = await answer_grammar(request, prompting, calling, before), before.thinking
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
    sampling = await _sampling(request, prompting, counts, grammar, prompting.special_ids(ends).values())
    asks = [
        ask for number, prompt in enumerate(prompts) for ask in _requests(request, number, prompt, common, sampling)
    ]
    _require_light(asks, request)
    return asks


def _require_light(asks: Sequence[GenerationRequest], request: Common) -> None:
    """Each job carries all of how its token is chosen, and its numbers take ten times as much memory where they are
    read: 128 answers that may each be one of a million tokens took 3 GB of each worker, and its place in the registry.
    """
    if len(asks) > 1 and (nbytes := len(encode(asks[0].sampling))) * len(asks) > MAX_SAMPLING_NBYTES:
        why = f"{len(asks)} answers with {nbytes} bytes each of logit_bias, allowed_token_ids, bad_words or a grammar"
        raise RequestError(
            f"{why} are more than {MAX_SAMPLING_NBYTES} bytes together; ask for fewer at once",
            "n" if (request.n or 1) > 1 else "prompt",
        )


def _requests(
    request: Common, number: int, prompt: _Prompt, common: partial[GenerationRequest], sampling: partial[SamplingParams]
) -> Iterator[GenerationRequest]:
    """Its answers, which differ by their draws."""
    of_prompt, count = _of_prompt(sampling, request, prompt.max_tokens), request.n or 1
    for choice in range(count):
        yield common(
            index=number * count + choice,
            prompt=number,
            token_ids=prompt.token_ids,
            sampling=msgspec.structs.replace(of_prompt, choice=choice),
            echo=prompt.echo,
            answer_prefix=prompt.answer_prefix,
        )


async def _sampling(
    request: Common, prompting: Prompting, counts: LogprobCounts, grammar: str, ends: Iterable[int]
) -> partial[SamplingParams]:
    """What all prompts of a request share, made once: a `logit_bias` may name the whole vocabulary. `ends`: tokens that
    end an answer of this model, whatever its configuration says.
    """
    prompting.require_known(request.stop_token_ids or [], "stop_token_ids")
    prompting.require_known(request.allowed_token_ids or [], "allowed_token_ids")
    advice = prompting.advice
    top_k = advice.top_k if request.top_k is None else request.top_k
    return partial(
        SamplingParams,
        temperature=_or(request.temperature, advice.temperature),
        top_p=_or(request.top_p, advice.top_p),
        top_k=top_k if top_k > 0 else None,
        min_p=_or(request.min_p, advice.min_p),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, advice.repetition_penalty),
        logit_bias=_logit_bias(request.logit_bias or {}, prompting),
        min_tokens=request.min_tokens or 0,
        stop_token_ids=tuple(dict.fromkeys((*(request.stop_token_ids or ()), *ends))),
        ignore_eos=bool(request.ignore_eos) and not grammar,  # where a grammar ends nothing can follow
        logprobs=counts.answer,
        prompt_logprobs=counts.prompt,
        grammar=grammar,
        bad_words=await prompting.spellings(request.bad_words or []),
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
    )


def _of_prompt(common: partial[SamplingParams], request: Common, max_tokens: int) -> SamplingParams:
    """A seed that is drawn is each prompt's own: the same prompt twice is to have two answers."""
    if (request.min_tokens or 0) > max_tokens:
        raise RequestError(f"'min_tokens' is {request.min_tokens}, more than {max_tokens}", "min_tokens")
    seed = request.seed if request.seed is not None else secrets.randbits(63)
    return common(max_tokens=max_tokens, seed=seed % 2**63)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(given: dict[str, float], prompting: Prompting) -> dict[int, float]:
    wrong = next((key for key in given if not (key.isascii() and key.isdigit() and len(key) < 10)), None)
    if wrong is not None:
        raise RequestError(f"logit_bias: {wrong!r} is not a token id", "logit_bias")
    bias = {int(key): min(max(value, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS) for key, value in given.items()}
    prompting.require_known(list(bias), "logit_bias")
    return bias
