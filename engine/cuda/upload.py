"""From numpy to the device without waiting for it."""

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device."""
    if device.type == "cpu":
        return torch.from_numpy(array).clone()
    return page_locked(array, device).to(device, non_blocking=True)


def page_locked(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """On the host, from where a copy to the device need not wait for all that was launched before. The array itself if
    it is there, or the device is the CPU.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory()
