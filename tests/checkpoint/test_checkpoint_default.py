"""The default model's file: what it says, and that its tokenizer cuts text as the original does."""

import gguf
import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import open_checkpoint
from checkpoint.gguf.file import GgufFile

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint("")


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return checkpoint.tokenizer()


def test_it_is_named_and_shaped_as_published(checkpoint):
    config = checkpoint.config
    assert checkpoint.name == open_checkpoint("default").name == "SmolLM2-135M-Instruct"
    assert (config.family, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 30, 9, 3)
    assert (config.head_dim, config.vocab_size, config.max_model_len, config.tied_embeddings) == (64, 49152, 8192, True)
    assert (checkpoint.eos_token_ids, checkpoint.eos_token, checkpoint.add_bos) == ((2,), "<|im_end|>", False)


def test_the_header_reader_agrees_with_the_gguf_package(checkpoint):
    ours, theirs = GgufFile.open(checkpoint.path), gguf.GGUFReader(checkpoint.path)
    assert {tensor.name for tensor in theirs.tensors} == set(ours.tensors)
    for tensor in theirs.tensors[::30]:
        info = ours.tensors[tensor.name]
        assert list(info.shape) == tensor.shape.tolist()[::-1]
        assert np.array_equal(ours.blocks(info).reshape(-1), tensor.data.view(np.uint8).reshape(-1))
    assert ours.metadata["llama.rope.freq_base"] == theirs.fields["llama.rope.freq_base"].contents()


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello world", ["Hello", "Ġworld"]),
        ("2024", ["2", "0", "2", "4"]),
        ("I'll pay $15.", ["I", "'ll", "Ġpay", "Ġ$", "1", "5", "."]),
        ("<|im_start|>user\nHi<|im_end|>", ["<|im_start|>", "user", "Ċ", "Hi", "<|im_end|>"]),
        ("a  b", ["a", "Ġ", "Ġb"]),
    ],
)
def test_text_is_cut_as_smollm_cuts_it(tokenizer, text, pieces):
    assert tokenizer.encode(text).tokens == pieces


# The vocabulary itself lacks six control characters and the bytes that start planes 4 and up: such text is lost.
TEXT = st.text(st.characters(codec="utf-8", max_codepoint=0x2FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d"))


@settings(max_examples=300)
@given(text=TEXT)
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= index < 49152 for index in ids)


def test_special_tokens_are_single_and_skippable(tokenizer):
    assert [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    assert tokenizer.decode([1, 2]) == ""
    assert tokenizer.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"


def test_the_chat_template_adds_the_default_system_turn(checkpoint, tokenizer):
    template = jinja2.Environment().from_string(checkpoint.chat_template)
    text = template.render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(text).ids.count(1) == 3
