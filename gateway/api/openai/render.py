"""What a request comes to, without its answers: vLLM's bodies of the render endpoints.

Endpoint pickers read `token_ids`, to find workers that hold a prompt's prefix. Fields of vLLM's that have no meaning
here are null, as vLLM has them for a text.
"""

from typing import Any

from gateway.prompting.generation_request import GenerationRequest
from gateway.prompting.request_fields import ChatRequest, CompletionRequest


def rendered_body(
    asked: ChatRequest | CompletionRequest, prompt: GenerationRequest, request_id: str, model: str
) -> dict[str, Any]:
    """Return what vLLM tells of one prompt; it names its SamplingParams as our requests do."""
    return {
        "request_id": request_id,
        "token_ids": prompt.token_ids,
        "token_offsets": None,
        "features": None,
        "sampling_params": _sampling_body(asked, prompt),
        "model": asked.model or model,
        "stream": bool(asked.stream),
        "stream_options": asked.stream_options if asked.stream else None,
        "cache_salt": asked.cache_salt,
        "priority": asked.priority or 0,
        "kv_transfer_params": None,
    }


def _sampling_body(asked: ChatRequest | CompletionRequest, prompt: GenerationRequest) -> dict[str, Any]:
    sampling = prompt.sampling
    return {
        "n": asked.n or 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": asked.seed,
        "stop": list(prompt.stops),
        "stop_token_ids": list(sampling.stop_token_ids),
        "include_stop_str_in_output": prompt.include_stop,
        "ignore_eos": sampling.ignore_eos,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "logprob_token_ids": list(sampling.logprob_token_ids) or None,
        "skip_special_tokens": prompt.skip_special_tokens,
        "bad_words": asked.bad_words or [],
        "logit_bias": sampling.logit_bias or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "structured_outputs": asked.structured_outputs,
    }
