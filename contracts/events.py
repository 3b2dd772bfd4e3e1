"""What workers tell the gateway: tokens, and for each accepted request exactly one of Finished or Failed."""

from enum import StrEnum

import msgspec

from contracts.ids import Epoch, Incarnation, RequestId, WorkerId

HEARTBEAT_S = 1.0
"""An event stream that has nothing to tell sends an empty frame each HEARTBEAT_S."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class Token(msgspec.Struct, frozen=True, array_like=True):
    """Token `index` of an answer (0 is the first).

    Log-probabilities are natural logs after temperature-free softmax.
    """

    index: int
    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None


class PromptToken(msgspec.Struct, frozen=True, array_like=True):
    """A token of the prompt as the model saw it coming: `rank` 1 if it was the likeliest.

    Natural logs; alternatives likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top_logprobs: list[tuple[int, float]]


class PromptScored(msgspec.Struct, frozen=True, tag="prompt_scored"):
    """The prompt's tokens from `first_index` on, in order, before Prefilled. Nothing foretells token 0: it begins at 1.

    For requests with `prompt_logprobs`, by whoever computes the prompt, in as many events as it takes.
    """

    request_id: RequestId
    epoch: Epoch
    first_index: int
    tokens: list[PromptToken]


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """Sent with token 0 by whoever computed the prompt. `cached_tokens` is the true prefix hit of the prefill side."""

    request_id: RequestId
    epoch: Epoch
    cached_tokens: int
    stages_s: dict[str, float]


class Tokens(msgspec.Struct, frozen=True, tag="tokens", omit_defaults=True):
    """`stages_s`: with the first of who did not compute the prompt, its time account up to here, stage -> seconds. Who
    gets no further, as a client leaves or a stop string is found, has told it.
    """

    request_id: RequestId
    epoch: Epoch
    tokens: list[Token]
    stages_s: dict[str, float] = {}


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The answer is complete with `num_tokens` tokens.

    `stages_s`: the time account of this worker, stage -> seconds.
    """

    request_id: RequestId
    epoch: Epoch
    num_tokens: int
    reason: FinishReason
    stages_s: dict[str, float]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The answer will not come. `code` is that of the error tree in contracts.errors."""

    request_id: RequestId
    epoch: Epoch
    code: str
    message: str


Event = PromptScored | Prefilled | Tokens | Finished | Failed


class EventFrame(msgspec.Struct, frozen=True):
    """All events of one engine step for one gateway.

    `sequence` counts frames of a (gateway, worker) stream from 0, without gaps.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    sequence: int
    events: list[Event]
