"""A client's request while it runs: its answers, from their placement to their last token."""

import asyncio
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from contracts.errors import DeadlineExceeded, Overloaded, RequestError, TandemError, Unavailable
from contracts.ids import RequestId
from coordinator.request_states import RequestState
from gateway.admission.limits import ConcurrencyLimit
from gateway.api.error_body import error_of
from gateway.api.response_formatter import ResponseFormatter
from gateway.dispatch.attempt_budget import REPLAY_WAIT_S
from gateway.dispatch.dispatcher import Dispatcher
from gateway.generation.generation_state import GenerationState, OutputDelta
from gateway.generation.usage import Usage
from gateway.observability.metrics import Metrics
from gateway.observability.tracing import Trace
from gateway.tenants.tenant_accounts import TenantAccount

log = logging.getLogger("gateway.requests")

PLACE_PERIOD_S = 0.5
MAX_UNREAD_PIECES = 16_384


@dataclass(frozen=True)
class Style:
    """How the client wants its answer."""

    stream: bool
    include_usage: bool
    continuous_usage: bool


@dataclass
class GenerationRun:
    """The answers of one request, and the pieces of them that were not yet written."""

    id: str
    answers: list[GenerationState]
    replies: ResponseFormatter
    style: Style
    dispatch: Dispatcher
    admission: ConcurrencyLimit
    metrics: Metrics
    timeout_s: float
    started_s: float
    receive_s: float
    account: TenantAccount | None = None
    echo_id: str = ""
    trace: Trace | None = None

    def __post_init__(self) -> None:
        self._deltas: deque[OutputDelta] = deque()
        self._wake, self._has_room = asyncio.Event(), asyncio.Event()
        self._placing: asyncio.Task[None] | None = None
        self._is_too_slow = self._is_placed = self._is_overdue = False
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._num_admitted = self._num_begun = 0
        self._open = len(self.answers)
        # The client may give the same id to two requests, and workers tell requests by theirs.
        self._unique_id = f"{self.id}-{secrets.token_hex(8)}" if self.echo_id else self.id
        self._ids = [_answer_id(self._unique_id, at, self._open) for at in range(self._open)]
        self._deadline_s = self.started_s + self.timeout_s
        self._stages_s = {"receive": self.receive_s}

    @property
    def has_details(self) -> bool:
        return self.answers[0].request.has_details  # all answers of a request are asked for alike

    async def place(self) -> None:
        """Begin as many answers as have a place, the first at least; the others get theirs as room comes.

        Raises Overloaded or Unavailable, and then there is none.
        """
        prepared_s = time.monotonic()
        self._take_room(prepared_s)
        try:
            async with asyncio.timeout(max(0.0, self._deadline_s - time.monotonic())):
                await self._begin()
        except BaseException as error:
            self.cancel("not all answers could be placed")
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("no placement within the request's time") from error
            raise
        self._is_placed = True
        self._stages_s |= {"prepare": prepared_s - self.started_s, "place": time.monotonic() - prepared_s}
        if self._num_begun < len(self.answers):
            self._placing = asyncio.create_task(self._place_others())

    async def deltas(self) -> list[OutputDelta]:
        """What came since the last call, at least one piece; empty once all answers have ended.

        Raises the TandemError that an answer failed with, and DeadlineExceeded.
        """
        if not self._deltas and self._open:
            await self._wait()
        if self._is_too_slow:
            raise Overloaded(f"the client left {MAX_UNREAD_PIECES} pieces of the answer unread")
        pieces = list(self._deltas)
        self._deltas.clear()
        for piece in pieces:
            self._open -= piece.finish is not None
            if piece.failed is not None:
                self.cancel("another answer of the request failed")
                raise piece.failed
        return pieces

    def cancel(self, reason: str, end: RequestState = RequestState.CANCELLED) -> None:
        if self._placing is not None:
            self._placing.cancel()
        for request_id in self._ids:
            self.dispatch.cancel(request_id, reason, end)

    def usage(self) -> Usage:
        return replace(_usage(self.answers), reasoning_tokens=self.replies.reasoning_tokens)

    def close(self, error: TandemError | None = None, disconnected: bool = False) -> None:
        """Frees what still runs; counts and logs the request."""
        self.cancel("the client disconnected" if disconnected else "the request ended")
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._give_room_back()
        status = 499 if disconnected else error_of(error)[0] if error is not None else 200
        code = "disconnected" if disconnected else error.code if error is not None else "ok"
        self._count(status, code)

    def _take_room(self, now: float) -> None:
        """Take room for all answers. Raises Overloaded or RequestError, and then nothing is taken.

        A tenant may hold so many answers as are left free, by its weight: with others that do the same it has a fair
        part, and a newcomer finds room (dynamic thresholds, Choudhury and Hahne 1998).
        """
        count, account = len(self.answers), self.account
        if account is None:
            self.admission.take(count)
        else:
            self._require_share(account, count)
            prompt_tokens = _usage(self.answers).prompt_tokens
            for number, answer in enumerate(self.answers):
                answer.request = replace(answer.request, room=account.room(number))
            account.take(count, prompt_tokens, now)
            try:
                self.admission.take(count)
            except Overloaded:
                account.give_back(count, prompt_tokens, now)
                raise
        self._num_admitted = count

    def _require_share(self, account: TenantAccount, count: int) -> None:
        weight, limit = account.tenant.weight, self.admission.limit
        if count > max(1, at_most := int(limit * weight / (1 + weight))):
            raise RequestError(f"{count} answers; the tenant '{account.name}' may have {at_most} at once here", "n")
        most = max(1, weight * (self.admission.num_free - count))
        if account.num_inflight + count > most:
            why = f"has {account.num_inflight} answers in progress, and its part of this gateway is {most:.0f}"
            raise account.refusal("share", why, 1.0)

    def _give_room_back(self) -> None:
        self.admission.give_back(self._num_admitted)
        if self.account is not None and self._num_admitted:
            usage, now = _usage(self.answers), time.monotonic()
            if self._num_begun:
                counts = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
                self.account.end(self._num_admitted, *counts, now)
            else:
                self.account.give_back(self._num_admitted, usage.prompt_tokens, now)

    async def _begin(self) -> None:
        """Begin as many of the others as have a place. Raises Overloaded if none of all has one."""
        while (number := self._num_begun) < len(self.answers):
            try:
                await self.dispatch.begin(self._ids[number], self.answers[number], self._on_delta, self._deadline_s)
            except Overloaded:
                if number == 0:
                    raise
                return
            self._num_begun += 1

    async def _place_others(self) -> None:
        """Begin the others as room comes.

        What the workers are full of may be this request's own answers: a client that is told to come again finds them
        as full when it does.
        """
        seen_s = time.monotonic()  # when there was a registry, and a worker
        try:
            while self._num_begun < len(self.answers):
                self._has_room.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(PLACE_PERIOD_S):
                        await self._has_room.wait()
                try:
                    await self._begin()
                    seen_s = time.monotonic()
                except Unavailable:  # as for an answer that is placed again, whose worker was lost
                    if time.monotonic() - seen_s > REPLAY_WAIT_S:
                        raise
        except TandemError as error:
            if piece := self.answers[self._num_begun].fail(error):
                self._on_delta(piece)

    def _on_delta(self, piece: OutputDelta) -> None:
        if piece.finish is not None:
            self._has_room.set()
        if len(self._deltas) < MAX_UNREAD_PIECES:
            self._deltas.append(piece)
        elif not self._is_too_slow:
            self._is_too_slow = True
            self.cancel("the client reads too slowly")
        self._wake.set()

    async def _wait(self) -> None:
        self._wake.clear()
        if self._deadline_timer is None:  # one for all waits, of which there is one a token
            left_s = self._deadline_s - time.monotonic()
            self._deadline_timer = asyncio.get_running_loop().call_later(max(left_s, 0.0), self._on_deadline)
        if not self._is_overdue:
            await self._wake.wait()
        if self._is_overdue and not self._deltas:
            self.cancel("the request's time is over", RequestState.FAILED)
            raise DeadlineExceeded(f"no complete answer within {self.timeout_s:.0f} s")

    def _on_deadline(self) -> None:
        self._is_overdue = True
        self._wake.set()

    def _count(self, status: int, code: str) -> None:
        usage, now = self.usage(), time.monotonic()
        begun = [answer for answer in self.answers if answer.sequencer.has_begun]
        work = usage if len(begun) == len(self.answers) else _usage(begun)
        firsts = [answer.first_s for answer in self.answers if answer.first_s is not None]
        ttft_s = min(firsts) - self.started_s if firsts else None
        gaps = [_mean_gap_s(answer) for answer in self.answers if answer.num_tokens > 1]
        metrics = self.metrics
        metrics.requests.labels(code).inc()
        metrics.prompt_tokens.inc(work.prompt_tokens)
        metrics.cached_tokens.inc(work.cached_tokens)
        metrics.tokens.inc(work.completion_tokens)
        if self._is_placed:  # the milliseconds of a refusal tell nothing of how long answers take
            metrics.e2e.observe(now - self.started_s)
            metrics.vllm.count(self.answers, usage, work, self.started_s, now, is_error=status not in (200, 499))
            metrics.account(self._stages_s)
        if ttft_s is not None:
            metrics.ttft.observe(ttft_s)
        for gap in gaps:
            metrics.itl.observe(gap)
        for answer in self.answers:
            metrics.account(answer.stages_s)
        facts = {
            "id": self.id,
            **({} if self.account is None else {"tenant": self.account.name}),
            "request_id": self._unique_id,
            "status": status,
            "code": code,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "accepted_tokens": usage.accepted_tokens,
            "rejected_tokens": usage.rejected_tokens,
            "ttft_s": _rounded(ttft_s),
            "itl_mean_s": _rounded(sum(gaps) / len(gaps) if gaps else None),
            "itl_max_s": _rounded(max((gap for answer in self.answers for gap in answer.gaps_s), default=None)),
            "total_s": _rounded(now - self.started_s),
            "stages_s": {name: round(value, 6) for name, value in (self._stages_s | self.answers[0].stages_s).items()},
            "epoch": self.answers[0].sequencer.epoch,
            **self.answers[0].servers,
        }
        log.info("%s", json.dumps(facts))
        if self.trace is not None:
            self.trace.end(self.answers[0], facts, self.started_s - self.receive_s, now)


def _answer_id(request_id: str, at: int, count: int) -> RequestId:
    return RequestId(request_id if count == 1 else f"{request_id}-{at}")


def _usage(answers: Sequence[GenerationState]) -> Usage:
    """Answers to one prompt share it."""
    prompts = {answer.request.prompt: answer for answer in reversed(answers)}
    return Usage(
        sum(len(answer.request.token_ids) for answer in prompts.values()),
        sum(answer.num_tokens for answer in answers),
        sum(min(answer.cached_tokens, len(answer.request.token_ids)) for answer in prompts.values()),
        accepted_tokens=sum(answer.num_accepted for answer in answers),
        rejected_tokens=sum(answer.num_drafted - answer.num_accepted for answer in answers),
    )


def _mean_gap_s(answer: GenerationState) -> float:
    return ((answer.last_s or 0.0) - (answer.first_s or 0.0)) / (answer.num_tokens - 1)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
