"""The pairs of texts of a request for scores, as prompts that are computed and not answered."""

from collections.abc import Sequence
from dataclasses import dataclass

from checkpoint import Checkpoint
from contracts.errors import RequestError
from gateway.prompting.chat_template import Prompting
from gateway.prompting.computed_prompts import prepare_computed
from gateway.prompting.generation_request import GenerationRequest
from gateway.prompting.request_fields import RerankRequest, ScoreRequest, Texts
from gateway.prompting.token_budget import ServingLimits

Pair = tuple[str, str]


@dataclass(frozen=True)
class ScorePrompts:
    """The prompts, and of each score which of them make it.

    One is a pair of texts for a classifier; two are texts whose embeddings are compared.
    """

    asks: list[GenerationRequest]
    parts: tuple[tuple[int, ...], ...]


def pairs_of(request: ScoreRequest) -> list[Pair]:
    """Return the pairs of texts to score: one with each of many, or one by one. Raises RequestError."""
    first, second = ("text_1", "text_2") if request.queries is None else ("queries", "documents")
    ones, others = _texts(request, first), _texts(request, second)
    if len(ones) not in (1, len(others)):
        raise RequestError(
            f"'{first}' has {len(ones)} texts and '{second}' {len(others)}: one is scored with each, or as many", first
        )
    return list(zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True))


def _texts(request: ScoreRequest, field: str) -> list[str]:
    given: Texts | None = getattr(request, field)
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise RequestError(f"'{field}' must be a text or a list of texts", field)
    return texts


async def prepare_scores(
    pairs: Sequence[Pair],
    request: ScoreRequest | RerankRequest,
    prompting: Prompting,
    limits: ServingLimits,
    checkpoint: Checkpoint,
) -> ScorePrompts:
    """Return what each pair needs: of a classifier the pair, of another model both texts' embeddings.

    Raises RequestError, which names the field.
    """
    fault = checkpoint.embedding.fault if checkpoint.score is None else checkpoint.score.fault
    if fault:
        raise RequestError(f"this model makes no scores here: {fault}")
    if checkpoint.score is not None:
        prompts = await prompting.encode_pairs(pairs)
        parts = tuple((index,) for index in range(len(pairs)))
    else:
        places = {text: index for index, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
        prompts = await prompting.encode(list(places), add_special_tokens=True)
        parts = tuple((places[one], places[other]) for one, other in pairs)
    told = await prepare_computed(prompts, request, "documents", prompting, limits)
    return ScorePrompts(told, parts)
