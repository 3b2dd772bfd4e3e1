"""Linear layers in the number formats that are sound on a CPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

_TRIED_ROWS, _TRIED_MULTIPLES = 120, (1, 2, 3, 4, 6, 8, 12)
_SIZES, _SMALL_PART = (2, 4, 8, 16, 32, 64, 128, 256, 512), 32

Linear = Callable[[torch.Tensor], torch.Tensor]
"""`[M, in]` float32 or bfloat16 -> `[M, out]` float32 or bfloat16."""
Pack = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""(weight `[out, in]` float32, bias) -> Linear."""


class Float32Linear:
    """float32 weights and arithmetic.

    A row's result does not depend, to the bit, on the number of rows, which are padded to a multiple of
    float32_multiple().
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._multiple = float32_multiple(torch.get_num_threads())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_missing = -len(x) % self._multiple
        if num_missing == 0:
            return F.linear(x.float(), self._weight, self._bias)
        return F.linear(F.pad(x.float(), (0, 0, 0, num_missing)), self._weight, self._bias)[: len(x)]


@cache
def float32_multiple(num_threads: int) -> int:
    """Return a number of rows whose multiples MKL computes alike.

    Found by trying, with the threads that torch has now. In MKL's strict mode (kernels.cpu.mkl) it is 1; without it, a
    lone row is summed in another order than several, and so are the three and fewer that its kernel of four rows leaves
    over: 4 is sound on an AMD.
    """
    x, weight = cancelling_operands(_TRIED_ROWS, 576, 64)
    y = F.linear(x, weight)
    return sound_multiple(lambda count: torch.equal(F.linear(x[:count], weight), y[:count]))


def sound_multiple(is_alike: Callable[[int], bool]) -> int:
    """Return the first of _TRIED_MULTIPLES whose multiples are all alike, else 1."""
    for multiple in _TRIED_MULTIPLES:
        if all(is_alike(count) for count in range(multiple, _TRIED_ROWS, multiple)):
            return multiple
    return 1


class Float16Linear:
    """float16 weights, float32 arithmetic (fbgemm).

    A row's result does not depend, to the bit, on the number of rows, which are padded to a multiple of
    float16_multiple().
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)
        self._multiple = float16_multiple()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_missing = -len(x) % self._multiple
        if num_missing == 0:
            return torch.ops.quantized.linear_dynamic_fp16(x.float(), self._packed)
        rows = F.pad(x.float(), (0, 0, 0, num_missing))
        return torch.ops.quantized.linear_dynamic_fp16(rows, self._packed)[: len(x)]


@cache
def float16_multiple() -> int:
    """Return a number of rows whose multiples fbgemm computes alike; found by trying.

    It divides rows into groups. With AVX2 groups hold up to six, and those of one or two, which are what is left of
    most numbers, are summed in another order than larger ones: 3 is sound there.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(_TRIED_ROWS, 576, generator=generator), torch.randn(32, 576, generator=generator)
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    y = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return sound_multiple(lambda n: torch.equal(torch.ops.quantized.linear_dynamic_fp16(x[:n], packed), y[:n]))


class BFloat16Linear:
    """bfloat16 weights and rows, float32 sums (oneDNN, weights packed once).

    Gives bfloat16 rows. One does not depend, to the bit, on the number of rows.

    Rows go in parts of few sizes: oneDNN compiles a kernel of about 1 MB for each, and keeps 1024 of them.
    """

    _LIKE = 32

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), None)
        self._bias = None if bias is None else bias.bfloat16()
        self._sizes = bfloat16_sizes(weight.shape[1], weight.shape[0], self._LIKE, torch.get_num_threads())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        sizes = part_sizes(len(x), self._sizes)
        missing = sum(sizes) - len(x)
        rows = F.pad(x.bfloat16(), (0, 0, 0, missing)) if missing else x.bfloat16()
        parts = [_multiply_bfloat16(part, self._packed, self._bias) for part in rows.split(sizes)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[: len(x)]


class BFloat16PromptLinear(BFloat16Linear):
    """For the rows of prompts, many at a time: where oneDNN sums many otherwise than few, as it sums many."""

    _LIKE = 128  # 512 has a kernel to itself at some shapes


def _multiply_bfloat16(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@cache
def bfloat16_sizes(num_in: int, num_out: int, like: int, num_threads: int) -> tuple[int, ...]:
    """Return the numbers of rows for which oneDNN sums each row as it does for `like`.

    They are of the powers of two up to 512, and found by trying, with the number of threads that torch has now.

    With AMX it has several kernels, with orders of sums of their own, and takes one by the number of rows, the shape
    and the number of threads: at 576 by 3072 one for up to 32 rows, another for 64 to 512. Without AMX all are alike
    but a lone row, which is why 1 is no size.
    """
    x, weight = (operand.bfloat16() for operand in cancelling_operands(_SIZES[-1], num_in, num_out))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    expected = torch.cat([_multiply_bfloat16(part, packed) for part in x.split(like)])
    return tuple(size for size in _SIZES if torch.equal(_multiply_bfloat16(x[:size], packed), expected[:size]))


def cancelling_operands(num_rows: int, num_in: int, num_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and weights whose products are 0 but for rounding.

    Another order of sums shows in most of them; in other products one in 30 000 tells.
    """
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(num_rows, num_in // 2, generator=generator)
    weights = torch.randn(64, num_in // 2, generator=generator)
    order = torch.randperm(num_in // 2 * 2, generator=generator)
    x, weight = torch.cat([half, -half], 1)[:, order], torch.cat([weights, weights], 1)[:, order]
    odd = num_in % 2
    few = F.pad(weight, (0, odd))
    return F.pad(x, (0, odd)), few.repeat(-(-num_out // len(few)), 1)[:num_out]


def part_sizes(num_rows: int, sizes: Sequence[int]) -> list[int]:
    """Return how `num_rows` are cut.

    Into parts as large as can be, and a last one that may have room for more. Never into none.
    """
    parts, rest = [], num_rows
    for size in reversed(sizes):
        if size >= _SMALL_PART or size == sizes[-1]:
            parts += [size] * (rest // size)
            rest %= size
    return parts if parts and not rest else [*parts, next(size for size in sizes if size >= rest)]


class Int8Linear:
    """int8 weights with one scale a row, bfloat16 rows (torch's weight-only kernel).

    Both are padded to a multiple of 16 columns: with others the kernel gives infinities, or ends the process.
    """

    _MULTIPLE = 16

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        scales = (weight.abs().amax(1) / 127).clamp_min(1e-8)
        codes = (weight / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
        self._num_missing = -weight.shape[1] % self._MULTIPLE
        self._codes = F.pad(codes, (0, self._num_missing)) if self._num_missing else codes
        self._scales = scales.bfloat16()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = F.pad(x.bfloat16(), (0, self._num_missing)) if self._num_missing else x.bfloat16()
        y = torch.ops.aten._weight_int8pack_mm(rows, self._codes, self._scales)
        return y if self._bias is None else y + self._bias


class Int4Linear:
    """int4 weights, a scale and an offset for each 32, bfloat16 rows (torch's weight-only kernel).

    Gives bfloat16 rows; one does not depend, to the bit, on the number of rows.

    Only for weights that lie on such a grid already, as those of a GGUF file in Q4_1 do: see int4_grid.
    """

    GROUP = 32

    def __init__(self, grid: "Int4Grid", bias: torch.Tensor | None) -> None:
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(grid.codes.int(), 2)
        # The kernel computes (code - 8) * scale + offset; both come as [groups, out, 2].
        offsets = grid.least + 8 * grid.scales
        self._scales = torch.stack([grid.scales, offsets], 2).bfloat16().transpose(0, 1).contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), self._codes, self.GROUP, self._scales)
        return y if self._bias is None else y + self._bias


@dataclass(frozen=True)
class Int4Grid:
    """16 even steps from the least to the greatest of each 32 weights of a row.

    Codes `[out, in]`, float32; scales and least values `[out, in / 32]`.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    least: torch.Tensor


def int4_grid(weight: torch.Tensor) -> Int4Grid | None:
    """Return the grid of a matrix, or None if it loses something.

    Codes times scale plus least must give the weights, to float32's rounding.
    """
    if weight.shape[1] % Int4Linear.GROUP or len(weight) % 16:
        return None
    groups = weight.view(len(weight), -1, Int4Linear.GROUP)
    least = groups.amin(2)
    scales = (groups.amax(2) - least) / 15
    codes = ((groups - least[..., None]) / scales.clamp_min(1e-30)[..., None]).round()
    loss = (codes * scales[..., None] + least[..., None] - groups).abs().max()
    is_exact = bool(loss <= 1e-5 * weight.abs().max())
    return Int4Grid(codes.view(weight.shape), scales, least) if is_exact else None


def pack_int4_if_exact(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Return float16 for a tensor that int4 would change, as GGUF files have among the others."""
    grid = int4_grid(weight)
    return Float16Linear(weight, bias) if grid is None else Int4Linear(grid, bias)


class PhasedLinear:
    """A format for rows of prompts, which are many, and another for rows of answers, which are few.

    Which one a row takes depends on its place in its own sequence alone, never on the batch. Answer rows come first.
    """

    def __init__(self, prompt: Linear, answer: Linear) -> None:
        self._prompt, self._answer = prompt, answer
        self.is_uniform = prompt is answer

    def __call__(self, x: torch.Tensor, num_answer_rows: int) -> torch.Tensor:
        if self.is_uniform or num_answer_rows == len(x):
            return self._answer(x)
        if num_answer_rows == 0:
            return self._prompt(x)
        return torch.cat([self._answer(x[:num_answer_rows]), self._prompt(x[num_answer_rows:])])


@dataclass(frozen=True)
class NumberFormat:
    """The way in which weights are held for the rows of prompts and of answers, and KV.

    `router`: of a mixture of experts, small and apt to choose others if it is rounded. `folds`: norm gains may be
    folded in.
    """

    prompt: Pack
    answer: Pack
    head: Pack
    router: Pack
    kv_dtype: str
    folds: bool = True

    @property
    def is_uniform(self) -> bool:
        return self.prompt is self.answer

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PhasedLinear:
        answer = self.answer(weight, bias)
        return PhasedLinear(answer if type(answer) is self.prompt else self.prompt(weight, bias), answer)


FORMATS = {
    "float32": NumberFormat(Float32Linear, Float32Linear, Float32Linear, Float32Linear, "float32"),
    "float16": NumberFormat(Float16Linear, Float16Linear, Float16Linear, Float16Linear, "float32"),
    "bfloat16": NumberFormat(BFloat16Linear, BFloat16Linear, BFloat16Linear, BFloat16Linear, "bfloat16"),
    "mixed16": NumberFormat(BFloat16PromptLinear, Float16Linear, Float16Linear, Float16Linear, "bfloat16"),
    "mixed4": NumberFormat(
        BFloat16PromptLinear, pack_int4_if_exact, Float16Linear, Float16Linear, "bfloat16", folds=False
    ),
    "int4": NumberFormat(Float16Linear, pack_int4_if_exact, Float16Linear, Float16Linear, "float32", folds=False),
    "int8": NumberFormat(Float16Linear, Int8Linear, Int8Linear, Float16Linear, "float32", folds=False),
}
