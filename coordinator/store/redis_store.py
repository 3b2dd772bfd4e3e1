"""The store in Redis 7 or newer, or Valkey: one script, one round trip a call."""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from msgspec.msgpack import Decoder
from redis.exceptions import AuthenticationError, ConnectionError, NoScriptError, RedisError, TimeoutError

from contracts.codec import WIRE_VERSION, decoder, encode
from contracts.errors import ConfigError, RegistryError
from contracts.held_prefixes import HeldChange
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.node import Node, NodeInfo, NodeLoad
from coordinator import refusals
from coordinator.placement import policy as placement
from coordinator.request_states import RequestState, require_end
from coordinator.store.local_server import hide_password
from coordinator.store.lua_scripts import Script, load_scripts
from coordinator.store.redis_connections import EXCHANGE_TIMEOUT_S, RedisConnections
from coordinator.store.store import (
    ALIVE_S,
    HELD_KEPT_S,
    SHARED_TIER,
    STALE_RECORD_KEPT_S,
    Claim,
    Claimed,
    Counts,
    Lead,
    MigrationClaim,
    PoolRow,
    PoolUpdate,
    Reaped,
    StateTransition,
    WorkerCounts,
    WorkerView,
    to_counts,
)

CALL_TIMEOUT_S = 4 * EXCHANGE_TIMEOUT_S
MAX_ROWS = 64
"""Workers read by one script: a fraction of a millisecond in which others wait at Redis."""
PART_ROWS = 16
"""Workers decoded at once: a tenth of a millisecond in which no token leaves."""
ADOPTED_LEASE_MS = 4000
"""Lease of a request whose own was lost: its gateway renews once a second."""
MAX_BATCH = 1000
"""Moves or leases in one script: a longer one would keep the others waiting for more than a few milliseconds."""

_TOOK_A_PLACE = 2  # join.lua
_info: Decoder[NodeInfo] = decoder(NodeInfo)
_load: Decoder[NodeLoad] = decoder(NodeLoad)

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
        self._connections = _connections(url)
        self._where = hide_password(url)
        self.prefix = f"tandem:{{{pool}}}:{WIRE_VERSION}:"
        self._alive_ms = int(alive_s * 1000)
        self._stale_record_kept_ms = int(stale_record_kept_s * 1000)
        self._observe = observe
        self._scripts = load_scripts()

    async def join(self, info: NodeInfo, again: bool = False) -> bool:
        fields = _flat(_joined(info) | _loaded(NodeLoad()))
        word = await self._run("join", info.worker_id, info.incarnation, self._alive_ms, int(again), *fields)
        if not word:
            raise refusals.superseded(info.worker_id)
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
            int(placement.is_idle(load)),
        )
        return bool(await self._run("heartbeat", *beat, *fields))

    async def restate(self, info: NodeInfo) -> None:
        match await self._run("restate", info.worker_id, info.incarnation, info.role.value, encode(info)):
            case bytes() as side:
                raise refusals.last_of(side.decode(), info.worker_id)
            case 0:
                raise refusals.not_known(info.worker_id)
            case _:
                return

    async def leave(self, worker_id: WorkerId, incarnation: Incarnation, is_dead: bool = False) -> None:
        await self._run("leave", worker_id, incarnation, int(is_dead))

    async def nodes(self, at_most: int = 0) -> list[Node]:
        return [_worker_view(row).node for row in await self._run("workers", at_most)]

    async def workers(self) -> list[WorkerView]:
        return [_worker_view(row) for row in await self._run("workers", 0)]

    async def counts(self) -> Counts:
        states, counters = await self._run("counts")
        return to_counts(_ints(states), _ints(counters))

    async def pool(self, since_us: int, is_full: bool) -> AsyncGenerator[PoolUpdate, None]:
        now_us, page_since, num_behind, last_id = 0, since_us, 0, b""
        while True:
            behind = last_id if is_full else num_behind
            now, page = await self._run("pool", page_since, MAX_ROWS, int(is_full), behind)
            now_us = now_us or int(now)
            for first in range(0, max(1, len(page)), PART_ROWS):
                rows = [_pool_row(row) for row in page[first : first + PART_ROWS]]
                yield PoolUpdate(now_us=now_us, rows=rows, is_full=is_full)
            # What changed since the first page is for the next read: a busy pool changes as fast as it is read.
            last_id, changed, *_ = page[-1] if page else (b"", now_us)
            last_us = int(float(changed))
            if len(page) < MAX_ROWS or (last_us > now_us and not is_full):
                return
            if not is_full:
                num_behind = num_behind + MAX_ROWS if last_us == page_since else 0
                page_since = last_us

    async def prefix_holders(self, hashes: Sequence[bytes], blocks: Sequence[bytes] = ()) -> list[bytes]:
        if not (hashes or blocks):
            return []
        return (await self._run("prefixes", b"".join(hashes), b"".join(blocks))).split(b"\n")

    async def publish_held(self, worker_id: WorkerId, incarnation: Incarnation, changes: Sequence[HeldChange]) -> bool:
        kept_ms, flat = int(HELD_KEPT_S * 1000), [x for c in changes for x in (c.tier, c.key, int(c.is_held))]
        return bool(await self._run("held", worker_id, incarnation, kept_ms, SHARED_TIER, *flat))

    async def claim(self, claim: Claim, prefixes: Sequence[tuple[bytes, bytes]] = ()) -> Claimed:
        others = b"".join(others + b"\n" for _, others in prefixes)
        word, *rest = await self._run("claim", encode(claim), b"".join(digest for digest, _ in prefixes), others)
        match word:
            case b"ok":
                return Claimed(route=rest[1], counts=[_counts(row) for row in rest[0].split(b"\n")])
            case b"refused":
                return Claimed(counts=[_counts(row) for row in rest[0].split(b"\n") if claim.workers])
            case b"again":
                prefill, decode = map(_info.decode, rest)
                return Claimed(repeated=(prefill.ref, decode.ref))
            case b"gone":
                raise refusals.no_worker(rest[0].decode())
            case _:
                raise refusals.stale(claim.request_id, claim.epoch)

    async def claim_migration(self, claim: MigrationClaim) -> bool:
        worker = claim.worker
        place = worker.worker_id, worker.term, claim.need_tokens, int(worker.max_reserved_tokens)
        return bool(await self._run("migrate", claim.request_id, claim.epoch, *place))

    async def end_migration(self, request_id: RequestId, epoch: Epoch, is_moved: bool) -> bool:
        return bool(await self._run("migrated", request_id, epoch, int(is_moved)))

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

    async def is_sound(self) -> bool:
        return bool(await self._run("check"))

    async def recount(self) -> None:
        head, cursor = f"{self.prefix}req:", 0
        while True:
            scan = self._connections.call("SCAN", cursor, "MATCH", f"{glob_escaped(head)}*", "COUNT", MAX_BATCH)
            cursor, keys = await self._timed("scan", scan)
            if keys:
                await self._run("adopt", ADOPTED_LEASE_MS, *(key.removeprefix(head.encode()) for key in keys))
            if not int(cursor):
                break
        await self._run("recount")

    async def lead(self, candidate: str, ttl_s: float) -> Lead:
        return Lead(await self._run("lead", candidate, int(ttl_s * 1000)))

    async def resign(self, candidate: str) -> None:
        await self._run("resign", candidate)

    async def ping(self) -> None:
        await self._timed("ping", self._connections.call("PING"))

    async def close(self) -> None:
        await self._connections.close()

    async def _run(self, name: str, *args: Any) -> Any:
        return await self._timed(name, self._evaluated(self._scripts[name], args))

    async def _evaluated(self, script: Script, args: tuple[Any, ...]) -> Any:
        try:
            return await self._connections.call("EVALSHA", script.sha, 1, self.prefix, *args)
        except NoScriptError:
            return await self._connections.call("EVAL", script.source, 1, self.prefix, *args)

    async def _timed(self, name: str, call: Awaitable[Any]) -> Any:
        """Raises RegistryError; nothing of Redis leaves this class."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
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


def glob_escaped(words: str) -> str:
    """Return a pattern of Redis that stands for these words alone."""
    return re.sub(r"([\\*?\[\]^])", r"\\\1", words)


def _connections(url: str) -> RedisConnections:
    try:
        return RedisConnections(url)
    except ValueError as error:
        raise ConfigError(f"redis_url {hide_password(url)!r}: {error}") from error


def _joined(info: NodeInfo) -> dict[str, Any]:
    return {
        "incarnation": info.incarnation,
        "role": info.role.value,
        "info": encode(info),
        "capacity": info.capacity_tokens,
        "pending": 0,
        "prefills": 0,
        "reserved": 0,
        "decodes": 0,
        "answers": 0,
        "beyond_pending": 0,
        "beyond_reserved": 0,
        "served": 0,
    }


def _loaded(load: NodeLoad) -> dict[str, Any]:
    return {"load": encode(load), "draining": int(load.draining)}


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


def _pool_row(row: list[Any]) -> PoolRow:
    worker_id = WorkerId(row[0].decode())
    if len(row) < 3:
        return PoolRow(worker_id, None)
    counts, load, info = row[2:]
    return PoolRow(worker_id, _counts(counts), _load.decode(load), _info.decode(info) if info else None)


def _counts(row: bytes) -> WorkerCounts | None:
    """Return the counts from ROW of common.lua; None of a worker that is gone."""
    if not row:
        return None
    term, until, draining, pending, beyond_pending, reserved, beyond_reserved, decodes, answers, served = row.split()
    return WorkerCounts(
        term=term.decode(),
        alive_until_ms=int(until),
        is_draining=draining == b"1",
        pending_tokens=max(0, int(pending) + int(beyond_pending)),
        reserved_tokens=int(reserved) + int(beyond_reserved),
        num_decodes=int(decodes),
        num_answers=int(answers),
        num_served_blocks=int(served),
    )
