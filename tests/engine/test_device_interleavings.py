"""Prompts and answers beside each other, however they meet: the device's adapter gives what the CPU's engine gives."""

from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given
from hypothesis import settings as trying
from hypothesis import strategies as st

from contracts.ids import RequestId
from engine.loader import load_engine
from tests.engine.device_engines import FUSIBLE, beside_of, chunks_of, device_engine, endings_of, noted_launches_of
from tests.engine.driving import drain, greedy, random_prompts, request, settings, tokens_of
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.slow

FAMILIES = {"llama": FUSIBLE, "gpt_oss": {}, "llama4": {}}


class Asked(NamedTuple):
    """A prompt of so many tokens, after so many steps."""

    num_steps: int
    length: int
    max_tokens: int
    changes: dict[str, Any]


CHANGES = st.sampled_from([{}, {"repetition_penalty": 1.3}, {"logprobs": 2}, {"prompt_logprobs": 1}])
ASKED = st.lists(
    st.builds(Asked, st.integers(0, 6), st.sampled_from([1, 2, 30, 63, 64, 65, 130, 200]), st.integers(1, 20), CHANGES),
    min_size=2,
    max_size=7,
)
LIMITS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 9),
        "max_batched_tokens": st.sampled_from([70, 100, 200, 300]),
        "max_mixed_tokens": st.sampled_from([None, 64]),
    }
)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(folder, request.param, **FAMILIES[request.param])
    return folder


# Examples are small as they are; looking for smaller ones would take minutes.
@trying(max_examples=10, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(asked=ASKED, limits=LIMITS, is_held=st.booleans(), leaves=st.booleans())
def test_answers_and_prompts_that_meet_anyhow_give_what_the_cpu_gives(folder, asked, limits, is_held, leaves):
    engine = device_engine(folder, **limits)
    if is_held:
        noted_launches_of(chunks_of(engine))
        noted_launches_of(beside_of(engine))
        noted_launches_of(endings_of(engine))
    found = answered(engine, asked, leaves)
    assert found == answered(load_engine(settings(model=str(folder), **limits)), asked, leaves)
    assert engine.stats().free_tokens == engine.capacity_tokens


def answered(engine, asked, leaves):
    """Tokens of each answer; the first one's request may leave when the last has come."""
    outputs = []
    prompts = random_prompts(VOCAB, [one.length for one in asked])
    for name, (one, prompt) in enumerate(zip(asked, prompts, strict=True)):
        outputs += [engine.step() for _ in range(one.num_steps) if engine.has_work()]
        engine.submit(request(str(name), prompt, greedy(one.max_tokens, **one.changes)))
    if leaves:
        engine.release(RequestId("0"))
    outputs += drain(engine)
    return [tokens_of(outputs, str(name)) for name in range(leaves, len(asked))]
