"""A GGUF file of a real shape with random weights, for start and memory where no text matters."""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from models.config import ModelConfig

QWEN2_05B = ModelConfig(
    family="qwen2",
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-6,
    rope_theta=1000000.0,
    max_model_len=32768,
    tied_embeddings=True,
    qkv_bias=True,
)
"""Qwen2.5-0.5B. Its rows of 896 are no whole blocks of 256, so Q4_K_M has them in Q5_0 and Q8_0."""
_ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_q4_k_m(path: Path, config: ModelConfig = QWEN2_05B) -> Path:
    """Write a file in the formats of llama.cpp's Q4_K_M for this shape, with a vocabulary of its size."""
    writer = GGUFWriter(path, "qwen2")
    for name, count in {
        "block_count": config.num_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "context_length": config.max_model_len,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
    }.items():
        writer.add_uint32(f"qwen2.{name}", count)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", config.norm_eps)
    writer.add_float32("qwen2.rope.freq_base", config.rope_theta)
    _add_vocabulary(writer, config.vocab_size)
    rng = np.random.default_rng(0)
    for name, (shape, kind) in _tensors(config).items():
        values = _random_blocks(rng, shape, kind)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: GGUFWriter, size: int) -> None:
    """Add the tokens that the model has, and nearly as many merges, which take time to read."""
    letters = [chr(0x4E00 + index) for index in range(400)]
    pairs = [(a, b) for a in letters for b in letters][: size - len(letters) - len(_ENDS)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*letters, *(a + b for a, b in pairs), *_ENDS])
    writer.add_token_types([1] * (size - len(_ENDS)) + [3] * len(_ENDS))
    writer.add_token_merges([f"{a} {b}" for a, b in pairs])
    writer.add_eos_token_id(size - 1)


def _tensors(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], GGMLQuantizationType]]:
    kinds = GGMLQuantizationType
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found: dict[str, tuple[tuple[int, ...], GGMLQuantizationType]] = {
        "token_embd.weight": ((config.vocab_size, hidden), kinds.Q8_0),
        "output_norm.weight": ((hidden,), kinds.F32),
    }
    for index in range(config.num_layers):
        # A half of the layers has 6 bits for what they write to the residual stream.
        down = kinds.Q6_K if index % 2 else kinds.Q4_K
        layer = {
            "attn_norm.weight": ((hidden,), kinds.F32),
            "attn_q.weight": ((q_width, hidden), kinds.Q5_0),
            "attn_k.weight": ((kv_width, hidden), kinds.Q5_0),
            "attn_v.weight": ((kv_width, hidden), kinds.Q8_0),
            "attn_q.bias": ((q_width,), kinds.F32),
            "attn_k.bias": ((kv_width,), kinds.F32),
            "attn_v.bias": ((kv_width,), kinds.F32),
            "attn_output.weight": ((hidden, q_width), kinds.Q5_0),
            "ffn_norm.weight": ((hidden,), kinds.F32),
            "ffn_gate.weight": ((inner, hidden), kinds.Q5_0),
            "ffn_up.weight": ((inner, hidden), kinds.Q5_0),
            "ffn_down.weight": ((hidden, inner), down),
        }
        found |= {f"blk.{index}.{name}": tensor for name, tensor in layer.items()}
    return found


def _random_blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: GGMLQuantizationType) -> np.ndarray:
    """Random codes; scales that are small numbers, which float16 has at the bytes that each format says."""
    if kind is GGMLQuantizationType.F32:
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    block, nbytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // block, nbytes), dtype=np.uint8)
    scale = np.array([1e-4 if block == 256 else 1e-3], np.float16).view(np.uint8)
    starts = {GGMLQuantizationType.Q6_K: (208,), GGMLQuantizationType.Q4_K: (0, 2)}.get(kind, (0,))
    for start in starts:
        blocks[..., start : start + 2] = scale
    return blocks.reshape(shape[0], -1)
