"""The model that a serving benchmark writes: opened as any other folder, computed, and every token a text."""

from pathlib import Path

import torch

from bench.models.model_folder import LAYERS_A_FILE, TINY, tensor_names, wide_tokenizer, write_folder
from bench.models.random_model import LLAMA_8B
from checkpoint import open_checkpoint
from contracts.sampling import SamplingParams
from engine.loader import load_engine
from engine.settings import EngineSettings
from tests.engine.driving import answers


def test_a_folder_is_opened_and_answers(tmp_path: Path):
    write_folder(tmp_path, TINY, torch.device("cpu"))
    assert open_checkpoint(str(tmp_path)).config == TINY
    settings = EngineSettings(model=str(tmp_path), kv_cache_nbytes=8 << 20, max_num_seqs=2, cache_dir=tmp_path)
    engine = load_engine(settings)
    sampling = SamplingParams(max_tokens=4, seed=0, temperature=0.0, ignore_eos=True)
    (tokens,) = answers(engine, [[300, 301, 302]], sampling)
    assert len(tokens) == 4


def test_every_tensor_of_llama_8b_is_in_one_file():
    files = tensor_names(LLAMA_8B)
    names = [name for file in files for name in file]
    assert len(files) == 1 + LLAMA_8B.num_layers // LAYERS_A_FILE
    assert len(names) == len(set(names)) == 3 + 9 * LLAMA_8B.num_layers
    assert "model.layers.31.mlp.down_proj.weight" in files[-1]


def test_every_token_is_a_text_of_its_own():
    tokenizer = wide_tokenizer(LLAMA_8B.vocab_size)
    assert tokenizer.get_vocab_size() == LLAMA_8B.vocab_size
    texts = [tokenizer.decode([index]) for index in [*range(256), *range(256, LLAMA_8B.vocab_size, 97)]]
    assert len(texts) == len(set(texts)) and not any("\ufffd" in text or text.strip() == "" for text in texts)
    assert len(tokenizer.encode("Ein Öl").ids) == 7
