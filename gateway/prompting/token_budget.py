"""The share of prompt and answer in the context.

What a field alone may hold, request_fields says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from contracts.errors import RequestError
from gateway.prompting.request_fields import ChatRequest, Common, CompletionRequest
from gateway.tokenization.tokenizer import PromptTokenizer

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True)
class ServingLimits:
    """What the gateway serves. `max_answers`: of one request, since no more are ever worked on at once."""

    max_model_len: int
    eos_token_ids: tuple[int, ...]
    max_answers: int


@dataclass(frozen=True)
class FittedPrompt:
    """One prompt of a request as it is used, and the most tokens of each answer to it.

    `answer_prefix` and `echo` as in GenerationRequest.
    """

    token_ids: list[int]
    max_tokens: int
    answer_prefix: tuple[int, ...] = ()
    echo: str = ""


def require_room(num_prompts: int, n: int | None, limits: ServingLimits) -> None:
    """Raise RequestError for what never fits: it is no overload, and the client would come again for ever."""
    if (wanted := num_prompts * (n or 1)) > limits.max_answers:
        why = f"{wanted} answers are asked for at once; this gateway works on at most {limits.max_answers}"
        raise RequestError(why, "n" if (n or 1) > 1 else "prompt")


def require_short(text: str, request: Common, tokenizer: PromptTokenizer, limits: ServingLimits, param: str) -> None:
    """Raise RequestError for a text that can't fit, before it is tokenized.

    That takes seconds and a gigabyte for the largest that a body holds.
    """
    least = tokenizer.least_tokens(text)
    if request.truncate_prompt_tokens is None and least >= limits.max_model_len:
        why = f"the prompt has {least} at the least, which leaves no room for an answer"
        raise RequestError(f"{_longest(limits)}; {why}", param)


def fit_chat(token_ids: list[int], request: ChatRequest, limits: ServingLimits, max_param: str) -> FittedPrompt:
    """Return the prompt of a conversation.

    `max_param`: what the client calls the most tokens, if not as a chat does.

    Raises RequestError.
    """
    wanted = request.max_completion_tokens or request.max_tokens
    fitted = _truncated(token_ids, request, wanted, limits)
    param = max_param or ("max_completion_tokens" if request.max_completion_tokens else "max_tokens")
    max_tokens = _max_tokens(len(fitted), wanted, limits, param, "messages")
    return FittedPrompt(fitted, max_tokens, tuple(fitted[-1:]) if request.continue_final_message else ())


def fit_completion(
    prompts: Sequence[list[int]], request: CompletionRequest, limits: ServingLimits
) -> list[FittedPrompt]:
    """Return the prompts of a completion. Raises RequestError."""
    wanted = 1 if request.max_tokens == 0 else request.max_tokens  # token 0 costs what the prompt costs
    fitted = [_truncated(ids, request, wanted or DEFAULT_COMPLETION_TOKENS, limits) for ids in prompts]
    return [FittedPrompt(ids, _completion_tokens(len(ids), wanted, limits), tuple(ids[-1:])) for ids in fitted]


def _completion_tokens(num_prompt: int, wanted: int | None, limits: ServingLimits) -> int:
    room = limits.max_model_len - num_prompt
    default = min(DEFAULT_COMPLETION_TOKENS, room) if room > 0 else None
    return _max_tokens(num_prompt, wanted or default, limits, "max_tokens", "prompt")


def _max_tokens(num_prompt: int, wanted: int | None, limits: ServingLimits, param: str, prompt_param: str) -> int:
    """Return how long the answer may get: what is wanted, as far as the prompt leaves room, as with vLLM.

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
    """Return OpenAI's words, by which litellm and others know this error from other bad requests."""
    return f"this model's maximum context length is {limits.max_model_len} tokens"


def _truncated(token_ids: list[int], request: Common, wanted: int | None, limits: ServingLimits) -> list[int]:
    """Return at most `truncate_prompt_tokens` of them; at -1, as many as leave room for the answer."""
    keep = request.truncate_prompt_tokens
    if keep == 0:
        raise RequestError("'truncate_prompt_tokens' must be at least 1, or -1", "truncate_prompt_tokens")
    if keep is not None and keep < 0:
        keep = max(limits.max_model_len - (wanted or 1), 1)
    if keep is None or keep >= len(token_ids):
        return token_ids
    return token_ids[:keep] if request.truncation_side == "right" else token_ids[len(token_ids) - keep :]
