"""Structs to bytes and back, and frames cut anywhere."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.codec import HEADER_NBYTES, FrameReader, decoder, encode, frame
from contracts.events import (
    Event,
    EventFrame,
    Failed,
    Finished,
    FinishReason,
    Prefilled,
    PromptScored,
    PromptToken,
    Token,
    Tokens,
)
from contracts.handoff import Abort, ChunkHeader, Fin, Grant, HandoffMessage, Offer
from contracts.ids import BlockId, Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.request import Cancel, Job, JobMessage, Route, WorkerRef
from contracts.sampling import SamplingParams

R, E = RequestId("r"), Epoch(3)
REF = WorkerRef(WorkerId("w"), Incarnation("i"), "http://w", "w:1")
FIRST = Token(0, 42, -0.5, [(42, -0.5), (7, -1.25)])
HANDOFF = [
    Offer(R, E, 100, "layout"),
    Grant(R, E, [[BlockId(5), BlockId(2)]], 32),
    ChunkHeader(R, E, 1, 32, 20, "layout", 4096, 2**63),
    Fin(R, E, 2, FIRST, 16),
    Offer(R, E, 100, "layout", is_bound=True),
    Fin(R, E, 2, Token(9, 7), 16, num_tokens=41, drawn=[Token(8, 42, -0.5, [(42, -0.5)])]),
    Abort(R, E, "cancelled", "the client left"),
]
EVENTS = [
    PromptScored(R, E, 1, [PromptToken(5, -2.5, 3, [(42, -0.5), (7, -1.25)]), PromptToken(6, -1.0, 1, [])]),
    Prefilled(R, E, 16, {"queue": 0.1}),
    Tokens(R, E, [FIRST, Token(1, 3)]),
    Finished(R, E, 2, FinishReason.LENGTH, {}),
    Failed(R, E, "unavailable", "words"),
]
JOBS = [
    Job(
        Route(R, E, REF, REF),
        GatewayId("g"),
        [1, 2, 3],
        SamplingParams(max_tokens=4, seed=9, logit_bias={5: -1.0}),
        30.0,
    ),
    Cancel(R, E, "why"),
]


@pytest.mark.parametrize("message", HANDOFF, ids=lambda m: type(m).__name__)
def test_handoff_messages_come_back_as_what_they_were(message):
    assert decoder(HandoffMessage).decode(encode(message)) == message


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_events_come_back_as_what_they_were(event):
    whole = EventFrame(WorkerId("w"), Incarnation("i"), 0, [event])
    assert decoder(EventFrame).decode(encode(whole)) == whole
    assert decoder(Event).decode(encode(event)) == event


@pytest.mark.parametrize("message", JOBS, ids=lambda m: type(m).__name__)
def test_jobs_come_back_as_what_they_were(message):
    assert decoder(JobMessage).decode(encode(message)) == message


def test_a_message_of_another_kind_is_refused():
    with pytest.raises(msgspec.ValidationError):
        decoder(HandoffMessage).decode(encode(JOBS[0]))


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_a_decode_error(data):
    try:
        decoder(JobMessage).decode(data)
    except msgspec.DecodeError as error:
        assert str(error)


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=8), st.lists(st.integers(1, 9), min_size=1))
def test_frames_survive_any_cut(messages, cuts):
    data, reader, found = b"".join(frame(message) for message in messages), FrameReader(), []
    start = 0
    while start < len(data):
        size = cuts[start % len(cuts)]
        found += reader.feed(data[start : start + size])
        start += size
    assert [decoder(list[int]).decode(payload) for payload in found] == messages


def test_a_frame_over_the_limit_is_refused_before_it_is_read():
    reader = FrameReader(max_nbytes=10)
    with pytest.raises(ValueError, match="11 bytes"):
        list(reader.feed((11).to_bytes(HEADER_NBYTES, "little")))


def test_good_frames_come_before_the_error_of_a_bad_one_read_with_them():
    reader, found = FrameReader(max_nbytes=10), []
    with pytest.raises(ValueError, match="11 bytes"):
        for payload in reader.feed(frame([1]) + frame([2]) + (11).to_bytes(HEADER_NBYTES, "little")):
            found.append(decoder(list[int]).decode(payload))
    assert found == [[1], [2]]
