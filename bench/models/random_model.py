"""The models of a real shape with random weights made on the device, for speed where no text matters."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from checkpoint.checkpoint import Checkpoint, WeightFormat
from checkpoint.quantization import Quantization, Scheme
from engine.model_loader.checkpoint_weights import TensorSlice, WeightSource
from engine.model_loader.quantized_matrices import QuantizedMatrices
from models.config import AttentionTemperature, Experts, ModelConfig, YarnScaling

LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope_theta=500000.0,
    max_model_len=131072,
    tied_embeddings=False,
)

LLAMA_70B = replace(LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)

QWEN3_8B = ModelConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-6,
    rope_theta=1000000.0,
    max_model_len=40960,
    tied_embeddings=False,
    qk_norm=True,
)

QWEN3_30B_A3B = replace(
    QWEN3_8B,
    family="qwen3moe",
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_kv_heads=4,
    experts=Experts(128, 8, 768, renormalize=True),
)

GPT_OSS_20B = ModelConfig(
    family="gpt-oss",
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    norm_eps=1e-5,
    rope_theta=150000.0,
    max_model_len=131072,
    tied_embeddings=False,
    rope_scaling=YarnScaling(32.0, 4096, 32.0, 1.0, 1.3466, truncate=False),
    qkv_bias=True,
    experts=Experts(32, 4, 2880, renormalize=True, as_gpt_oss=True, is_mxfp4=True),
    output_bias=True,
    sinks=True,
    window=128,
    windowed_layers=tuple(range(0, 24, 2)),
)


LLAMA4_MAVERICK = ModelConfig(
    family="llama4",
    vocab_size=202048,
    hidden_size=5120,
    intermediate_size=16384,
    num_layers=48,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope_theta=500000.0,
    max_model_len=1048576,
    tied_embeddings=False,
    experts=Experts(128, 1, 8192, renormalize=True, dense_layers=tuple(range(0, 48, 2)), as_llama4=True),
    windowed_layers=tuple(layer for layer in range(48) if layer % 4 != 3),
    segment=8192,
    no_rope_layers=tuple(range(3, 48, 4)),
    attention_temperature=AttentionTemperature(8192.0, 0.1),
)


SHAPES = {"llama-8b": LLAMA_8B, "llama-70b": LLAMA_70B, "qwen3-8b": QWEN3_8B}
STORED = {
    "fp8-rows": Quantization("random", Scheme.FP8_ROWS, skipped=("lm_head",)),
    "fp8-blocks": Quantization("random", Scheme.FP8_BLOCKS, skipped=("lm_head",)),
    "gptq": Quantization("random", Scheme.GPTQ, skipped=("lm_head",), group_size=128, zero_shift=1),
    "awq": Quantization("random", Scheme.AWQ, skipped=("lm_head",), group_size=128),
}
"""The layouts of quantized checkpoints; gptq is symmetric."""
_TENSORS = {
    Scheme.FP8_ROWS: ("weight", "weight_scale"),
    Scheme.FP8_BLOCKS: ("weight", "weight_scale_inv"),
    Scheme.GPTQ: ("qweight", "qzeros", "scales"),
    Scheme.AWQ: ("qweight", "qzeros", "scales"),
}


def open_random(model: str, device: torch.device) -> tuple[Checkpoint, WeightSource]:
    """Return the checkpoint and weights of one of SHAPES by its name, the same in every process.

    One of STORED follows after a colon if the weights are quantized.
    """
    shape, _, stored = model.partition(":")
    config, quantization = SHAPES[shape], STORED[stored] if stored else None
    return random_checkpoint(model, config, quantization), RandomWeights(config, device, quantization=quantization)


def random_checkpoint(name: str, config: ModelConfig, quantization: Quantization | None = None) -> Checkpoint:
    """Return a checkpoint without files, whose weights come from RandomWeights."""
    return Checkpoint(
        name=name,
        path=Path(name),
        format=WeightFormat.SAFETENSORS,
        config=config,
        eos_token_ids=(),
        bos_token=None,
        eos_token=None,
        add_bos=False,
        chat_template=None,
        build_tokenizer=byte_tokenizer,
        quantization=quantization,
    )


class RandomWeights:
    """The weight source (engine.model_loader.checkpoint_weights) of random weights.

    They are normal numbers with a standard deviation of 0.02; norms' gains and attention sinks are around 1. MXFP4 has
    random bytes times 2 ** -7; the codes of INT4 are random, too. `quantization` says how dense matrices are stored.
    """

    interleaved = False

    def __init__(
        self, config: ModelConfig, device: torch.device, seed: int = 0, quantization: Quantization | None = None
    ) -> None:
        self._config, self._device = config, device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._scheme = None if quantization is None else quantization.scheme
        self.quantized = None if quantization is None else QuantizedMatrices(quantization, self._stored, str)

    def tensor(self, name: str, cut: TensorSlice | None = None) -> torch.Tensor:
        tensor = self._whole(name)
        return tensor if cut is None else cut.of(tensor)

    def _whole(self, name: str) -> torch.Tensor:
        *_, module, kind = name.split(".")
        experts = self._config.experts
        if module == "experts" and experts is not None:
            return self._transposed(kind, experts) if experts.as_llama4 else self._of_all_experts(kind)
        of_expert = ".experts." in name or ".shared_expert." in name
        shape = self._shape(kind if kind == "sinks" else module, experts if of_expert else None)
        if kind == "bias":
            shape = shape[:1]
        elif len(shape) == 1:
            return 0.5 + torch.rand(shape, device=self._device, generator=self._generator)
        return torch.randn(shape, device=self._device, generator=self._generator).mul_(0.02)

    def _stored(self, name: str) -> torch.Tensor | None:
        """Return a tensor of a dense matrix in the layout of the quantization scheme, if it has one."""
        module, _, kind = name.rpartition(".")
        if self._scheme is None or kind not in _TENSORS[self._scheme]:
            return None
        n, k = self._shape(module.rpartition(".")[2], None)
        if kind == "weight":
            return torch.randn(n, k, device=self._device, generator=self._generator).to(torch.float8_e4m3fn)
        if kind == "weight_scale":
            return torch.full((n, 1), 0.02, device=self._device)
        if kind == "weight_scale_inv":
            return torch.full((-(-n // 128), -(-k // 128)), 0.02, device=self._device)
        if kind == "scales":
            return torch.full((k // 128, n), 0.005, dtype=torch.float16, device=self._device)
        if kind == "qweight":
            return self._words((k // 8, n) if self._scheme is Scheme.GPTQ else (k, n // 8))
        zeros = k // 128, n // 8
        if self._scheme is Scheme.AWQ:
            return self._words(zeros)
        return torch.full(zeros, 0x77777777, dtype=torch.int32, device=self._device)

    def _words(self, shape: tuple[int, ...]) -> torch.Tensor:
        limits = torch.iinfo(torch.int32)
        options = {"dtype": torch.int32, "device": self._device, "generator": self._generator}
        return torch.randint(limits.min, limits.max, shape, **options)

    def _transposed(self, kind: str, experts: Experts) -> torch.Tensor:
        """Return the weights of all experts of a layer in Llama 4's layout.

        They are bf16 on a GPU, since Maverick's gate and up would take 43 GB in float32.
        """
        hidden, inner = self._config.hidden_size, experts.intermediate_size
        shape = (hidden, 2 * inner) if kind == "gate_up_proj" else (inner, hidden)
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        made = torch.empty(experts.count, *shape, device=self._device, dtype=dtype)
        return made.normal_(0.0, 0.02, generator=self._generator)

    def _of_all_experts(self, kind: str) -> torch.Tensor:
        """Return the weights of all experts of a layer in gpt-oss's layout, in MXFP4."""
        experts, hidden = self._config.experts, self._config.hidden_size
        assert experts is not None
        inner = experts.intermediate_size
        rows, columns = (2 * inner, hidden) if kind.startswith("gate_up") else (hidden, inner)
        if kind.endswith("_bias"):
            shape = (experts.count, rows)
            return torch.randn(shape, device=self._device, generator=self._generator).mul_(0.02)
        shape = (experts.count, rows, columns // 32)
        if kind.endswith("_scales"):
            return torch.full(shape, 120, dtype=torch.uint8, device=self._device)
        bytes_ = (*shape, 16)
        return torch.randint(256, bytes_, dtype=torch.uint8, device=self._device, generator=self._generator)

    def _shape(self, kind: str, experts: Experts | None) -> tuple[int, ...]:
        """Return the shape of a tensor; `experts` is given if it belongs to one of them."""
        config = self._config
        hidden, inner = config.hidden_size, experts.intermediate_size if experts else config.intermediate_size
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shapes = {
            "q_proj": (q_width, hidden),
            "k_proj": (kv_width, hidden),
            "v_proj": (kv_width, hidden),
            "o_proj": (hidden, q_width),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
            "q_norm": (config.head_dim,),
            "k_norm": (config.head_dim,),
            "sinks": (config.num_heads,),
            "router": (config.experts.count if config.experts else 0, hidden),
            "gate": (config.experts.count if config.experts else 0, hidden),
            "embed_tokens": (config.vocab_size, hidden),
            "lm_head": (config.vocab_size, hidden),
        }
        return shapes.get(kind, (hidden,))


def byte_tokenizer(words: Iterable[str] = ()) -> Tokenizer:
    """Return a tokenizer with a token for each byte, then one for each of `words`, and no others."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
