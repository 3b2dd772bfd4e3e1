"""On a CPU, where the two pieces are plain memory and nothing waits for a device; and on a GPU, if one is here."""

import pytest
import torch

from engine.cuda.runtime.pinned_copy import PinnedCopier

TENSORS = [
    torch.randn(7, 33),
    torch.tensor(3.0),
    torch.empty(0, 4),
    torch.randn(9, 8).t(),
    torch.randn(64, 64).to(torch.float8_e4m3fn),
    torch.randn(130).to(torch.bfloat16),
    torch.arange(200, dtype=torch.uint8),
]


ON_GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("piece_nbytes", [7, 100, 1 << 20])
def test_what_is_carried_arrives_whatever_its_type_and_length(piece_nbytes, device):
    ferry = PinnedCopier(torch.device(device), piece_nbytes)
    all_carried = [ferry.carry(tensor) for tensor in TENSORS * 2]  # a piece is filled again while others are read
    for tensor, there in zip(TENSORS * 2, all_carried, strict=True):
        carried = there.cpu() if device == "cuda" else there
        assert (carried.dtype, carried.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(carried.view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        assert carried.is_contiguous() and (carried.numel() == 0 or carried.data_ptr() != tensor.data_ptr())
