"""The events that workers send to the gateway.

They are tokens and, for each accepted request, exactly one of Finished, Failed or Moved.
"""

from enum import StrEnum

import msgspec

from contracts.ids import Epoch, Incarnation, RequestId, WorkerId

HEARTBEAT_S = 1.0
"""Seconds after which an event stream that has nothing to send sends an empty frame."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class Token(msgspec.Struct, frozen=True, array_like=True):
    """Token `index` of an answer, where 0 is the first.

    Log-probabilities are natural logarithms of the softmax without temperature. `embedding` comes with token 0 where it
    was asked for: the last layer's row behind the final norm, float32 little-endian.
    """

    index: int
    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    embedding: bytes | None = None


class PromptToken(msgspec.Struct, frozen=True, array_like=True):
    """A token of the prompt with its log-probability given the tokens before it.

    `rank` is 1 if it was the likeliest. Logarithms are natural; alternatives come likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top_logprobs: list[tuple[int, float]]


class PromptScored(msgspec.Struct, frozen=True, tag="prompt_scored"):
    """The prompt's tokens from `first_index` on, in order, sent before Prefilled.

    Token 0 has no probability, so the first index is 1. The worker that computes the prompt sends them for requests
    with `prompt_logprobs`, in as many events as it takes.
    """

    request_id: RequestId
    epoch: Epoch
    first_index: int
    tokens: list[PromptToken]


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """The prompt has been computed; its worker sends this with token 0.

    `cached_tokens` is how many of the prompt's tokens the prefill side had in its prefix cache.
    """

    request_id: RequestId
    epoch: Epoch
    cached_tokens: int
    stages_s: dict[str, float]


class Tokens(msgspec.Struct, frozen=True, tag="tokens", omit_defaults=True):
    """Some tokens of an answer.

    `num_drafted`: tokens that were guessed and verified in the step which gave these, of which `num_accepted` are among
    them.

    `stages_s` comes with the first tokens of a worker that did not compute the prompt: its account of time so far,
    stage -> seconds. So a request that ends early, because its client left or a stop string was found, has an account
    too.
    """

    request_id: RequestId
    epoch: Epoch
    tokens: list[Token]
    stages_s: dict[str, float] = {}
    num_drafted: int = 0
    num_accepted: int = 0


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The answer is complete with `num_tokens` tokens.

    `stages_s` is this worker's account of time, stage -> seconds.
    """

    request_id: RequestId
    epoch: Epoch
    num_tokens: int
    reason: FinishReason
    stages_s: dict[str, float]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The answer will not come; `code` is from the error tree in contracts.errors."""

    request_id: RequestId
    epoch: Epoch
    code: str
    message: str


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """The end of an attempt whose answer has moved: its destination goes on under a later epoch."""

    request_id: RequestId
    epoch: Epoch


Event = PromptScored | Prefilled | Tokens | Finished | Failed | Moved


class EventFrame(msgspec.Struct, frozen=True):
    """All events of one engine step for one gateway.

    `sequence` counts the frames of a (gateway, worker) stream from 0, without gaps.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    sequence: int
    events: list[Event]
