"""The number formats of a GPU: how weights, output head and KV are held."""

from dataclasses import dataclass

import torch

from kernels.specs import KVDtype

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class DeviceFormat:
    """`weights` and `head` are e4m3 (one scale a row) or `rows`, the type of the activations between kernels."""

    rows: torch.dtype
    weights: torch.dtype
    head: torch.dtype
    kv: KVDtype
    kv_dtype: str  # as KVLayout names it

    @property
    def is_fp8(self) -> bool:
        return self.weights is E4M3

    @property
    def head_is_fp8(self) -> bool:
        return self.head is E4M3

    @property
    def pages(self) -> torch.dtype:
        return {"e4m3": E4M3, "bf16": torch.bfloat16, "fp32": torch.float32}[self.kv]


DEVICE_FORMATS = {
    "float8": DeviceFormat(torch.bfloat16, E4M3, torch.bfloat16, "e4m3", "float8_e4m3fn"),
    "float8-head": DeviceFormat(torch.bfloat16, E4M3, E4M3, "e4m3", "float8_e4m3fn"),
    "bfloat16": DeviceFormat(torch.bfloat16, torch.bfloat16, torch.bfloat16, "bf16", "bfloat16"),
    "float32": DeviceFormat(torch.float32, torch.float32, torch.float32, "fp32", "float32"),
}
