"""Fields of OpenAI's and vLLM's requests that are not honoured.

They are refused by name, or ignored because they are harmless.
"""

from collections.abc import Mapping
from typing import Any

from contracts.errors import RequestError

IGNORED: Mapping[str, str] = {
    "user": "names the caller",
    "safety_identifier": "names the caller",
    "metadata": "the caller's notes",
    "store": "nothing is stored",
    "service_tier": "there is one",
    "prompt_cache_key": "the prefix cache finds what prompts share by itself",
    "prompt_cache_retention": "the prefix cache keeps what it can",
    "session_id": "placement finds the worker that knows the prefix by itself",
    "stream_interval": "says how often to send; every token is sent as it comes",
    "verbosity": "a wish that only some models know",
    "length_penalty": "counts in beam search alone",
    "spaces_between_special_tokens": "special tokens are shown as they are written",
}
"""Field -> why ignoring it changes nothing in the answer's text."""

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "repetition_detection": ({},),
    "thinking_token_budget": (),
    "chat_template": ("",),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "return_prompt_text": (False,),
    "logits_processors": ([],),
}
"""Field -> values that mean the same as leaving it out (null always does)."""


INSTEAD: Mapping[str, str] = {
    "functions": "tools",
    "function_call": "tool_choice",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
}
"""Refused field -> the one that does the same. OpenAI and vLLM renamed them; older clients send the former."""


_THOUGHT: Mapping[str, tuple[Any, ...]] = {"reasoning_effort": (), "include_reasoning": (True,)}
REFUSED_OF_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {"tools": ([],), "tool_choice": ("none", "auto"), **_THOUGHT}
"""The same for /v1/completions, besides."""


REFUSED_OF_RESPONSES: Mapping[str, tuple[Any, ...]] = {
    **_THOUGHT,
    "background": (False,),
    "conversation": (),
    "logprob_token_ids": ([],),
    "logprobs": (False,),
    "n": (1,),
    "previous_response_id": ("",),
    "prompt": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
"""The same for /v1/responses, besides."""


def refuse_unhonoured(body: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises RequestError naming the first field that would change the answer and is not honoured."""
    for field, neutrals in refused.items():
        value = body.get(field)
        if value is not None and not any(_same(value, neutral) for neutral in neutrals):
            remedy = f"use '{INSTEAD[field]}' instead" if field in INSTEAD else "leave it out"
            raise RequestError(f"'{field}' is not supported; {remedy}", field)


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
