"""The number formats of a GPU: how weights, output head and KV are held.

format_choice says which a model has.
"""

from dataclasses import dataclass

import torch

from kernels.specs import KVDtype

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class DeviceFormat:
    """The types of a model on a device.

    `weights` and `head` are e4m3 (one scale a row, or as the checkpoint has them), INT4 in bytes (two a byte, from a
    checkpoint that holds them so), or `rows`, the type of the activations between kernels. Beside e4m3 weights rows are
    rounded for a product, but where `rounds_sparingly` or, experts apart, the checkpoint says otherwise.
    """

    rows: torch.dtype
    weights: torch.dtype
    head: torch.dtype
    kv: KVDtype
    kv_dtype: str  # as KVLayout names it

    @property
    def is_fp8(self) -> bool:
        return self.weights is E4M3

    @property
    def is_int4(self) -> bool:
        return self.weights is torch.uint8

    @property
    def keeps_mxfp4(self) -> bool:
        """Experts that a checkpoint holds so stay so beside bf16 rows."""
        return self.rows is torch.bfloat16

    @property
    def head_is_fp8(self) -> bool:
        return self.head is E4M3

    @property
    def pages(self) -> torch.dtype:
        return {"e4m3": E4M3, "bf16": torch.bfloat16, "fp32": torch.float32}[self.kv]


DEVICE_FORMATS = {
    "float8": DeviceFormat(torch.bfloat16, E4M3, torch.bfloat16, "e4m3", "float8_e4m3fn"),
    "float8-head": DeviceFormat(torch.bfloat16, E4M3, E4M3, "e4m3", "float8_e4m3fn"),
    "int4": DeviceFormat(torch.bfloat16, torch.uint8, torch.bfloat16, "bf16", "bfloat16"),
    "bfloat16": DeviceFormat(torch.bfloat16, torch.bfloat16, torch.bfloat16, "bf16", "bfloat16"),
    "float32": DeviceFormat(torch.float32, torch.float32, torch.float32, "fp32", "float32"),
}
