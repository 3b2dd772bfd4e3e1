"""A row of an MLP is its own to the bit, with any number of threads: torch computes the last few elements of a thread's
share otherwise in some of its functions.
"""

from collections.abc import Iterator

import pytest
import torch

from checkpoint.huggingface.model_config import model_config
from engine.cpu.decoder_layer import CpuLayerWeights, Residual
from engine.cpu.expert_router import ExpertRouter
from engine.cpu.head_projection import HeadProjection
from engine.cpu.linear import FORMATS, PhasedLinear
from engine.cpu.mlp import _PART_ROWS, ClampedMlp, CpuMlp, GatedMlp
from engine.cpu.moe import CpuMoE
from models.config import Experts

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


def test_rows_beyond_a_part_are_computed_as_those_within_it():
    pack = FORMATS["float32"].pack
    mlp = GatedMlp(pack(random(96, HIDDEN)), pack(random(HIDDEN, 48)))
    x = random(2 * _PART_ROWS + 3, HIDDEN)
    whole = mlp(x, 0)
    assert whole.shape == x.shape
    torch.testing.assert_close(whole[-3:], mlp(x[-3:], 0))
    torch.testing.assert_close(whole[_PART_ROWS : _PART_ROWS + 5], mlp(x[_PART_ROWS : _PART_ROWS + 5], 0))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def on_int4_grid(rows: int, columns: int) -> torch.Tensor:
    codes = (random(rows, columns // 32, 32) * 4 + 7).round().clamp(0, 15)
    codes[..., 0], codes[..., 1] = 0, 15
    return ((codes - 7) / 16).view(rows, columns)


HIDDEN = 32
TINY = model_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 3,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    },
    "tiny",
)


def two_formats() -> CpuMlp:
    pack = FORMATS["int4"].pack
    return GatedMlp(pack(on_int4_grid(128, HIDDEN)), pack(on_int4_grid(HIDDEN, 64)))


def one_format_beside_two() -> CpuMlp:
    pack = FORMATS["int4"].pack
    plain = GatedMlp(pack(random(128, HIDDEN)), pack(random(HIDDEN, 64)))
    router = FORMATS["int4"].router(random(2, HIDDEN), None)
    return CpuMoE(ExpertRouter(Experts(2, 2, 64, True), router), [plain, two_formats()])


@pytest.mark.parametrize("mlp", [two_formats, one_format_beside_two])
def test_rows_of_prompts_and_of_answers_keep_their_bits_beside_each_other(mlp):
    """Attention's last product has one format and the MLP two, which int4 decides tensor by tensor."""
    linear = FORMATS["int4"].pack(random(HIDDEN, HIDDEN))
    layer = CpuLayerWeights(None, HeadProjection(TINY, linear, None, None), linear, None, mlp())
    assert linear.is_uniform and not layer.mlp.is_uniform
    behind = Residual(TINY).behind
    x, mixed = random(11, HIDDEN), random(11, HIDDEN).flip(0)
    answers, prompts = behind(layer, x[:4], mixed[:4], 4), behind(layer, x[4:], mixed[4:], 0)
    assert torch.equal(behind(layer, x, mixed, 4), torch.cat([answers, prompts]))


def test_far_out_a_gate_is_all_or_nothing():
    x = torch.tensor([[200.0, -200.0, 0.0, 3.0, 3.0, 3.0]])
    assert GatedMlp(unchanged(), unchanged())(x, 0).tolist() == [[600.0, 0.0, 0.0]]
