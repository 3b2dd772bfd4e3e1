"""A row of an MLP is its own to the bit, with any number of threads: torch computes the last few elements of a thread's
share otherwise in some of its functions.
"""

from collections.abc import Iterator

import pytest
import torch

from engine.linear import PhasedLinear
from engine.mlp import ClampedMlp, GatedMlp

NUM_ROWS, INNER = 23, 8192  # a thread's share ends within a vector


@pytest.fixture
def eight_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


def unchanged() -> PhasedLinear:
    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    return PhasedLinear(same, same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [GatedMlp, ClampedMlp])
def test_a_row_keeps_its_bits_in_any_company(eight_threads, kind, dtype):
    mlp = kind(unchanged(), unchanged())
    x = (torch.randn(NUM_ROWS, 2 * INNER, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    everything = mlp(x, 0)
    assert [row for row in range(NUM_ROWS) if not torch.equal(mlp(x[row : row + 1], 0)[0], everything[row])] == []


def test_far_out_a_gate_is_all_or_nothing():
    x = torch.tensor([[200.0, -200.0, 0.0, 3.0, 3.0, 3.0]])
    assert GatedMlp(unchanged(), unchanged())(x, 0).tolist() == [[600.0, 0.0, 0.0]]
