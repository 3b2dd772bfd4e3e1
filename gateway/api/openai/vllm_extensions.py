"""What vLLM tells of an answer besides its text, for clients that ask.

These are token ids, and the prompt's log-probabilities.
"""

from collections.abc import Sequence
from typing import Any

from contracts.events import PromptToken
from gateway.api.response_formatter import finite
from gateway.generation.generation_state import GenerationState, OutputDelta
from gateway.prompting.chat_template import Prompting


def add_details(body: dict[str, Any], answers: Sequence[GenerationState]) -> None:
    """Add them to a whole reply.

    What is of the prompt is on each choice, but in a chat, which has one prompt, on the reply.
    """
    is_chat = body["object"] == "chat.completion"
    for choice, answer in zip(body["choices"], answers, strict=True):
        if answer.request.returns_token_ids:
            choice["token_ids"] = answer.token_ids
        (body if is_chat else choice).update(_of_prompt(answer))


class StreamedTokenIds:
    """The token ids of a stream.

    Those of the prompt are in the first chunk of a choice, which in a chat is that of the role, then what each adds.
    """

    def __init__(self, answers: Sequence[GenerationState]) -> None:
        self._answers = answers
        self._num_told: dict[int, int] = {}

    def open(self, body: dict[str, Any], index: int) -> None:
        """Add the prompt's token ids to the chunk that opens choice `index` of a chat."""
        body["prompt_token_ids"] = self._answers[index].request.token_ids
        self._num_told[index] = 0

    def add(self, body: dict[str, Any], piece: OutputDelta) -> None:
        """To the chunk that is made of `piece`, and perhaps of some before it that had nothing to show."""
        answer, (choice,) = self._answers[piece.index], body["choices"]
        if piece.index not in self._num_told:
            (body if "delta" in choice else choice)["prompt_token_ids"] = answer.request.token_ids
        choice["token_ids"] = answer.token_ids[self._num_told.get(piece.index, 0) : piece.num_tokens]
        self._num_told[piece.index] = piece.num_tokens


def _of_prompt(answer: GenerationState) -> dict[str, Any]:
    ask, details = answer.request, {}
    if ask.returns_token_ids:
        details["prompt_token_ids"] = ask.token_ids
    if (count := ask.prompt_logprobs) is not None:
        # Nothing foretells the first token.
        details["prompt_logprobs"] = [None, *(_entry(token, count, answer.prompting) for token in answer.prompt_tokens)]
    return details


def _entry(token: PromptToken, count: int, prompting: Prompting) -> dict[str, Any]:
    """The token itself, then the `count` likeliest; one that is both comes once."""
    ranked = {token.token_id: (token.logprob, token.rank)}
    for at, (token_id, logprob) in enumerate(token.top_logprobs[:count]):
        ranked.setdefault(token_id, (logprob, at + 1))
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": prompting.token_text(token_id),
        }
        for token_id, (logprob, rank) in ranked.items()
    }
