"""The prompts of a completion: their token ids, and the text that an answer echoes."""

from collections.abc import Sequence
from typing import Any

from contracts.errors import RequestError
from gateway.json_decoding import whole
from gateway.prompting.request_fields import CompletionRequest
from gateway.prompting.token_budget import FittedPrompt, ServingLimits, require_room, require_short
from gateway.tokenization.tokenizer import PromptTokenizer

MAX_PROMPTS = 256


async def tokenize_prompts(
    request: CompletionRequest, tokenizer: PromptTokenizer, limits: ServingLimits
) -> list[list[int]]:
    """Return the token ids of each prompt of the request. Raises RequestError."""
    if ids := tokenizer.known_ids(request.prompt):
        require_room(1, request.n, limits)
        return [ids]
    given = whole(request.prompt)
    many = given if isinstance(given, list) and not _is_ids(given) else [given]
    if not many or len(many) > MAX_PROMPTS:
        raise RequestError(f"'prompt' must be 1 to {MAX_PROMPTS} prompts", "prompt")
    require_room(len(many), request.n, limits)
    many = list(map(whole, many))
    for prompt in many:
        if isinstance(prompt, str):
            require_short(prompt, request, tokenizer, limits, "prompt")
        else:
            _require_ids(prompt, tokenizer)
    texts = [prompt for prompt in many if isinstance(prompt, str)]
    encoded = iter(await tokenizer.encode(texts, add_special_tokens=request.add_special_tokens is not False))
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in many]


async def echoes(
    request: CompletionRequest, tokenizer: PromptTokenizer, prompts: Sequence[FittedPrompt], given_ids: list[list[int]]
) -> list[str]:
    """Return what comes before each prompt's answers: the client's own text where nothing was cut off."""
    if not request.echo:
        return [""] * len(prompts)
    given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    is_own = [isinstance(given[at], str) and prompt.token_ids is given_ids[at] for at, prompt in enumerate(prompts)]
    others = [prompt.token_ids for prompt, own in zip(prompts, is_own, strict=True) if not own]
    decoded = iter(await tokenizer.decode(others))
    return [given[at] if own else next(decoded) for at, own in enumerate(is_own)]


def _require_ids(prompt: Any, tokenizer: PromptTokenizer) -> None:
    if prompt == []:
        raise RequestError("the prompt has no tokens", "prompt")
    if not _is_ids(prompt):
        raise RequestError("'prompt' must be a string, a list of strings, token ids, or a list of token ids", "prompt")
    if min(prompt) < 0:
        raise RequestError(f"prompt: token id {min(prompt)} is negative", "prompt")
    tokenizer.require_known(prompt, "prompt")


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and set(map(type, prompt)) == {int}  # without a Python loop over thousands
