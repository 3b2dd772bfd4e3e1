"""How a decode layer is put together at each batch size: which products split along k, which defer their scales."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodePlan:
    """parts > 1: split-K, summed by the reader. deferred: cuBLAS without scales, applied by the reader."""

    qkv_parts: int = 1
    o_parts: int = 1
    down_parts: int = 1
    deferred: bool = False  # qkv, o and down
    fused_gate_up: bool = True  # silu and quantization in the epilogue
    own_head: bool = True
    pdl: bool = True

    def parts(self, name: str) -> int:
        return {"qkv": self.qkv_parts, "o": self.o_parts, "down": self.down_parts}.get(name, 1)


def decode_plan(batch: int, cc: int = 90) -> DecodePlan:
    """The plan for a batch size, from bench/results (decode_step and decode_step_without, H200).

    Own kernels while a product is a read of its weights, up to 64 tokens; at 128 cuBLAS per tensor with deferred scales
    for qkv, o and down; at 256 the fused gate_up only equals cuBLAS and a SiLU kernel, and dependent launches hurt.
    Other architectures take the same shape: split-K and fusing do not depend on the instruction set.
    """
    if batch <= 8:
        return DecodePlan(2, 2, 2)
    if batch <= 64:
        return DecodePlan(1, 2, 2)
    if batch <= 128:
        return DecodePlan(deferred=True)
    return DecodePlan(deferred=True, fused_gate_up=False, own_head=False, pdl=False)
