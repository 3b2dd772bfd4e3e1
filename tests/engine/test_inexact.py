"""KV that has lost something is found by whoever takes that loss, and by nobody else."""

# pyright: reportArgumentType=false
# Plain strings stand for request ids.

from dataclasses import replace
from types import SimpleNamespace

import pytest

from contracts.events import Token
from contracts.hashing import inexact_digest
from contracts.kv_loss import MIXED, UNCHECKED, joined
from engine.engine import Engine
from engine.loader import load_engine
from tests.engine.driving import drain, greedy, random_prompts, request, settings
from tests.engine.tiny_models import VOCAB

SIZE = 16
PROMPT, OTHER = random_prompts(VOCAB, (81, 50))
FIRST = Token(0, 7)


@pytest.fixture
def engine(folder) -> Engine:
    return load_engine(settings(model=str(folder)))


def wanted(name: str, loss: str = "", prompt=PROMPT, max_tokens: int = 20):
    return replace(request(name, prompt, greedy(max_tokens)), loss=loss)


def found(engine: Engine, loss: str, prompt=PROMPT) -> int:
    """Return how many tokens of a prompt a request finds that takes this loss."""
    skipped = engine.reserve(wanted("probe", loss, prompt)).skip_tokens
    engine.release("probe")
    engine.incoming_writer_ended("probe")
    return skipped


def adopt(engine: Engine, name: str, first_token: int, loss: str, accepted: str) -> list[int]:
    """Decode an answer whose prompt came inexact from this token on; return all tokens."""
    engine.reserve(wanted(name, accepted))
    engine.incoming_lost(name, first_token, loss)
    engine.adopt(name, FIRST)
    engine.incoming_writer_ended(name)
    return [*PROMPT, FIRST.token_id, *(s.token.token_id for output in drain(engine) for s in output.sampled)]


def test_a_prompt_that_came_inexact_is_found_exactly_up_to_there_and_its_answer_too(engine: Engine):
    conversation = adopt(engine, "a", 2 * SIZE, "4bit", "4bit")
    whole = (len(conversation) - 1) // SIZE * SIZE
    assert whole > len(PROMPT)  # blocks of the answer among them
    assert found(engine, "", conversation) == 2 * SIZE
    assert found(engine, "8bit", conversation) == 2 * SIZE
    assert found(engine, "4bit", conversation) == whole
    engine.check()


def test_what_is_computed_after_cached_inexact_kv_is_inexact_as_well(engine: Engine):
    conversation = adopt(engine, "a", SIZE, "4bit", "4bit") + OTHER
    engine.submit(wanted("b", "4bit", conversation, 2))
    outputs = drain(engine)
    assert sum(start.cached_tokens for output in outputs for start in output.started) > 64
    assert found(engine, "", conversation) == SIZE
    assert found(engine, "4bit", conversation) == (len(conversation) - 1) // SIZE * SIZE


def test_exact_kv_is_computed_beside_and_preferred(engine: Engine):
    adopt(engine, "a", SIZE, "4bit", "4bit")
    engine.submit(wanted("b", "", PROMPT, 2))
    outputs = drain(engine)
    assert sum(start.cached_tokens for output in outputs for start in output.started) == SIZE
    assert found(engine, "") == 80
    reservation = engine.reserve(wanted("c", "4bit"))
    assert reservation.skip_tokens == 80
    assert engine.sequences["c"].loss == ""
    engine.release("c")
    engine.incoming_writer_ended("c")
    engine.check()


@pytest.mark.parametrize(
    ("loss", "accepted"), [("4bit", ""), ("4bit", "8bit"), (UNCHECKED, ""), (UNCHECKED, "4bit"), (MIXED, "4bit")]
)
def test_a_loss_that_nobody_here_takes_is_not_cached(engine: Engine, loss: str, accepted: str):
    adopt(engine, "a", 2 * SIZE, loss, accepted)
    assert found(engine, accepted) == 2 * SIZE
    assert engine.stats().num_cached_blocks == 2


def test_what_was_saved_of_a_handoff_that_ended_early_keeps_its_loss(engine: Engine):
    engine.reserve(wanted("a", "4bit"))
    engine.incoming_lost("a", 3 * SIZE, "4bit")
    engine.release("a")
    assert engine.incoming_writer_ended("a", num_checked=5 * SIZE) == 5 * SIZE
    assert (found(engine, ""), found(engine, "4bit")) == (3 * SIZE, 5 * SIZE)

    engine.reserve(wanted("b", "", OTHER))
    engine.incoming_lost("b", SIZE, UNCHECKED)
    engine.release("b")
    assert engine.incoming_writer_ended("b", num_checked=2 * SIZE) == SIZE
    assert found(engine, "", OTHER) == SIZE


def test_an_answer_that_is_computed_again_after_a_preemption_is_exact(engine: Engine):
    engine.reserve(wanted("a", "4bit"))
    engine.incoming_lost("a", 0, "8bit")
    engine.adopt("a", FIRST)
    engine.incoming_writer_ended("a")
    for _ in range(3):
        engine.step()
    assert engine.stats().num_cached_blocks == 0
    sequence = engine.sequences["a"]
    engine.scheduler._preempt(sequence)
    drain(engine)
    assert found(engine, "") == 80


def test_lower_tiers_get_inexact_blocks_under_digests_of_their_own(engine: Engine):
    offered = []
    engine.use_lower_tiers(SimpleNamespace(offer=offered.append, begin=lambda load: False, finished=list))
    adopt(engine, "a", SIZE, "4bit", "4bit")
    exact = wanted("b", "")
    engine.reserve(exact)
    digests = engine.sequences["b"].extend_digests(SIZE, 5)
    blocks = {block.first_token // SIZE: block for block in offered}
    assert (blocks[0].digest, blocks[0].loss) == (digests[0], "")
    assert blocks[1].parent == digests[0]
    assert (blocks[2].digest, blocks[2].loss) == (inexact_digest(digests[2], "4bit"), "4bit")
    assert blocks[2].parent == blocks[1].digest
    assert not {block.digest for block in offered if block.first_token >= SIZE} & set(digests)


def test_chunks_and_moving_answers_tell_their_loss(engine: Engine):
    adopt(engine, "a", 2 * SIZE, "4bit", "4bit")
    engine.submit(replace(wanted("b", "4bit", PROMPT, 4), handoff=True))
    chunks = [chunk for output in drain(engine) for chunk in output.chunks]
    assert {chunk.loss for chunk in chunks} == {"4bit"}
    engine.release("b")

    engine.submit(wanted("c", "", OTHER, 30))
    for _ in range(3):
        engine.step()
    chunk = engine.exports.blocks("c")
    assert chunk is not None and chunk.loss == ""
    engine.release("c")
    engine.exports.reader_ended("c")


def test_losses_of_one_kind_stay_and_others_are_not_told_apart():
    assert joined("", "4bit") == joined("4bit", "") == joined("4bit", "4bit") == "4bit"
    assert joined("4bit", "8bit") == joined(MIXED, "4bit") == MIXED
    assert joined("4bit", UNCHECKED) == joined(UNCHECKED, MIXED) == UNCHECKED
