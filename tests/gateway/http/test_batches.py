"""Many prompts in one request: what they share is made once, and the event loop goes on for others meanwhile."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from contracts.codec import encode
from contracts.errors import Unavailable
from contracts.ids import Epoch, RequestId
from contracts.request import Cancel, Job, Route
from contracts.sampling import SamplingParams
from gateway.dispatch.worker_link import MAX_POST_NBYTES
from gateway.prompting.chat_template import Prompting
from gateway.prompting.pipeline import prepare_completion
from gateway.prompting.request_fields import CompletionRequest
from gateway.tokenization.tokenizer import LONG_CHARS
from tests.gateway.gateway_rig import GATEWAY
from worker.front.app import MAX_BODY_NBYTES

pytestmark = pytest.mark.slow

WORDS = "one two three four five six "


@pytest.fixture
def prompting(checkpoint) -> Prompting:
    return Prompting(checkpoint)


async def test_what_prompts_share_is_made_once(rig, client, monkeypatch):
    made, spellings = [], rig.front.prompting.spellings
    monkeypatch.setattr(rig.front.prompting, "spellings", lambda words: made.append(words) or spellings(words))
    ask = {"prompt": ["one", "one", "two three"], "max_tokens": 2, "bad_words": ["no"], "logit_bias": {"5": -1}}
    assert (await client.post("/v1/completions", json=ask)).status_code == 200
    assert made == [["no"]]
    jobs = [job.sampling for job in rig.workers[0].jobs]
    assert len({job.seed for job in jobs}) == 3 and all(job.logit_bias == {5: -1} for job in jobs)


@pytest.mark.parametrize("num_prompts", [1, 8])
async def test_prompts_that_are_long_together_are_tokenized_beside_the_event_loop(prompting, monkeypatch, num_prompts):
    threads, encode = set(), prompting._encode

    def noted(text: str, add_special_tokens: bool) -> list[int]:
        threads.add(threading.current_thread())
        return encode(text, add_special_tokens)

    monkeypatch.setattr(prompting, "_encode", noted)
    text = WORDS * (LONG_CHARS // 8 // len(WORDS) + 1)
    encoded = await prompting.encode([text] * num_prompts, add_special_tokens=True)
    assert encoded == [prompting.tokenizer.encode(text).ids] * num_prompts
    assert (threading.current_thread() in threads) == (num_prompts == 1)


async def test_where_tokens_begin_is_found_beside_the_event_loop_too(prompting, monkeypatch):
    threads, offsets = set(), prompting._offsets
    monkeypatch.setattr(
        prompting, "_offsets", lambda *prompt: threads.add(threading.current_thread()) or offsets(*prompt)
    )
    text = WORDS * (LONG_CHARS // 8 // len(WORDS) + 1)
    ids = prompting.tokenizer.encode(text).ids
    found = await prompting.offsets([ids] * 8, [text] * 8)
    assert len(found) == 8 and all(len(starts) == len(ids) for starts in found)
    assert threading.current_thread() not in threads


class Watched:
    """A tokenizer that says whether it is at work."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer, self.is_busy = tokenizer, False

    def encode(self, *args, **options):
        return self._watch(self._tokenizer.encode, *args, **options)

    def encode_batch(self, *args, **options):
        return self._watch(self._tokenizer.encode_batch, *args, **options)

    def decode(self, *args, **options):
        return self._watch(self._tokenizer.decode, *args, **options)

    def decode_batch(self, *args, **options):
        return self._watch(self._tokenizer.decode_batch, *args, **options)

    def _watch(self, call, *args, **options):
        self.is_busy = True
        try:
            return call(*args, **options)
        finally:
            self.is_busy = False


async def turns_beside(work: Coroutine[Any, Any, None], watched: Watched) -> int:
    """Return how often the event loop turned while the tokenizer was at work."""
    working, num_turns = asyncio.create_task(work), 0
    while not working.done():
        await asyncio.sleep(0.001)
        num_turns += watched.is_busy
    await working
    return num_turns


async def test_the_event_loop_turns_while_one_long_text_is_tokenized(prompting):
    watched = prompting.tokenizer = Watched(prompting.tokenizer)
    found = []

    async def encode() -> None:
        found.extend(await prompting.encode([WORDS * 20_000], add_special_tokens=True))

    assert await turns_beside(encode(), watched) > 3
    assert len(found[0]) > 20_000


@pytest.mark.parametrize("endpoint", ["/detokenize", "/v1/completions"])
async def test_the_event_loop_turns_while_tokens_are_made_text(rig, client, endpoint):
    """In one of a few tries: where others want the processor, a single one may see no turn."""
    watched = rig.front.prompting.tokenizer = Watched(rig.front.prompting.tokenizer)

    async def ask() -> None:
        if endpoint == "/detokenize":
            await client.post(endpoint, json={"tokens": [7] * 300_000})
        else:
            echoed = CompletionRequest(prompt=[[7] * 2000] * 150, echo=True)
            await prepare_completion(echoed, rig.front.prompting, rig.front.limits)

    assert max([await turns_beside(ask(), watched) for _ in range(4)]) > 3


async def test_jobs_that_are_long_together_do_not_make_a_worker_refuse_those_of_others(rig):
    assert MAX_POST_NBYTES < MAX_BODY_NBYTES
    worker, workers = rig.workers[0], rig.front.dispatch.workers
    ref = worker.node.info.ref

    def job(name: str, logit_bias: dict[int, float]) -> Job:
        sampling = SamplingParams(max_tokens=1, seed=0, logit_bias=logit_bias)
        return Job(Route(RequestId(name), Epoch(1), ref, ref), GATEWAY, [1], sampling, 10.0)

    long = [job(f"long{number}", dict.fromkeys(range(40_000), -1.0)) for number in range(100)]
    assert sum(len(encode(one)) for one in long) > MAX_BODY_NBYTES
    await asyncio.gather(*(workers.send(ref, one) for one in [*long, job("short", {})]))
    assert [one.request_id for one in worker.jobs] == [*(one.request_id for one in long), "short"]


async def test_who_sends_is_told_of_a_post_that_fails_by_our_own_fault(rig, monkeypatch):
    def fault(*args: object, **kwargs: object) -> None:
        raise ValueError("not a client's error")

    workers, ref = rig.front.dispatch.workers, rig.workers[0].node.info.ref
    monkeypatch.setattr(workers._session, "post", fault)
    with pytest.raises(Unavailable, match="can't be reached"):
        await asyncio.wait_for(workers.send(ref, Cancel(RequestId("r"), Epoch(1), "left")), 60.0)
