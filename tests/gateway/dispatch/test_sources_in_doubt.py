"""A source that was not told that its answer has moved keeps it paused until the answer ends, or it asks."""

import asyncio

import pytest

from contracts.events import Failed, Finished, FinishReason, Token, Tokens
from contracts.ids import Epoch, RequestId, WorkerId
from contracts.node import WorkerRole
from contracts.request import Route
from coordinator.migration_policy import MigrationReason
from gateway.dispatch.request_state_machine import InflightRequest
from testing.fake_worker import FakeWorker
from tests.gateway.gateway_rig import GATEWAY, SECRET, Rig, gateway, pair

ASK = {"prompt": "one two three", "max_tokens": 500}
PACE_S = 0.02


@pytest.mark.parametrize("is_left", [True, False], ids=["the client leaves", "its worker ends it"])
async def test_the_end_of_an_answer_frees_the_source_that_has_not_said_that_it_moved(checkpoint, is_left: bool):
    workers = [FakeWorker(WorkerId(name), WorkerRole.MIXED, SECRET, period_s=PACE_S) for name in ("m0", "m1")]
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        ask = ASK if is_left else ASK | {"max_tokens": 8}
        asking = asyncio.create_task(client.post("/v1/completions", json=ask))
        await rig.until(lambda: [live for live in _live(rig) if live.source(0.0) is not None])
        (live,) = _live(rig)
        _move(rig, live)
        assert live.workers == [workers[1].node.info.ref]
        if is_left:
            asking.cancel()
        else:
            tokens = [Token(index, 5) for index in range(live.answer.num_tokens, 8)]
            end = Finished(live.request_id, live.epoch, 8, FinishReason.LENGTH, {})
            workers[1].publish(GATEWAY, [Tokens(live.request_id, live.epoch, tokens), end])
        await rig.until(lambda: any(cancel.epoch == 2 for cancel in workers[0].cancels))
        await asyncio.gather(asking, return_exceptions=True)


def _live(rig: Rig) -> list[InflightRequest]:
    return list(rig.front.dispatch._live.values())


def _move(rig: Rig, live: InflightRequest) -> None:
    """Let the destination tell a token, as it does behind a commit that the source has not read."""
    dispatch, (source, destination) = rig.front.dispatch, rig.workers
    route = Route(live.request_id, live.take_epoch(), source.node.info.ref, destination.node.info.ref)
    rig.store.end_migration = _forget_place
    dispatch.migrations._reasons[live.request_id, route.epoch] = MigrationReason.BALANCE
    assert live.on_migration_placed(route)
    dispatch._on_event(destination.worker_id, Tokens(live.request_id, route.epoch, [Token(live.answer.num_tokens, 5)]))


async def _forget_place(request_id: RequestId, epoch: Epoch, is_moved: bool) -> None:
    """The store of the rig keeps no places of migrations."""


async def test_a_source_whose_answer_has_ended_is_told_whenever_it_asks(checkpoint):
    async with gateway(checkpoint, pair()) as rig:
        asked = Failed(RequestId("old"), Epoch(2), "transfer_failed", "it is not known whether b has the answer")
        for num_asked in range(1, 4):
            rig.workers[1].publish(GATEWAY, [asked])
            await rig.until(lambda told=num_asked: len(rig.workers[1].cancels) == told)
        assert {(cancel.request_id, cancel.epoch) for cancel in rig.workers[1].cancels} == {("old", 2)}
        assert rig.workers[0].cancels == []
