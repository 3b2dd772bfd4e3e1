"""Which form a model's reasoning has: by its chat template."""

from collections.abc import Collection

from gateway.reasoning.harmony import Harmony
from gateway.reasoning.reasoning_format import ReasoningFormat
from gateway.reasoning.tags import Tags

_TAGS = (
    Tags("<think>", "</think>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<seed:think>", "</seed:think>", inner="<seed:cot_budget_reflect>"),
)


def thinking_of(template: str, special_tokens: Collection[str]) -> ReasoningFormat | None:
    """None: the template knows of no reasoning, or the tokenizer does not know what it is marked with."""
    if "<|channel|>" in template and "<|message|>" in template:
        return Harmony() if all(marker in special_tokens for marker in Harmony.markers) else None
    return next((tags for tags in _TAGS if tags.opening in template or tags.closing in template), None)
