"""The actions that the state machine of a request returns, and the dispatcher performs."""

from collections.abc import Mapping

import msgspec

from contracts.errors import TandemError
from contracts.ids import Epoch, WorkerId
from contracts.request import Cancel, CancelMigration, Route, WorkerRef
from coordinator.request_states import RequestState
from gateway.generation.generation_state import OutputDelta


class Deliver(msgspec.Struct, frozen=True):
    """Give this to the answer's reader."""

    delta: OutputDelta


class LeavePlace(msgspec.Struct, frozen=True):
    """Call `on_left` once what came together with these faults is read.

    `is_lost`: a worker was lost, not just full.
    """

    faults: Mapping[WorkerId, TandemError]
    is_lost: bool


class PlaceAgain(msgspec.Struct, frozen=True):
    """Look for another place.

    `error`: why the old one was left, for the client if there is none. `waits`: not at once, since the last place was
    lost before its first token. `is_replay`: it goes on behind what was shown.
    """

    error: TandemError
    waits: bool
    is_replay: bool


class SendJobs(msgspec.Struct, frozen=True):
    """Send the jobs of the current attempt to its workers."""


class CancelAttempt(msgspec.Struct, frozen=True):
    """Tell these workers to let go of an attempt, or to go on with the answer themselves."""

    workers: list[WorkerRef]
    cancel: Cancel | CancelMigration


class AwaitDecode(msgspec.Struct, frozen=True):
    """See after a while whether decode goes on alone, then ask `on_undecoded`.

    `num_looks`: how long, in seconds.
    """

    route: Route
    num_looks: int


class ReturnPlace(msgspec.Struct, frozen=True):
    """Give back a place that is not needed any more."""

    epoch: Epoch
    end: RequestState


class EndMigration(msgspec.Struct, frozen=True):
    """Give back the place that an answer does not have any more, or did not get."""

    route: Route
    is_moved: bool


class Finish(msgspec.Struct, frozen=True):
    """End the request. `reason`: why its workers are to let go of it; empty if they have."""

    reason: str
    end: RequestState


Action = (
    Deliver | LeavePlace | PlaceAgain | SendJobs | CancelAttempt | AwaitDecode | ReturnPlace | EndMigration | Finish
)


def migration_cancels(route: Route, reason: str) -> list[Action]:
    """Return what ends a migration at both of its workers: the answer goes on at its source."""
    source, destination = [route.prefill], [route.decode]
    return [
        CancelAttempt(source, CancelMigration(route.request_id, route.epoch, reason)),
        CancelAttempt(destination, Cancel(route.request_id, route.epoch, reason)),
    ]
