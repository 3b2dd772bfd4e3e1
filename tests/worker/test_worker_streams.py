"""Event streams: no gaps in a sequence, one stream per gateway, and the end of one is told after its grace."""

import asyncio
import time

import pytest

from contracts.codec import FrameReader, decoder
from contracts.events import EventFrame, Failed
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from worker.front import event_streams as streams_module
from worker.front.event_streams import EventStreams

pytestmark = pytest.mark.slow

GATEWAY = GatewayId("g")
decode = decoder(EventFrame).decode


def make_streams() -> EventStreams:
    return EventStreams(WorkerId("w"), Incarnation("1"))


def failed(name: str) -> Failed:
    return Failed(RequestId(name), Epoch(1), "internal", "words")


async def read(listener, num_frames: int) -> list[EventFrame]:
    reader, frames = FrameReader(), []
    while len(frames) < num_frames:
        frames += [decode(payload) for payload in reader.feed(await anext(listener))]
    return frames


def ended(streams: EventStreams) -> list[GatewayId]:
    return [gateway_id for gateway_id, _ in streams.broken(grace_s=0.0)]


async def test_a_stream_says_hello_and_then_everything_in_order_without_gaps():
    streams = make_streams()
    listener = streams.listen(GATEWAY)
    hello = await read(listener, 1)
    for number in range(5):
        streams.publish(GATEWAY, [failed(f"r{number}")])
    frames = hello + await read(listener, 5)
    assert [frame.sequence for frame in frames] == list(range(6))
    assert [frame.events for frame in frames] == [[], *([failed(f"r{number}")] for number in range(5))]


async def test_a_quiet_stream_beats(monkeypatch):
    monkeypatch.setattr(streams_module, "HEARTBEAT_S", 0.01)
    listener = make_streams().listen(GATEWAY)
    frames = await read(listener, 3)
    assert [(frame.sequence, frame.events) for frame in frames] == [(0, []), (1, []), (2, [])]


async def test_a_second_stream_of_a_gateway_ends_the_first():
    streams = make_streams()
    first = streams.listen(GATEWAY)
    await read(first, 1)
    second = streams.listen(GATEWAY)
    await read(second, 1)
    with pytest.raises(StopAsyncIteration):
        await anext(first)
    streams.publish(GATEWAY, [failed("r")])
    assert (await read(second, 1))[0].events == [failed("r")]
    assert ended(streams) == [GATEWAY]


async def test_what_comes_late_of_a_former_stream_is_known_as_such():
    streams = make_streams()
    second = streams.listen(GATEWAY, 2)
    await read(second, 1)
    with pytest.raises(StopAsyncIteration):
        await anext(streams.listen(GATEWAY, 1))
    assert [streams.is_former(GATEWAY, number) for number in (0, 1, 2, 3)] == [False, True, False, False]
    assert not streams.is_former(GatewayId("other"), 1)
    streams.publish(GATEWAY, [failed("r")])
    assert (await read(second, 1))[0].events == [failed("r")]
    assert ended(streams) == []


async def test_a_stream_that_ended_is_told_once_with_its_time():
    streams = make_streams()
    listener = streams.listen(GATEWAY)
    await read(listener, 1)
    await listener.aclose()
    assert not streams.has(GATEWAY)
    assert streams.broken(grace_s=60.0) == []
    before_s = time.monotonic()
    again = streams.listen(GATEWAY)
    await read(again, 1)
    [(gateway_id, broken_s)] = streams.broken(grace_s=0.0)
    assert gateway_id == GATEWAY and broken_s <= before_s
    assert ended(streams) == []
    streams.close()
    assert ended(streams) == [GATEWAY]


async def test_a_gateway_that_reads_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(streams_module, "MAX_BACKLOG_NBYTES", 100)
    streams = make_streams()
    listener = streams.listen(GATEWAY)
    await read(listener, 1)
    for number in range(10):
        streams.publish(GATEWAY, [failed(f"r{number}")])
    with pytest.raises(StopAsyncIteration):
        await anext(listener)


async def test_a_gateway_that_is_stuck_is_gone_and_takes_no_more_memory(monkeypatch):
    monkeypatch.setattr(streams_module, "MAX_BACKLOG_NBYTES", 100)
    streams = make_streams()
    listener = streams.listen(GATEWAY)
    await read(listener, 1)  # and no more: as if to send this one took for ever
    stuck = streams._streams[GATEWAY]
    for number in range(10):
        streams.publish(GATEWAY, [failed(f"r{number}")])
    assert stuck.backlog == []
    assert not streams.has(GATEWAY)
    assert ended(streams) == [GATEWAY]
    await listener.aclose()
    assert ended(streams) == []


async def test_what_was_published_before_the_end_is_told():
    streams = make_streams()
    listener = streams.listen(GATEWAY)
    await read(listener, 1)
    streams.publish(GATEWAY, [failed("r")])
    streams.close()
    streams.publish(GATEWAY, [failed("late")])
    assert [frame.events for frame in await read(listener, 1)] == [[failed("r")]]
    with pytest.raises(StopAsyncIteration):
        await anext(listener)


async def test_closing_ends_every_stream():
    streams = make_streams()
    listeners = [streams.listen(GatewayId(f"g{number}")) for number in range(3)]
    for listener in listeners:
        await read(listener, 1)
    streams.close()
    for listener in listeners:
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(listener), 60.0)
