"""The options by which tokens are chosen: the client's, and the model's advice where they say nothing."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from contracts.codec import encode
from contracts.errors import RequestError
from contracts.sampling import SamplingParams
from gateway.prompting.request_fields import ChatRequest, Common, CompletionRequest, Detailed
from gateway.tokenization.tokenizer import PromptTokenizer

MAX_LOGIT_BIAS = 100.0
"""More counts as this much, as with vLLM."""
MAX_SAMPLING_NBYTES = 32 << 20
"""The most of all answers of a request together."""


@dataclass(frozen=True)
class LogprobCounts:
    """The numbers of alternatives that the engine reports with each token.

    None: not even the token's own log-probability. `token_ids`: the alternatives that take the place of the likeliest.
    """

    answer: int | None
    prompt: int | None
    token_ids: tuple[int, ...] = ()


def counts_of_chat(request: ChatRequest) -> LogprobCounts:
    """Return how many alternatives a chat asks for."""
    answer = (request.top_logprobs or 0) if request.logprobs else None
    return LogprobCounts(answer, request.prompt_logprobs, _wanted_ids(request, answer))


def counts_of_completion(request: CompletionRequest) -> LogprobCounts:
    """Return how many alternatives a completion asks for; an echo has those of the answer."""
    of_echo = request.logprobs if request.echo else None
    asked = [count for count in (request.prompt_logprobs, of_echo) if count is not None]
    return LogprobCounts(request.logprobs, max(asked, default=None), _wanted_ids(request, request.logprobs))


def _wanted_ids(request: Detailed, count: int | None) -> tuple[int, ...]:
    """Return the tokens whose log-probabilities the client wants.

    Raises RequestError if it wants none at all.
    """
    if request.logprob_token_ids and count is None:
        raise RequestError("'logprob_token_ids' needs 'logprobs'", "logprob_token_ids")
    return tuple(dict.fromkeys(request.logprob_token_ids or ()))


async def build(
    request: Common, tokenizer: PromptTokenizer, counts: LogprobCounts, grammar: str, ends: Iterable[int]
) -> partial[SamplingParams]:
    """Return what all prompts of a request share, made once: a `logit_bias` may name the whole vocabulary.

    `ends`: tokens that end an answer of this model, whatever its configuration says. Raises RequestError.
    """
    tokenizer.require_known(request.stop_token_ids or [], "stop_token_ids")
    tokenizer.require_known(request.allowed_token_ids or [], "allowed_token_ids")
    tokenizer.require_known(counts.token_ids, "logprob_token_ids")
    advice = tokenizer.advice
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
        logit_bias=_logit_bias(request.logit_bias or {}, tokenizer),
        min_tokens=request.min_tokens or 0,
        stop_token_ids=tuple(dict.fromkeys((*(request.stop_token_ids or ()), *ends))),
        ignore_eos=bool(request.ignore_eos) and not grammar,  # where a grammar ends nothing can follow
        logprobs=counts.answer,
        prompt_logprobs=counts.prompt,
        logprob_token_ids=counts.token_ids,
        grammar=grammar,
        bad_words=await tokenizer.spellings(request.bad_words or []),
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
        speculate=request.speculate is not False,
    )


def for_prompt(common: partial[SamplingParams], request: Common, max_tokens: int) -> SamplingParams:
    """Return the options of one prompt's answers.

    A seed that is drawn is each prompt's own: the same prompt twice is to have two answers.
    """
    if (request.min_tokens or 0) > max_tokens:
        raise RequestError(f"'min_tokens' is {request.min_tokens}, more than {max_tokens}", "min_tokens")
    seed = request.seed if request.seed is not None else secrets.randbits(63)
    return common(max_tokens=max_tokens, seed=seed % 2**63)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(given: dict[str, float], tokenizer: PromptTokenizer) -> dict[int, float]:
    wrong = next((key for key in given if not (key.isascii() and key.isdigit() and len(key) < 10)), None)
    if wrong is not None:
        raise RequestError(f"logit_bias: {wrong!r} is not a token id", "logit_bias")
    bias = {int(key): min(max(value, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS) for key, value in given.items()}
    tokenizer.require_known(list(bias), "logit_bias")
    return bias


def require_light(options: SamplingParams, num_answers: int, request: Common) -> None:
    """Raise RequestError where the options of all answers together are too large.

    Each job carries all of them, and their numbers take ten times as much memory where they are read: 128 answers that
    may each be one of a million tokens took 3 GB of each worker, and its place in the registry.
    """
    if num_answers > 1 and (nbytes := len(encode(options))) * num_answers > MAX_SAMPLING_NBYTES:
        why = f"{num_answers} answers with {nbytes} bytes each of logit_bias, allowed_token_ids, bad_words or a grammar"
        raise RequestError(
            f"{why} are more than {MAX_SAMPLING_NBYTES} bytes together; ask for fewer at once",
            "n" if (request.n or 1) > 1 else "prompt",
        )
