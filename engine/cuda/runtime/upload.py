"""From numpy to the device without waiting for it."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

# Arrays that go together begin where one that went alone might: Triton compiles anew for pointers aligned otherwise.
_ALIGNMENT = 512
_DTYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device."""
    if device.type == "cpu":
        return torch.from_numpy(array).clone()
    return page_locked(array, device).to(device, non_blocking=True)


def upload_all(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copies on the device, all in one transfer."""
    packed, starts = _packed(arrays, device)
    there = packed.to(device, non_blocking=True)
    return [_unpacked(there, array, start) for array, start in zip(arrays, starts, strict=True)]


def copy_all(arrays: Sequence[np.ndarray], rooms: Sequence[torch.Tensor]) -> None:
    """Each into its room on the device, of its own shape and type."""
    packed, starts = _packed(arrays, rooms[0].device)
    for array, start, room in zip(arrays, starts, rooms, strict=True):
        assert array.shape == room.shape and _DTYPES[array.dtype] == room.dtype
        if array.size:
            room.copy_(_unpacked(packed, array, start), non_blocking=True)


def _packed(arrays: Sequence[np.ndarray], device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """Bytes in page-locked memory, and where those of each array begin."""
    ends = list(accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays))
    starts = [0, *ends[:-1]]
    packed = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type != "cpu")
    nbytes = packed.numpy()
    for array, start in zip(arrays, starts, strict=True):
        nbytes[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    return packed, starts


def _unpacked(packed: torch.Tensor, array: np.ndarray, start: int) -> torch.Tensor:
    return packed[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)


def page_locked(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """On the host, from where a copy to the device need not wait for all that was launched before.

    The array itself if it is there, or the device is the CPU.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory()
