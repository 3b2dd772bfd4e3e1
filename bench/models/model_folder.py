"""The command that writes Llama-8B's shape with random bf16 weights as a Hugging Face folder.

    python -m bench.models.model_folder /dev/shm/llama-8b --device cuda

Servers are started on it where the text does not matter. It takes 16 GB, so a folder in memory is the place; several
servers, Tandem or another, can read it.
"""

import argparse
import json
import string
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders

from bench.models.random_model import LLAMA_8B, RandomWeights, byte_tokenizer
from models.config import ModelConfig

TINY = replace(
    LLAMA_8B, vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=8, num_kv_heads=2,
    head_dim=32, max_model_len=1024,
)  # fmt: skip
SMALL = replace(
    LLAMA_8B, vocab_size=4096, hidden_size=512, intermediate_size=1408, num_layers=8, num_heads=8, num_kv_heads=4,
    head_dim=64, max_model_len=1024,
)  # fmt: skip
"""A fifth of the default model, for systems of many processes on few cores."""
LAYERS_A_FILE = 4
NUM_WRITERS = 4
INDEX = "model.safetensors.index.json"
_KINDS = (
    "input_layernorm", "post_attention_layernorm",
    *(f"self_attn.{kind}_proj" for kind in "qkvo"),
    *(f"mlp.{kind}_proj" for kind in ("gate", "up", "down")),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", help="where the numbers are drawn")
    parser.add_argument("--tiny", action="store_true", help="two small layers, to try things out")
    args = parser.parse_args()
    began_s = time.perf_counter()
    write_folder(args.folder, TINY if args.tiny else LLAMA_8B, torch.device(args.device))
    nbytes = sum(file.stat().st_size for file in args.folder.iterdir())
    print(f"{args.folder}: {nbytes / 1e9:.1f} GB in {time.perf_counter() - began_s:.1f} s")


def write_folder(folder: Path, config: ModelConfig, device: torch.device, gain: float = 1.0) -> None:
    """Write a folder that transformers, vLLM and Tandem can open.

    `gain`: what matrices are multiplied by; with a large one greedy answers depend on all of their prompts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = tensor_names(config)
    files = [f"model-{1 + number:05d}-of-{len(parts):05d}.safetensors" for number in range(len(parts))]

    def write(number: int) -> None:
        source = RandomWeights(config, device, seed=number)
        drawn = {name: source.tensor(name) for name in parts[number]}
        tensors = {name: (t * gain if t.dim() > 1 else t).to(torch.bfloat16).cpu() for name, t in drawn.items()}
        save_file(tensors, folder / files[number], {"format": "pt"})

    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        list(pool.map(write, range(len(parts))))
    weight_map = {name: file for names, file in zip(parts, files, strict=True) for name in names}
    _write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})
    _write_json(folder / "config.json", config_json(config))
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    wide_tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))


def tensor_names(config: ModelConfig) -> list[list[str]]:
    """Return the names of the tensors in each file."""
    ends = [f"{module}.weight" for module in ("model.embed_tokens", "model.norm", "lm_head")]
    starts = range(0, config.num_layers, LAYERS_A_FILE)
    return [ends, *(_layer_names(range(start, min(start + LAYERS_A_FILE, config.num_layers))) for start in starts)]


def _layer_names(layers: range) -> list[str]:
    return [f"model.layers.{layer}.{kind}.weight" for layer in layers for kind in _KINDS]


def config_json(config: ModelConfig) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_model_len,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "bfloat16",
    }


def wide_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer of all bytes and of words of four letters for the other ids.

    Every token is a text of its own, so that a server has something to send for each. Bytes are therefore decoded as
    the vocabulary writes them: the first bytes of a character would be no text, and the gap after them as long as two.
    """
    words = ("Ġ" + "".join(letters) for letters in product(string.ascii_lowercase, repeat=4))
    tokenizer = byte_tokenizer(islice(words, vocab_size - 256))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
