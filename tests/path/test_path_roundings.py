"""A pair of two number formats whose KV has one form: it hands over, and nothing of it passes for the other's."""

from pathlib import Path

import pytest

from contracts.hashing import chain_hashes
from contracts.kv_loss import of_rounding
from contracts.sampling import SamplingParams
from engine.engine import Engine
from tests.e2e.tiny import save_tiny
from tests.path.cores import Cores

PROMPT = [2 + i % 200 for i in range(100)]
BLOCK, NUM_BLOCKS = 16, 6
GREEDY = SamplingParams(max_tokens=8, seed=0, temperature=0.0, ignore_eos=True)


def num_cached(engine: Engine, loss: str = "") -> int:
    """Return how many of the prompt's blocks a request that accepts this loss finds."""
    return engine.prefix_exports.count(chain_hashes(PROMPT, BLOCK), loss)


def num_sent(pair: Cores) -> int:
    (link,) = pair.prefill.node.stats()
    return link.nbytes


@pytest.mark.parametrize("transfer", ["shm", "tcp"])
def test_kv_of_another_rounding_serves_who_asked_for_it_and_no_other(tmp_path: Path, transfer: str) -> None:
    with Cores(str(save_tiny(tmp_path)), transfer, of_prefill={"dtype": "float16"}) as pair:
        ours, theirs = pair.decode.engine, pair.prefill.engine
        assert ours.layout.difference(theirs.layout) is None
        first = pair.answers([PROMPT], GREEDY)
        assert (num_cached(theirs), num_cached(ours)) == (NUM_BLOCKS, 0)
        assert num_cached(ours, of_rounding("float16")) == NUM_BLOCKS
        assert num_cached(ours, of_rounding("int4")) == 0
        nbytes = num_sent(pair)
        assert pair.answers([PROMPT], GREEDY) == first
        assert num_sent(pair) - nbytes < nbytes, "what is here of this peer's is not sent again"
        for worker in (pair.prefill, pair.decode):
            worker.engine.check()
        assert pair.prefill.counters()["handoffs_committed"] == 2


def test_kv_of_the_same_rounding_is_ones_own(tmp_path: Path) -> None:
    with Cores(str(save_tiny(tmp_path)), "tcp", dtype="float16") as pair:
        pair.answers([PROMPT], GREEDY)
        assert num_cached(pair.decode.engine) == NUM_BLOCKS
