"""Both engines draw from the same tokens, though by other numbers: filters and their order are alike."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.cuda.device_sampler import DeviceSampler, SamplingKernel
from engine.cuda.loader import LOGIT_NBYTES
from engine.sampling.host_sampler import Sampler
from engine.sampling.logits_processors import LogitsAdjustment, LogitsProcessorState
from engine.sampling.token_masks import GuidedRows
from engine.sequence import Sequence
from kernels import catalog
from kernels.caps import Caps

SHARES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])
COUNT = 400


def samplers():
    drawer = SamplingKernel(catalog.registry(Caps("cpu")), len(SHARES), COUNT, torch.device("cpu"))
    return [Sampler([]), DeviceSampler([], drawer)]


def drawn(sampler, logits, **filters):
    params = SamplingParams(max_tokens=1, seed=7, **filters)
    rows = [Sequence(RequestId(str(index)), [0] * (index + 1), params) for index in range(COUNT)]
    tokens = sampler.sample(rows, logits.expand(COUNT, -1).contiguous())
    return torch.tensor([token.token_id for token in tokens]).bincount(minlength=len(SHARES)) / COUNT


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        # Of all tokens 0.8 is reached by the first three; of those that min_p leaves, by the first two.
        ({"min_p": 0.3, "top_p": 0.8}, {1, 3}),
        ({"min_p": 0.2, "top_p": 0.8}, {1, 3, 4}),
        ({"min_p": 0.3, "top_k": 4, "top_p": 0.8}, {1, 3}),
        ({"min_p": 0.2, "top_k": 2, "top_p": 0.6}, {1, 3}),
        ({"top_k": 2, "top_p": 0.55}, {1}),
        ({"min_p": 0.3, "top_k": 2}, {1, 3}),
        ({"min_p": 0.3}, {1, 3, 4}),
        ({"top_p": 0.8}, {1, 3, 4}),
    ],
)
def test_both_draw_from_what_the_filters_leave(filters, kept):
    left = torch.zeros_like(SHARES).index_copy(0, torch.tensor(sorted(kept)), SHARES[sorted(kept)])
    for sampler in samplers():
        found = drawn(sampler, SHARES.log(), **filters)
        assert set(found.nonzero().flatten().tolist()) == kept
        assert torch.allclose(found, left / left.sum(), atol=0.08)


def test_both_draw_by_top_p_where_fewer_are_allowed_than_top_k():
    for sampler in samplers():
        found = drawn(sampler, SHARES.log(), allowed_token_ids=(0, 3, 4), top_k=4, top_p=0.8)
        assert set(found.nonzero().flatten().tolist()) == {3, 4}


def test_a_top_k_of_one_takes_the_first_of_the_likeliest_as_greedy_does():
    for sampler in samplers():
        found = drawn(sampler, torch.tensor([1.0, 17.125, 17.0, 17.125, 17.125]), top_k=1)
        assert found.nonzero().flatten().tolist() == [1]


class _Peak(TorchDispatchMode):
    """The most bytes of tensors made within that were there at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self._now = 0, dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in self._now:
            storage = made.untyped_storage()
            self._now[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._now.pop, storage._cdata)
            self.nbytes = max(self.nbytes, sum(self._now.values()))
        return made


@pytest.mark.parametrize("is_all", [True, False], ids=["all", "some"])
def test_the_cache_leaves_what_a_full_batch_of_adjusted_logits_takes(is_all):
    """Every row of the batch asks for all adjustments, as at a warm-up on a GPU.

    When that took more than was left, a server of 1024 sequences did not start.
    """
    rows, vocab = 8, 1 << 16
    params = SamplingParams(
        max_tokens=1, seed=0, logit_bias={0: 1.0}, repetition_penalty=1.5, bad_words=((1,),), allowed_token_ids=(0, 1)
    )
    wishes = {
        row: (LogitsProcessorState(params, vocab, []), Sequence(RequestId(str(row)), [0], params))
        for row in range(rows)
    }
    index = () if is_all else (np.arange(rows), np.arange(rows))
    guided = GuidedRows(torch.full((rows, vocab // 8), 255, dtype=torch.uint8, device="meta"), index)
    adjustment = LogitsAdjustment.of(wishes, guided, vocab)
    with _Peak() as peak:
        logits = torch.empty(rows, vocab, device="meta")
        adjustment.of_logits(logits, lambda arrays: [torch.from_numpy(array).to("meta") for array in arrays])
    assert 16 * logits.numel() < peak.nbytes <= LOGIT_NBYTES * logits.numel()
