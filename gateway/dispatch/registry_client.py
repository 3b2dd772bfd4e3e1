"""The gateway's use of the coordinator's store: placing, ending and keeping its own requests.

coordinator.placement chooses the workers, in this process; the store only claims them.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from contracts.errors import RegistryError, Unavailable
from contracts.ids import Epoch, GatewayId, RequestId, WorkerId
from contracts.node import Node
from contracts.request import Route, WorkerRef
from coordinator.placement.placer import Placer, PlaceRequest
from coordinator.placement.prefixes import PromptPrefixes
from coordinator.request_states import RequestState
from coordinator.store.store import Store
from service.outage_log import OutageLog

log = logging.getLogger(__name__)

LEASE_S = 10.0
PATIENCE_S, RETRY_S = 3.0, 0.1
"""How long a request waits for a registry that falls silent, and between tries: a busy host may keep Redis from its
CPU for longer than a call waits. Once it was silent for so long, nobody waits until it answers again."""

MAX_UNTOLD = 10_000
"""Ends that are kept while Redis is silent, at most; a lease ends the oldest of more."""


class PlaceUnknown(Unavailable):
    """The store did not answer: it may have placed the request, or do so yet, until it is told of the end."""


class Placement(Protocol):
    """Raises Overloaded or Unavailable; every call has its own deadline.

    `chain_start`: of the prompt's hashes (contracts.request.chain_start), by which placement knows who has its prefix.
    """

    async def nodes(self) -> list[Node]: ...

    async def place(
        self,
        request_id: RequestId,
        epoch: Epoch,
        token_ids: Sequence[int],
        max_tokens: int,
        exclude: Sequence[WorkerId],
        chain_start: bytes = b"",
        room: float = 1.0,
    ) -> Route: ...

    async def place_migration(
        self, request_id: RequestId, epoch: Epoch, source: WorkerRef, need_tokens: int, exclude: Sequence[WorkerId]
    ) -> Route: ...

    async def end_migration(self, request_id: RequestId, epoch: Epoch, is_moved: bool) -> None: ...

    async def finish(self, request_id: RequestId, epoch: Epoch, end: RequestState) -> None: ...

    async def renew(self, request_ids: Sequence[RequestId]) -> None: ...

    async def close(self) -> None: ...


class StorePlacement:
    """Placement by the coordinator's store."""

    def __init__(self, store: Store, gateway_id: GatewayId) -> None:
        self._store, self._gateway_id = store, gateway_id
        self._placer = Placer(store)
        self._outage = OutageLog(log)
        self._untold: dict[tuple[RequestId, Epoch | None], Callable[[], Awaitable[object]]] = {}
        self._telling: asyncio.Task[None] | None = None

    async def nodes(self) -> list[Node]:
        return await self._placer.nodes()

    async def place(
        self,
        request_id: RequestId,
        epoch: Epoch,
        token_ids: Sequence[int],
        max_tokens: int,
        exclude: Sequence[WorkerId],
        chain_start: bytes = b"",
        room: float = 1.0,
    ) -> Route:
        request = PlaceRequest(
            request_id=request_id,
            epoch=epoch,
            gateway_id=self._gateway_id,
            num_tokens=len(token_ids),
            max_tokens=max_tokens,
            lease_s=LEASE_S,
            prefixes=PromptPrefixes(token_ids, chain_start),
            exclude=tuple(exclude),
            room=room,
        )
        try:
            route = await self._place_patiently(request)
        except RegistryError as error:
            self._outage.failed(f"requests are not placed: {error}", error.what)
            raise PlaceUnknown(nothing_placed(error.what)) from error
        self._outage.worked()
        return route

    async def _place_patiently(self, request: PlaceRequest) -> Route:
        """The same request and epoch have the same route, if an answer was lost."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await self._placer.place(request)
            except RegistryError as error:
                is_silent = error.what == "does not answer"
                if not is_silent or self._outage.is_on or time.monotonic() >= deadline_s:
                    raise
            await asyncio.sleep(RETRY_S)

    async def place_migration(
        self, request_id: RequestId, epoch: Epoch, source: WorkerRef, need_tokens: int, exclude: Sequence[WorkerId]
    ) -> Route:
        """Take a place for an answer that `source` decodes, beside the one that it has.

        If the store does not answer, it may have given one: that goes back as soon as it does.
        """
        try:
            return await self._placer.place_migration(request_id, epoch, source, need_tokens, exclude)
        except RegistryError:
            self._tell_later((request_id, epoch), partial(self._store.end_migration, request_id, epoch, False))
            raise

    async def end_migration(self, request_id: RequestId, epoch: Epoch, is_moved: bool) -> None:
        """Give one of the two places back.

        If the store does not answer now, it is told as soon as it does.
        """
        try:
            await self._store.end_migration(request_id, epoch, is_moved)
        except RegistryError as error:
            log.info("the end of migration %d of %s is told once the store answers: %s", epoch, request_id, error)
            self._tell_later((request_id, epoch), partial(self._store.end_migration, request_id, epoch, is_moved))

    async def finish(self, request_id: RequestId, epoch: Epoch, end: RequestState) -> None:
        """Tell the end of a request that is not placed again.

        If the store does not answer now, it is told as soon as it does.
        """
        try:
            await self._store.finish(request_id, epoch, end)
        except RegistryError as error:
            log.info("the end of %s is told once the store answers: %s", request_id, error)
            self._tell_later((request_id, None), partial(self._store.finish, request_id, epoch, end))

    def _tell_later(self, what: tuple[RequestId, Epoch | None], tell: Callable[[], Awaitable[object]]) -> None:
        """Keep an end, of a request or of a migration, until the store answers. Each may be told twice."""
        self._untold[what] = tell
        if len(self._untold) > MAX_UNTOLD:
            del self._untold[next(iter(self._untold))]
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_ends())

    async def _tell_ends(self) -> None:
        """Tell them in order: the end of a migration comes before that of its request."""
        while self._untold:
            await asyncio.sleep(RETRY_S)
            with suppress(RegistryError):
                while self._untold:
                    what, tell = next(iter(self._untold.items()))
                    await tell()
                    if self._untold.get(what) is tell:  # and not another end that came meanwhile
                        del self._untold[what]

    async def renew(self, request_ids: Sequence[RequestId]) -> None:
        await self._store.renew(request_ids, LEASE_S)

    async def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        await self._placer.close()
        await self._store.close()


def nothing_placed(what: str) -> str:
    """For clients, to whom the registry's address is nothing to know."""
    return f"the registry (Redis) {what}, so nothing new can be placed"
