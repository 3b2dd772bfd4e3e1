"""What clients hear of workers' faults, and what the log has of them."""

import json
import re

import pytest

from contracts import errors
from contracts.events import Failed
from contracts.ids import Epoch, RequestId
from gateway.dispatch.client_error_messages import WORDS, for_clients
from tests.gateway.gateway_rig import gateway, pair

pytestmark = pytest.mark.slow

INTERNAL = "rank 0 of decode-0-7f3a at 10.0.0.7:41873/ucx lost <EP 0x7f81aa30>: /dev/shm/kv is gone"
CODES = sorted({*WORDS, "internal", "something_new"})
ASK = {"prompt": "one two three", "max_tokens": 4}


def test_every_error_of_the_tree_has_words_of_its_own_or_is_our_fault():
    kinds = [errors.TandemError, *_below(errors.TandemError)]
    told = {kind.code: for_clients(Failed(RequestId("r"), Epoch(1), kind.code, INTERNAL)).message for kind in kinds}
    own = {errors.RequestError.code, errors.NotFound.code}
    assert {code for code, words in told.items() if words == INTERNAL} == own
    assert {code for code, words in told.items() if "gateway's log" in words} == {"internal", "config"}


def _below(kind: type) -> list[type[errors.TandemError]]:
    return [found for child in kind.__subclasses__() for found in (child, *_below(child))]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("is_shown", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_no_error_shows_what_is_inside(checkpoint, monkeypatch, caplog, code, is_shown, stream):
    """Before and after the first token, whole and streamed, and whoever of the two workers failed."""
    caplog.set_level("INFO", "gateway.dispatch.dispatcher")
    monkeypatch.setattr("gateway.dispatch.dispatcher.REPLAY_PERIOD_S", 0.0)
    monkeypatch.setattr("gateway.dispatch.attempt_budget.REPLAY_WAIT_S", 0.0)
    monkeypatch.setattr("gateway.dispatch.attempt_budget.MAX_REPLAYS", 0)
    monkeypatch.setattr("gateway.dispatch.attempt_budget.HANDOFF_RETRY_S", 0.0)
    workers = pair()
    failing = workers[1] if is_shown else workers[0]

    async def fail(job):
        failing.publish(job.gateway_id, [Failed(job.request_id, job.epoch, code, INTERNAL)])

    monkeypatch.setattr(failing, "_answer", fail)
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        reply = await client.post("/v1/completions", json=ASK | {"stream": stream})
        await rig.until(lambda: rig.front.dispatch.num_inflight == 0)
    last = reply.text.strip().split("data: ")[-2 if "[DONE]" in reply.text else -1]
    error = json.loads(last)["error"]
    assert error["code"] >= 429 and error["message"]
    for secret in ("decode-0", "10.0", "0x", "/dev", "rank", "d0", "p0"):
        assert secret not in re.sub(r'"id":"[^"]*"', "", reply.text), secret
    assert any(INTERNAL in record.message for record in caplog.records)
