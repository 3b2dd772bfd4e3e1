"""Two versions of Tandem in one pool: a newer one may add, never change or drop what an older one reads."""

import msgspec
import pytest

from contracts.codec import decoder, encode
from contracts.events import Event, EventFrame, Failed, Finished, Moved, Prefilled, PromptScored, Tokens
from contracts.handoff import HandoffMessage
from contracts.node import NodeInfo, NodeLoad
from contracts.request import Cancel, Job, JobMessage, Route, WorkerRef
from contracts.sampling import SamplingParams

CHUNK = (
    "request_id",
    "epoch",
    "index",
    "first_token",
    "num_tokens",
    "layout_id",
    "nbytes",
    "checksum",
    "group",
)
FIELDS = {
    "offer": ("request_id", "epoch", "num_tokens", "layout_id"),
    "grant": ("request_id", "epoch", "pages", "skip_tokens"),
    "wait": ("request_id", "epoch", "reason"),
    "refuse": ("request_id", "epoch", "code", "reason"),
    "chunk": (*CHUNK, "loss"),
    "pull": (*CHUNK, "loss", "pages"),
    "fetched": ("request_id", "epoch", "index"),
    "fin": ("request_id", "epoch", "num_chunks", "first", "cached_tokens"),
    "commit": ("request_id", "epoch", "num_chunks", "nbytes"),
    "abort": ("request_id", "epoch", "code", "reason"),
    "abort_ack": ("request_id", "epoch"),
}
"""The handoff as it is spoken; to change or drop one of these would break a pool that is half upgraded."""

EVENTS = {
    "prompt_scored": PromptScored,
    "prefilled": Prefilled,
    "tokens": Tokens,
    "finished": Finished,
    "failed": Failed,
    "moved": Moved,
}
CANCEL = {"type": "cancel", "request_id": "r", "epoch": 1, "reason": "why"}
LOAD = {"num_running": 1, "prefill_rate": 2.0}


def kinds(union) -> dict[str, tuple[str, ...]]:
    return {kind.__struct_config__.tag: kind.__struct_fields__ for kind in union.__args__}


def test_the_handoff_is_spoken_as_it_was():
    spoken = kinds(HandoffMessage)
    assert {tag: spoken[tag][: len(fields)] for tag, fields in FIELDS.items()} == FIELDS


def test_every_event_has_its_tag():
    assert {kind.__struct_config__.tag: kind for kind in Event.__args__} == EVENTS


@pytest.mark.parametrize("union", [HandoffMessage, Event])
def test_every_message_carries_request_and_epoch(union):
    assert {fields[:2] for fields in kinds(union).values()} == {("request_id", "epoch")}


def test_fields_of_a_newer_version_are_passed_over():
    assert decoder(JobMessage).decode(encode(CANCEL | {"priority": 3})) == Cancel("r", 1, "why")  # type: ignore[arg-type]
    assert decoder(NodeLoad).decode(encode(LOAD | {"gpu_temperature": 40.0})) == NodeLoad(
        num_running=1, prefill_rate=2.0
    )


def test_what_an_older_version_does_not_send_has_a_default():
    assert decoder(NodeLoad).decode(encode({})) == NodeLoad()
    bare = decoder(SamplingParams).decode(encode({"max_tokens": 4, "seed": 1}))
    assert bare == SamplingParams(max_tokens=4, seed=1)


@pytest.mark.parametrize("missing", ["request_id", "epoch", "reason"])
def test_a_field_that_must_be_there_is_named(missing: str):
    message = {name: value for name, value in CANCEL.items() if name != missing}
    with pytest.raises(msgspec.ValidationError, match=f"`{missing}`"):
        decoder(JobMessage).decode(encode(message))


@pytest.mark.parametrize(
    ("kind", "message", "words"),
    [
        (JobMessage, CANCEL | {"type": "pause"}, "Invalid value 'pause'"),
        (HandoffMessage, {"type": "chunk2", "request_id": "r", "epoch": 1}, "Invalid value 'chunk2'"),
        (JobMessage, CANCEL | {"epoch": "1"}, "Expected `int`, got `str`"),
        (JobMessage, {"request_id": "r"}, "missing required field `type`"),
        (EventFrame, {"worker_id": "w", "incarnation": "i", "sequence": 0, "events": [{"type": "party"}]}, "'party'"),
        (NodeInfo, {"worker_id": "w", "role": "gpu"}, "Invalid enum value 'gpu'"),
    ],
)
def test_what_is_not_known_is_refused_and_said(kind, message, words):
    with pytest.raises(msgspec.ValidationError, match=words):
        decoder(kind).decode(encode(message))


def test_defaults_do_not_travel():
    """A job of a long prompt is mostly token ids; its sampling is a few bytes."""
    ref = WorkerRef("w", "i", "http://w", "w:1")  # type: ignore[arg-type]
    job = Job(Route("r", 1, ref, ref), "g", [], SamplingParams(max_tokens=4, seed=1), 10.0)  # type: ignore[arg-type]
    assert msgspec.msgpack.decode(encode(job))["sampling"] == {"max_tokens": 4, "seed": 1}


def test_a_local_route_is_one_whose_two_sides_are_one_worker():
    one, other = (WorkerRef(name, "i", "u", "t") for name in ("w", "v"))  # type: ignore[arg-type]
    assert Route("r", 1, one, one).is_local and not Route("r", 1, one, other).is_local  # type: ignore[arg-type]
