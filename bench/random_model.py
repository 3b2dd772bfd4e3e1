"""Models of a real shape with random weights, made on the device: for speed, where no text matters."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from checkpoint.checkpoint import Checkpoint, WeightFormat
from checkpoint.config import ModelConfig

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


def random_checkpoint(name: str, config: ModelConfig) -> Checkpoint:
    """No files: weights come from RandomWeights."""
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
    )


class RandomWeights:
    """A weight source (engine.weights) of normal numbers, 0.02 wide; norm gains around 1."""

    interleaved = False

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._generator = torch.Generator(device).manual_seed(0)

    def tensor(self, name: str) -> torch.Tensor:
        shape = self._shape(name.split(".")[-2])
        if len(shape) == 1:
            return 0.5 + torch.rand(shape, device=self._device, generator=self._generator)
        return torch.randn(shape, device=self._device, generator=self._generator).mul_(0.02)

    def _shape(self, kind: str) -> tuple[int, ...]:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shapes = {
            "q_proj": (q_width, hidden),
            "k_proj": (kv_width, hidden),
            "v_proj": (kv_width, hidden),
            "o_proj": (hidden, q_width),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
            "embed_tokens": (config.vocab_size, hidden),
            "lm_head": (config.vocab_size, hidden),
        }
        return shapes.get(kind, (hidden,))


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and no others."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
