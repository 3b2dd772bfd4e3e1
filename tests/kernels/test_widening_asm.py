"""The assembly that widens 4-bit weights, statement by statement in numpy: the interpreter takes another branch."""

import numpy as np
import pytest
import torch

from kernels import layouts
from kernels.triton import gemm_w4, moe_mx

WORDS = np.arange(1 << 16, dtype=np.uint32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def halves(words, apply=None, *others):
    """bf16 pairs of 32-bit words to float32 [2, n], low half first; or `apply` to them, rounded to bf16 pairs."""
    parts = [np.stack([word << 16, word & 0xFFFF0000]).view(np.float32) for word in (words, *others)]
    if apply is None:
        return parts[0]
    rounded = torch.from_numpy(apply(*parts)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return rounded[0].astype(np.uint32) | (rounded[1].astype(np.uint32) << 16)


def lop3(a, b, c, table):
    """PTX ISA, lop3: bit i of the table is the result where a, b, c have the bits of i."""
    result = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": lambda a, b, c, table: lop3(a, b, c, int(table[0])),
    "mul.bf16x2": lambda a, b: halves(a, np.multiply, b),
    "sub.bf16x2": lambda a, b: halves(a, np.subtract, b),
}


def run(text, *inputs):
    """The outputs $0 to $3 of an assembly whose inputs are $4 and what follows."""
    registers = {f"${4 + i}": value for i, value in enumerate(inputs)}
    for line in text.strip("{}\n ").replace("\n", " ").split(";"):
        name, _, operands = line.strip().partition(" ")
        if not name or name.startswith(".reg"):
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[s] if s in registers else np.full_like(inputs[0], int(s, 0)) for s in sources]
        registers[target] = OPERATIONS[name](*values)
    return [halves(registers[f"${i}"]) for i in range(4)]


def in_pairs(low):
    """Each 16-bit word in the low half, another one in the high half."""
    high = np.roll(low, 12345)
    return low | (high << 16), np.stack([low, high])


@pytest.mark.parametrize("zero", [0, 7, 8, 15])
def test_int4_codes_less_their_zero(zero):
    words, parts = in_pairs(WORDS)
    found = run(gemm_w4.ASM.value, words, np.full_like(words, (0x4300 | zero) * 0x10001))
    for place, values in enumerate(found):
        assert np.array_equal(values, (parts >> 4 * place & 15).astype(np.float32) - zero)


def test_mxfp4_codes_times_their_scales():
    words, parts = in_pairs(WORDS)
    scales = [2.0**exponent for exponent in (layouts.MX_SHIFT, layouts.MX_SHIFT - 3)]
    bits = [np.full_like(words, (int(np.float32(scale).view(np.uint32)) >> 16) * 0x10001) for scale in scales]
    found = run(moe_mx.ASM.value, words, *bits)
    for place, (values, (sign, upper, lower)) in enumerate(zip(found, layouts.MX_BITS, strict=True)):
        codes = (parts >> sign & 1) << 3 | (parts >> upper & 1) << 2 | (parts >> lower & 3)
        assert np.array_equal(values, E2M1[codes] * np.float32(2.0**-126) * np.float32(scales[place // 2]))
