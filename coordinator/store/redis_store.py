"""The store in Redis 7 or newer, or Valkey: one script, one round trip a call."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import DecodeError
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import AuthenticationError, ConnectionError, ReadOnlyError, RedisError, TimeoutError

from contracts.codec import decoder, encode
from contracts.errors import ConfigError, RegistryError, TandemError, Unavailable
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.node import Node, NodeInfo, NodeLoad
from contracts.request import Route
from coordinator.placement import policy as placement
from coordinator.request_states import RequestState, require_end
from coordinator.store.local_server import hide_password
from coordinator.store.lua_scripts import load_scripts
from coordinator.store.store import (
    ALIVE_S,
    STALE_RECORD_KEPT_S,
    Counts,
    Lead,
    PlaceRequest,
    Reaped,
    StateTransition,
    WorkerView,
    to_counts,
)

log = logging.getLogger(__name__)

TIMEOUT_S = 0.25
"""Of one exchange with Redis. Each call is repeated once on a fresh connection: all of them are idempotent."""
CALL_TIMEOUT_S = 4 * TIMEOUT_S
MAX_CONNECTIONS = 32
"""More calls than this at once wait for one another: Redis runs scripts one at a time anyway."""
MAX_BATCH = 1000
"""Moves or leases in one script: a longer one would keep the others waiting for more than a few milliseconds."""

_TOOK_A_PLACE = 2  # join.lua
_info = decoder(NodeInfo)
_load = decoder(NodeLoad)

Observer = Callable[[str, float], None]


def unobserved(call: str, seconds: float) -> None:
    """Nobody measures."""


class RedisStore:
    """`observe(call, seconds)` is told how long each call took.

    Connects when first used and again whenever the server is back, also to one that has lost everything.
    """

    def __init__(
        self,
        url: str,
        pool: str,
        *,
        alive_s: float = ALIVE_S,
        stale_record_kept_s: float = STALE_RECORD_KEPT_S,
        observe: Observer = unobserved,
    ) -> None:
        self._redis = _client(url)
        self._where = hide_password(url)
        self.prefix = f"tandem:{{{pool}}}:"
        self._alive_ms = int(alive_s * 1000)
        self._stale_record_kept_ms = int(stale_record_kept_s * 1000)
        self._observe = observe
        self._misread: set[bytes] = set()
        self._scripts: dict[str, AsyncScript] = {
            name: self._redis.register_script(source) for name, source in load_scripts().items()
        }

    async def join(self, info: NodeInfo, again: bool = False) -> bool:
        fields = _flat(_joined(info) | _loaded(NodeLoad()))
        word = await self._run("join", info.worker_id, info.incarnation, self._alive_ms, int(again), *fields)
        if not word:
            raise placement.superseded(info.worker_id)
        return bool(word == _TOOK_A_PLACE)

    async def heartbeat(self, worker_id: WorkerId, incarnation: Incarnation, load: NodeLoad) -> bool:
        fields = _flat(_loaded(load))
        beat = (
            worker_id,
            incarnation,
            self._alive_ms,
            load.queue_tokens,
            load.free_tokens,
            int(placement.is_busy(load)),
        )
        return bool(await self._run("heartbeat", *beat, *fields))

    async def leave(self, worker_id: WorkerId, incarnation: Incarnation, is_dead: bool = False) -> None:
        await self._run("leave", worker_id, incarnation, int(is_dead))

    async def nodes(self) -> list[Node]:
        return [worker.node for worker in await self.workers()]

    async def workers(self) -> list[WorkerView]:
        rows = await self._run("workers")
        views = [self._view(row) for row in rows]
        self._misread.intersection_update(row[0] for row in rows)
        return [view for view in views if view is not None]

    async def counts(self) -> Counts:
        states, counters = await self._run("counts")
        return to_counts(_ints(states), _ints(counters))

    async def place(self, request: PlaceRequest) -> Route:
        need_tokens = placement.decode_need(request.num_tokens, request.max_tokens)
        answer = await self._run(
            "place",
            request.request_id,
            request.epoch,
            request.gateway_id,
            request.num_tokens,
            need_tokens,
            int(request.lease_s * 1000),
            len(request.exclude),
            *request.exclude,
            *request.prefix_hashes,
        )
        if answer[0] != b"ok":
            raise _refusal(answer, request)
        try:
            prefill, decode = (_info.decode(blob).ref for blob in answer[1:])
        except DecodeError as error:
            raise Unavailable(f"a worker of another release is in this pool: {error}") from error
        return Route(request.request_id, request.epoch, prefill, decode)

    async def advance(self, moves: Sequence[StateTransition]) -> list[bool]:
        done: list[bool] = []
        for first in range(0, len(moves), MAX_BATCH):
            batch = moves[first : first + MAX_BATCH]
            flat = [item for move in batch for item in (move.request_id, move.epoch, move.to.value)]
            done += map(bool, await self._run("advance", *flat))
        return done

    async def finish(self, request_id: RequestId, epoch: Epoch, state: RequestState = RequestState.FINISHED) -> bool:
        require_end(state)
        return bool(await self._run("finish", request_id, epoch, state.value))

    async def renew(self, request_ids: Sequence[RequestId], lease_s: float) -> int:
        num_renewed = 0
        for first in range(0, len(request_ids), MAX_BATCH):
            num_renewed += await self._run("renew", int(lease_s * 1000), *request_ids[first : first + MAX_BATCH])
        return num_renewed

    async def reap(self, candidate: str) -> list[Reaped]:
        rows = await self._run("reap", candidate, self._stale_record_kept_ms)
        return [Reaped(RequestId(r.decode()), Epoch(epoch), GatewayId(g.decode())) for r, epoch, g in rows]

    async def lead(self, candidate: str, ttl_s: float) -> Lead:
        return Lead(await self._run("lead", candidate, int(ttl_s * 1000)))

    async def resign(self, candidate: str) -> None:
        await self._run("resign", candidate)

    async def ping(self) -> None:
        await self._timed("ping", self._redis.ping())

    async def close(self) -> None:
        await self._redis.aclose()

    def _view(self, row: list[Any]) -> WorkerView | None:
        """None, said once, for a worker of a release that writes otherwise: the others are not to suffer."""
        try:
            return _worker_view(row)
        except DecodeError as error:
            if row[0] not in self._misread:
                self._misread.add(row[0])
                log.warning("a worker of another release is in this pool, passed over: %s", error)
            return None

    async def _run(self, name: str, *args: Any) -> Any:
        return await self._timed(name, self._scripts[name](keys=[self.prefix], args=args))

    async def _timed(self, name: str, call: Awaitable[Any]) -> Any:
        """Raises RegistryError; nothing of Redis leaves this class."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            with _cancellable():
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    return await call
        except AuthenticationError as error:  # a ConnectionError to Redis' client, but Redis did answer
            words = f"Redis at {self._where} wants another password, or user: {error}"
            raise RegistryError(words, "refuses") from error
        except (ConnectionError, TimeoutError, OSError) as error:
            reason = str(error) or "no answer in time"
            raise RegistryError(f"Redis does not answer at {self._where}: {reason}", "does not answer") from error
        except RedisError as error:
            raise RegistryError(f"Redis at {self._where} refused {name}: {error}", "refuses") from error
        finally:
            self._observe(name, loop.time() - began_s)


@contextmanager
def _cancellable() -> Iterator[None]:
    """A cancel that comes inside is raised at the end at the latest. Redis' client waits by `asyncio.wait_for`, which
    before Python 3.12 forgets one that comes when what it waits for is done: a loop of calls would go on for ever.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancels = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > num_cancels:
            raise asyncio.CancelledError


def _client(url: str) -> Redis:
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=CALL_TIMEOUT_S,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),
            retry_on_error=[ReadOnlyError],  # a replica since a failover: its name may lead elsewhere now
        )
        return Redis.from_pool(pool)
    except ValueError as error:
        raise ConfigError(f"redis_url {hide_password(url)!r}: {error}") from error


def _joined(info: NodeInfo) -> dict[str, Any]:
    return {
        "incarnation": info.incarnation,
        "info": encode(info),
        "role": info.role.value,
        "layout_id": info.layout_id,
        "sends": " ".join(info.send_words),
        "takes": " ".join(info.receive_words),
        "max_model_len": info.max_model_len,
        "capacity": info.capacity_tokens,
        "pending": 0,
        "prefills": 0,
        "reserved": 0,
        "decodes": 0,
        "answers": 0,
        "beyond_pending": 0,
        "beyond_reserved": 0,
    }


def _loaded(load: NodeLoad) -> dict[str, Any]:
    return {
        "load": encode(load),
        "step_tokens": load.prompt_tokens_per_mixed_step,
        "prefill_rate": repr(placement.sound_rate(load.prefill_rate)),
        "decode_rate": repr(placement.sound_rate(load.decode_rate)),
        "transfer_rate": repr(placement.sound_rate(load.transfer_rate)),
        "draining": int(load.draining),
        "bad_paths": " ".join(load.bad_paths),
    }


def _flat(fields: dict[str, Any]) -> list[Any]:
    return [item for pair in fields.items() for item in pair]


def _ints(flat: Any) -> dict[str, int]:
    """A hash as a script returns it: names and counts in one list."""
    return {name.decode(): int(count) for name, count in zip(flat[::2], flat[1::2], strict=True)}


def _worker_view(row: list[Any]) -> WorkerView:
    info, load, alive, *credits = row
    pending, prefills, reserved, decodes, answers = map(int, credits)
    return WorkerView(
        node=Node(info=_info.decode(info), load=_load.decode(load), alive=bool(alive)),
        pending_tokens=pending,
        num_prefills=prefills,
        reserved_tokens=reserved,
        num_decodes=decodes,
        num_answers=answers,
    )


def _refusal(answer: list[Any], request: PlaceRequest) -> TandemError:
    word, *rest = (item.decode() if isinstance(item, bytes) else item for item in answer)
    match word:
        case "overloaded":
            return placement.overloaded(rest[0], float(rest[1]))
        case "no_worker":
            return placement.no_worker(rest[0])
        case "too_long":
            return placement.too_long(request.num_tokens, int(rest[0]))
        case "no_pair":
            return placement.no_pair()
    return placement.stale(request.request_id, request.epoch)
