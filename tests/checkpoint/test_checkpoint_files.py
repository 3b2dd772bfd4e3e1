"""Files that are missing, damaged or of another kind: each a ConfigError that says what and what to do."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import httpx2  # what the hub's client asks with
import numpy as np
import pytest
from gguf import GGUFWriter
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoConfig, AutoTokenizer

from checkpoint import Advice, open_checkpoint
from checkpoint.fingerprint import weights_fingerprint
from checkpoint.gguf.file import GgufFile
from checkpoint.huggingface.model_config import model_config
from checkpoint.huggingface.safetensors_index import tensor_files
from checkpoint.quantization import Scheme
from contracts.errors import ConfigError
from models.config import AttentionTemperature, Experts, RopeScaling, YarnScaling

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 3,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
QWEN3_MOE = {
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
}
GPT_OSS = {
    **{key: value for key, value in QWEN3_MOE.items() if key != "moe_intermediate_size"},
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 32,
    "swiglu_limit": 7.0,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
LLAMA4 = {
    **CONFIG,
    "architectures": ["Llama4ForCausalLM"],
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8192,
    "use_qk_norm": False,
    "no_rope_layers": [],
    "attn_temperature_tuning": 4,
}
GEMMA3 = {**CONFIG, "architectures": ["Gemma3ForCausalLM"], "num_key_value_heads": 2}
MIXTRAL = {**CONFIG, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN2_MOE = {**QWEN3_MOE, "architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 4}
MISTRAL, QWEN2, PHI3 = ({"architectures": [f"{name}ForCausalLM"]} for name in ("Mistral", "Qwen2", "Phi3"))
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 8.0],
    "original_max_position_embeddings": 16,
}
WINDOW = {"sliding_window": 32, "use_sliding_window": True}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"w": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "</s>": 2}, merges=[]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_gguf(
    path: Path,
    arch: str = "llama",
    model: str = "gpt2",
    pre: str = "smollm",
    fields: Mapping[str, int | float | str] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    more_tokens: tuple[str, ...] = (),
) -> Path:
    writer = GGUFWriter(path, arch)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (fields or {}).items():
        add[type(value)](key, value)
    for key, value in {
        "block_count": 1,
        "embedding_length": 8,
        "feed_forward_length": 16,
        "context_length": 64,
    }.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_uint32(f"{arch}.attention.head_count", 2)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["▁", "a", "b", "ab", "▁ab", "</s>", *more_tokens])
    writer.add_token_scores([-1.0, -2.0, -3.0, -0.5, -0.1, 0.0, *[0.0] * len(more_tokens)])
    writer.add_token_types([1, 1, 1, 1, 1, 3, *[3] * len(more_tokens)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(5)
    writer.add_eos_token_id(5)
    for name, tensor in {"token_embd.weight": np.zeros((6, 8), np.float32), **(tensors or {})}.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(model: Path | str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_checkpoint(str(model)).tokenizer()


def test_a_folder_gives_its_configuration(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, "chat_template": "T"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.name, checkpoint.eos_token_ids, checkpoint.eos_token) == (folder.name, (1, 2), "</s>")
    assert checkpoint.chat_template == "T" and checkpoint.config.head_dim == 4 and checkpoint.config.num_kv_heads == 2
    (folder / "chat_template.jinja").write_text("J")
    assert open_checkpoint(str(folder)).chat_template == "J"


def test_a_folder_says_how_its_makers_draw(folder):
    """vLLM takes what is stated, too, whether or not `do_sample` is."""
    assert open_checkpoint(str(folder)).advice == Advice()
    stated = {"do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": 1, "min_p": None, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    assert open_checkpoint(str(folder)).advice == Advice(temperature=0.6, top_k=20)
    (folder / "generation_config.json").write_text(json.dumps({"top_k": -1, "repetition_penalty": 1.05}))
    assert open_checkpoint(str(folder)).advice == Advice(repetition_penalty=1.05)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"temperature": 3}, "temperature is 3; it must be at least 0 and at most 2"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0.0}, r"top_p is 0\.0; it must be above 0 and at most 1"),
        ({"top_k": True}, "top_k is True"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
    ],
)
def test_advice_that_no_request_could_give_is_refused(folder, stated, words):
    (folder / "generation_config.json").write_text(json.dumps(stated))
    refused(folder, rf"generation_config\.json: {words}")


def test_conversations_with_tools_may_have_a_template_of_their_own(folder, tmp_path):
    """Hermes 2 Pro and 3 have one, in any of the places that transformers and llama.cpp write it to."""
    named = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.chat_template, checkpoint.tool_template) == ("T", "U")
    (folder / "chat_template.jinja").write_text("J")
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.chat_template, checkpoint.tool_template) == ("J", None)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("K")
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.chat_template, checkpoint.tool_template) == ("J", "K")
    fields = {"tokenizer.chat_template": "T", "tokenizer.chat_template.tool_use": "U"}
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "a.gguf", fields=fields)))
    assert (checkpoint.chat_template, checkpoint.tool_template) == ("T", "U")


def test_special_tokens_of_an_older_folder_are_in_a_file_of_their_own(folder):
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "a", "eos_token": {"content": "b"}}))
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.bos_token, checkpoint.eos_token, checkpoint.eos_token_ids) == ("a", "b", (2, 1))
    newer = {"added_tokens_decoder": {}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(newer))
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.bos_token, checkpoint.eos_token, checkpoint.eos_token_ids) == (None, "</s>", (2,))


LISTED = {"content": "<x>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


@pytest.mark.parametrize("known", [None, {}, {"special": True}], ids=["", "plain", "special"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"added_tokens_decoder": {"3": {**LISTED, "special": True}}},
        {"added_tokens_decoder": {"3": {**LISTED, "special": False}}},
        {"added_tokens_decoder": {"3": {**LISTED, "special": True, "rstrip": True}}},
        {"added_tokens_decoder": {"4": {**LISTED, "content": "<y>"}, "3": {**LISTED, "special": False}}},
        {"eos_token": "<x>"},
        {"eos_token": "<x>", "added_tokens_decoder": {"3": {**LISTED, "special": False}}},
        {"additional_special_tokens": ["<x>"]},
        {"additional_special_tokens": ["<x>"], "added_tokens_decoder": {"3": {**LISTED, "special": False}}},
        {"extra_special_tokens": {"image_token": "<x>"}, "pad_token": "<y>"},
    ],
)
def test_tokens_that_the_tokenizers_configuration_adds_are_those_of_transformers(config, known, tmp_path):
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate("abxy <>")}, merges=[]))
    if known is not None:
        tokenizer.add_tokens([AddedToken("<x>", normalized=False, **known)])
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    save_file({"w": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    ours, theirs = open_checkpoint(str(tmp_path)).tokenizer(), AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs.encode("a<x> b<y><x>")
    assert ours.encode("a<x> b<y><x>").ids == ids
    for skips in (True, False):
        assert ours.decode(ids, skips) == theirs.decode(ids, skip_special_tokens=skips)


def test_a_token_of_another_kind_is_told(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"3": {"content": 7}}}))
    refused(folder, "a token in tokenizer_config.json is of the wrong kind")


def test_a_tokenizer_neither_cuts_nor_fills_up_prompts(folder):
    """Fine-tuning leaves the length of its training texts in tokenizer.json."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert open_checkpoint(str(folder)).tokenizer().encode("aaaa").ids == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    refused(folder, name.replace("model.safetensors", "no \\*.safetensors file"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_damaged_json_is_named(folder, name):
    (folder / name).write_text("{")
    refused(folder, f"cannot read .*{name}")


@pytest.mark.parametrize("name", ["lm_head.weight", "language_model.lm_head.weight", "lm_head.qweight"])
def test_an_output_head_that_is_stored_is_the_models_whatever_is_said_of_its_embedding(folder, name):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    assert open_checkpoint(str(folder)).config.tied_embeddings
    save_file({name: np.zeros(4, np.float32)}, folder / "model.safetensors")
    assert not open_checkpoint(str(folder)).config.tied_embeddings


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors.index.json"]
)
def test_a_json_that_is_too_deep_is_named(folder, name):
    (folder / name).write_text("[" * 100_000)
    refused(folder, f"cannot read .*{name}")


@pytest.mark.parametrize("ids", ["</s>", 1.0, True, -1, 3, [2, 3], [[2]], {"a": 2}])
def test_an_end_that_is_no_token_is_told(folder, ids):
    """It ended a start in the tokenizer's words, or was an end that no answer comes to."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    refused(folder, r"generation_config.json: eos_token_id is .*; token ids from 0 to 2 are expected")


def test_an_end_that_only_the_tokenizer_knows_is_none(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<new>"}))
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tokenizer().token_to_id("<new>") == 3 and checkpoint.eos_token_ids == (2,)


@pytest.mark.parametrize("stated", [1, {"a": 1}, [1], [{"name": "default"}], [{"name": "default", "template": 3}]])
def test_a_chat_template_of_another_kind_is_told(folder, stated):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": stated}))
    refused(folder, "tokenizer_config.json: chat_template is of the wrong kind; a text, or a list of tables")


def test_a_chat_template_that_is_no_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xe9")
    refused(folder, "cannot read .*chat_template.jinja")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").mkdir()
    refused(folder, "cannot read .*chat_template.jinja")


def test_a_bad_safetensors_header_says_download_again(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    refused(folder, "not a sound safetensors file .* download it again")


@pytest.mark.parametrize(
    "header", [[1], {"w": 3}, {"w": {"dtype": "F32"}}, {"w": {"data_offsets": "ab"}}, {"w": {"data_offsets": [1]}}]
)
def test_a_safetensors_header_of_another_kind_says_download_again(folder, header):
    data = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    refused(folder, "model.safetensors is not a sound safetensors file .* download it again")


def test_a_safetensors_header_that_is_too_deep_says_download_again(folder):
    data = b"[" * 100_000
    (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    refused(folder, "model.safetensors is not a sound safetensors file .* download it again")


@pytest.mark.parametrize("index", [[1], {"weight_map": []}, {}])
def test_an_index_of_another_kind_is_named(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "cannot read .*model.safetensors.index.json")


def test_other_weights_that_lie_beside_the_models_are_not_read(folder):
    """Those of an average or of an optimizer, say: transformers reads model.safetensors alone."""
    save_file({"w": np.ones(4, np.float32)}, folder / "model_ema.safetensors")
    assert tensor_files(folder) == {"w": folder / "model.safetensors"}


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "generation_config.json", "hf_quant_config.json"]
)
def test_a_json_that_is_no_table_is_named(folder, name):
    (folder / name).write_text("[1]")
    refused(folder, f"cannot read .*{name}: it holds no table")


def test_a_short_safetensors_file_says_how_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    refused(folder, r"cut short: \d+ of \d+ bytes")


def test_a_shard_that_is_not_there_is_named(folder):
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "model-00001-of-00002.safetensors is missing: the download is incomplete")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported; supported are deepseek_v3, gemma3, glm4, glm4_moe, gpt_oss",
        ),
        ({"sliding_window": 32}, r"sliding-window attention \(32 of 64 tokens\) is not supported"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window is 0; a whole number from 1"),
        ({**QWEN2, **WINDOW, "layer_types": ["chunked_attention"]}, "layer_types must say sliding_attention or full"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope scaling 'ntk' is not supported; supported are default, dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor of its rope scaling is 0; a number above 0"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "lacks 'original_max_position_embeddings', which longrope needs"),
        (
            {"rope_scaling": LONGROPE | {"short_factor": [1.0, "a"]}},
            "short_factor of its rope scaling is 'a'; a number",
        ),
        ({"rope_scaling": LONGROPE | {"long_factor": 2.0}}, "long_factor is 2.0; a list of numbers is expected"),
        (
            {"rope_scaling": LONGROPE | {"long_factor": [1.0]}},
            "short_factor has 2 numbers, long_factor 1; one each a pair",
        ),
        (
            {"rope_scaling": LONGROPE, "head_dim": 8},
            "long_factor has 2 numbers; heads of 8 columns, of which 8 are turned",
        ),
        ({"rope_scaling": LONGROPE | {"long_mscale": 1.2}}, "longrope with long_mscale is not supported"),
        ({**PHI3, "partial_rotary_factor": 0.3}, "partial_rotary_factor is 0.3 of 4 columns; an even part is expected"),
        ({**PHI3, "partial_rotary_factor": 2}, "partial_rotary_factor is 2 of 4 columns; an even part is expected"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "lacks 'factor'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": "a"}},
            "mscale of its rope scaling is 'a'; a num",
        ),
        ({"num_hidden_layers": 3, "hidden_size": None}, "hidden_size is None; a whole number from 1 to 2147483647"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: rope that turns a part of each head is not"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
            "rope_parameters of their own for 'full_attention' are not supported",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": {"rope_theta": 1e6}},
            "rope_scaling hides rope_parameters and the rope_theta in them: write both into one table",
        ),
        ({"num_hidden_layers": 0}, "here/config.json: num_hidden_layers is 0; a whole number from 1"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5; a whole number from 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; a whole number from 1"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000; a whole number from 1 to 2147483647"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads is '2'; a whole number from 1"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_attention_heads is 6; a multiple of .*, 4, is"),
        ({"num_attention_heads": 9}, "head_dim is 0; a whole number from 1"),
        ({"head_dim": 17}, "head_dim is 17; an even number is expected"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None; a whole number from 1"),
        ({"max_position_embeddings": math.nan}, "max_position_embeddings is nan; a whole number from 1"),
        ({"vocab_size": "3"}, "vocab_size is '3'; a whole number from 1"),
        ({"vocab_size": [0] * 99}, r"vocab_size is \[0, 0, .{,60}\.\.; a whole number from 1"),
        ({"rms_norm_eps": "1e-5"}, r"rms_norm_eps is '1e-5'; a number above 0, and at most 1e\+18, is expected"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan; a number above 0"),
        ({"rope_theta": 1}, "rope_theta is 1; a number above 1"),
        ({"rope_theta": 2**70}, "rope_theta is 1180591620717411303424; a number above 1, and at most"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; a list of names is expected"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; a table is expected"),
        ({**MISTRAL, "sliding_window": "a"}, "sliding_window is 'a'; a whole number from 1"),
        ({"rope_scaling": LLAMA3 | {"factor": "8"}}, "factor of its rope scaling is '8'; a number above 0"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "low_freq_factor of its rope scaling is None; a number"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 5.0}}, "low_freq_factor is 5.0; no more than high_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "a"}}, "factor of its rope scaling is 'a'; a number above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": math.inf}}, "factor of its rope scaling is inf; a number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": -1}}, "beta_fast of its rope scaling is -1;"),
        ({"hidden_act": "gelu"}, "only SiLU"),
        ({"attention_bias": True}, "without mlp_bias and attention_bias"),
    ],
)
def test_what_would_give_wrong_text_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        model_config({**CONFIG, **changes}, "here")


@pytest.mark.parametrize(
    ("changes", "file", "words"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, None, "its weights are in MLX's format"),
        (
            {"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}},
            None,
            "its weights are in MLX's format",
        ),
        ({}, "quantize_config.json", "quantize_config.json says that its weights are GPTQ's"),
        ({}, "quant_config.json", "quant_config.json says that its weights are AWQ's"),
    ],
)
def test_packed_weights_that_the_configuration_does_not_name_are_told_at_once(folder, changes, file, words):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    if file is not None:
        (folder / file).write_text('{"bits": 4, "group_size": 128}')
    (folder / "tokenizer.json").unlink()  # nothing else is looked at before
    refused(folder, words)


def test_a_quantization_that_is_not_supported_is_refused(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"bits": 4}}))
    refused(
        folder, r"quantization_config.quant_method is None; supported: compressed-tensors, fp8, fbgemm_fp8, modelopt"
    )
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": "fp8"}))
    refused(folder, "quantization_config is 'fp8'; a table is expected")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    refused(folder, r"hf_quant_config.json.quantization.quant_algo is 'W4A8_AWQ'; supported: FP8, .*use another")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "fp8", "ignored_layers": [1]}, "ignored_layers is 1; names of modules are expected"),
        ({"quant_method": "fp8", "ignored_layers": ["re:("]}, r"ignored_layers is 're:\('; it is no pattern"),
        ({"quant_method": "compressed-tensors", "config_groups": 5}, "config_groups is 5; a table is expected"),
    ],
)
def test_a_table_of_quantization_of_another_kind_is_refused_by_its_field(folder, changes, words):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": changes}))
    refused(folder, f"quantization_config.{words}")


@pytest.mark.parametrize(
    ("config", "window", "layers"),
    [
        ({**CONFIG, **MISTRAL, "sliding_window": 32, "use_sliding_window": False}, 32, (0,)),
        ({**CONFIG, **MISTRAL, "max_position_embeddings": 8192}, 4096, (0,)),
        ({**CONFIG, **MISTRAL, "sliding_window": None}, 0, ()),
        ({**CONFIG, **MISTRAL, "sliding_window": 64}, 0, ()),
        ({**CONFIG, **MISTRAL, "sliding_window": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 64, (0,)),
        ({**CONFIG, **QWEN2, **WINDOW, "max_window_layers": 0}, 32, (0,)),
        ({**CONFIG, **QWEN2, **WINDOW}, 0, ()),
        ({**CONFIG, **QWEN2, **WINDOW, "layer_types": ["sliding_attention"]}, 32, (0,)),
        ({**CONFIG, **QWEN2, **WINDOW, "use_sliding_window": False}, 0, ()),
        ({**QWEN3_MOE, **WINDOW}, 32, (0, 1, 2, 3)),
        ({**CONFIG, **PHI3}, 0, ()),
        ({**CONFIG, **PHI3, "sliding_window": 32}, 32, (0,)),
    ],
)
def test_windows_are_those_of_transformers_layers(config, window, layers):
    found = model_config(config, "here")
    assert (found.window, found.windowed_layers) == (window, layers)


@pytest.mark.parametrize(
    ("stated", "changes", "length"),
    [(64, {}, 256), (64, {"original_max_position_embeddings": 32}, 128), (512, {}, 2048), (512, {"factor": 0.5}, 512)],
)
def test_yarn_lengthens_the_context(stated, changes, length):
    scaling = {"rope_type": "yarn", "factor": 4.0, **changes}
    assert (
        model_config({**CONFIG, "max_position_embeddings": stated, "rope_scaling": scaling}, "x").max_model_len
        == length
    )


def test_a_context_in_dual_chunks_ends_with_the_first():
    """Positions behind it are not those of plain attention, which would give wrong text."""
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    config = {**CONFIG, "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 1010000}
    assert model_config(config, "x").max_model_len == 1010000
    assert model_config({**config, "dual_chunk_attention_config": chunks}, "x").max_model_len == 253952
    with pytest.raises(ConfigError, match="lacks 'local_size'"):
        model_config({**config, "dual_chunk_attention_config": {"chunk_size": 262144}}, "x")


@pytest.mark.parametrize(
    ("changes", "dense_layers"),
    [({}, ()), ({"mlp_only_layers": [0, 2]}, (0, 2)), ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (0, 2, 3))],
)
def test_layers_without_experts_are_found(changes, dense_layers):
    config = model_config({**QWEN3_MOE, **changes}, "here")
    assert config.experts == Experts(8, 2, 4, False, dense_layers)
    assert [layer for layer in range(4) if config.experts_of(layer) is None] == list(dense_layers)


def test_the_number_of_experts_is_read_from_both_spellings():
    newer = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"} | {"num_local_experts": 8}
    assert model_config(newer, "here") == model_config(QWEN3_MOE, "here")


@pytest.mark.parametrize(("config", "model_type"), [(CONFIG, "llama"), (QWEN3_MOE, "qwen3_moe"), (GPT_OSS, "gpt_oss")])
def test_a_configuration_that_states_no_architecture_is_known_by_its_model_type(config, model_type):
    assert model_config(config | {"architectures": None, "model_type": model_type}, "a") == model_config(config, "a")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 9}, "9 of 8 experts in every layer of 1 are not supported"),
        ({"decoder_sparse_step": 0}, "2 of 8 experts in every layer of 0 are not supported"),
        ({"attention_bias": True}, "without mlp_bias and attention_bias"),
    ],
)
def test_a_mixture_that_would_give_wrong_text_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        model_config({**QWEN3_MOE, **changes}, "here")


def test_gpt_oss_is_read_whole():
    config = model_config(GPT_OSS, "here")
    assert config.experts == Experts(8, 2, 16, True, (), as_gpt_oss=True, is_mxfp4=True)
    assert (config.window, config.windowed_layers) == (32, (0, 2))
    assert config.sinks and config.qkv_bias and config.output_bias and not config.qk_norm
    assert config.rope_scaling == YarnScaling(32.0, 4096, 32.0, 1.0, 0.1 * math.log(32.0) + 1.0, False)
    plain = model_config({key: value for key, value in GPT_OSS.items() if key != "quantization_config"}, "here")
    assert plain.experts == Experts(8, 2, 16, True, (), as_gpt_oss=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swiglu_limit": 6.0}, "experts with {'swiglu_limit': 6.0} are not supported"),
        ({"swiglu_alpha": 1.0}, "experts with {'swiglu_alpha': 1.0} are not supported"),
        ({"attention_bias": False}, "without attention_bias or without a sliding_window is not supported"),
        ({"sliding_window": None}, "without attention_bias or without a sliding_window is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types must say sliding_attention or full_attention for each"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types must say sliding_attention or full_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gpt-oss quantized by 'gptq' is not supported"),
    ],
)
def test_a_gpt_oss_that_would_give_wrong_text_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        model_config({**GPT_OSS, **changes}, "here")


@pytest.mark.parametrize("stated", [{}, {"layer_types": None}])
def test_a_gpt_oss_that_states_no_kinds_of_layers_has_those_of_transformers(stated, tmp_path):
    config = {key: value for key, value in GPT_OSS.items() if key != "layer_types"} | stated
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt_oss"}))
    kinds = AutoConfig.from_pretrained(tmp_path).layer_types
    windowed = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    assert model_config(config, "here").windowed_layers == windowed == (0, 2)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**GEMMA3, "sliding_window": None}, "sliding_window is None; a whole number from 1"),
        (
            {**GEMMA3, "query_pre_attn_scalar": -4},
            "query_pre_attn_scalar or attention_multiplier is .*; a number above",
        ),
        ({**GEMMA3, "rope_local_base_freq": 0}, "rope_local_base_freq is 0.0; a number above 1"),
        ({**MIXTRAL, "num_experts_per_tok": 1.5}, "num_experts_per_tok is 1.5; a whole number from 1"),
        ({**MIXTRAL, "num_local_experts": 2.5}, "num_local_experts is 2.5; a whole number from 1"),
        ({**QWEN2_MOE, "moe_intermediate_size": "a"}, "moe_intermediate_size is 'a'; a whole number from 1"),
        ({**QWEN2_MOE, "shared_expert_intermediate_size": -3}, "shared_expert_intermediate_size is -3; a whole number"),
        ({**LLAMA4, "intermediate_size_mlp": "32"}, "intermediate_size_mlp is '32'; a whole number from 1"),
        ({**LLAMA4, "attention_chunk_size": -64}, "attention_chunk_size is -64; a whole number from 1"),
    ],
)
def test_a_number_that_only_some_families_have_is_checked_too(config, words):
    with pytest.raises(ConfigError, match=f"here/config.json: .*{words}"):
        model_config(config, "here")


def test_llama4_is_read_whole():
    config = model_config(LLAMA4, "here")
    assert config.experts == Experts(8, 1, 16, True, (0, 2), as_llama4=True) and config.intermediate_size == 32
    assert (config.segment, config.windowed_layers, config.no_rope_layers) == (8192, (0, 1, 2), (3,))
    assert (
        config.attention_temperature == AttentionTemperature(8192.0, 0.1)
        and not config.plain_qk_norm
        and not config.qk_norm
    )
    whole = {"attention_chunk_size": None, "use_qk_norm": True, "attn_temperature_tuning": False, "moe_layers": [0, 1]}
    config = model_config({**LLAMA4, **whole, "no_rope_layers": [1, 0, 1, 0]}, "here")
    assert config.experts_of(2) is None and config.experts_of(1) is not None
    assert (config.segment, config.windowed_layers, config.no_rope_layers) == (0, (), (1, 3))
    assert config.attention_temperature is None and config.plain_qk_norm
    unsaid = {key: value for key, value in LLAMA4.items() if key != "attention_chunk_size"}
    assert model_config(unsaid, "here").segment == 8192


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 2}, "a Llama 4 with 2 experts a token is not supported"),
        ({"hidden_act": "gelu"}, "only SiLU and layers without mlp_bias and attention_bias"),
        ({"attention_bias": True}, "only SiLU and layers without mlp_bias and attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "a Llama 4 with yarn is not supported"),
        ({"attention_chunk_size": 100}, "attention_chunk_size of 100 is not supported; supported are multiples of 64"),
        ({"interleave_moe_layer_step": 0}, "experts in every layer of 0 are not supported"),
        ({"no_rope_layers": [1]}, "no_rope_layers and layer_types must say for each layer"),
        ({"layer_types": ["sliding_attention"] * 4}, "no_rope_layers and layer_types must say for each layer"),
    ],
)
def test_a_llama4_that_would_give_wrong_text_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        model_config({**LLAMA4, **changes}, "here")


def test_a_llama4_folder_is_read_with_and_without_a_vision_tower(folder):
    file, names = folder / "config.json", {"architectures": ["Llama4ForConditionalGeneration"]}
    file.write_text(json.dumps(LLAMA4))
    text = open_checkpoint(str(folder))
    file.write_text(json.dumps({**names, "text_config": LLAMA4 | {"architectures": None}, "vision_config": {}}))
    whole = open_checkpoint(str(folder))
    assert (whole.config, whole.eos_token_ids) == (text.config, text.eos_token_ids)
    file.write_text(json.dumps({**names, "vision_config": {}}))
    refused(folder, "lacks 'text_config'")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "a Llama 4 in FP8 with a scale for each block of 128 x 128 is not supported; supported are FP8",
        ),
        ({"quant_method": "gptq", "bits": 4}, "a Llama 4 in INT4 as GPTQ packs it is not supported"),
        ({"quant_method": "awq", "bits": 4}, "a Llama 4 in INT4 as AWQ packs it is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "a Llama 4 in NVFP4, a scale for 16 columns is not"),
    ],
)
def test_a_llama4_is_read_in_fp8_by_row_or_matrix_alone(folder, config, words):
    file = folder / "config.json"
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": LLAMA4}
    file.write_text(json.dumps({**whole, "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}))
    found = open_checkpoint(str(folder)).quantization
    assert found is not None and found.scheme is Scheme.FP8_ROWS
    file.write_text(json.dumps({**whole, "quantization_config": config}))
    refused(folder, words)


def test_a_quantized_model_of_fused_matrices_is_refused(folder):
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **PHI3, **quantized}))
    refused(folder, "quantization_config is of a model that stores self_attn.qkv_proj as one matrix")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_is_read_from_both_spellings(key):
    assert model_config({**CONFIG, key: LLAMA3}, "here").rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        (CONFIG, 10000.0),
        ({**CONFIG, "rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5),
        ({**CONFIG, "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "rope_theta": 2e5}}, 2e5),
        ({**CONFIG, "rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 2e5}}, 2e5),
        ({key: value for key, value in GPT_OSS.items() if key != "rope_theta"}, 150000.0),
        ({**LLAMA4, "attn_temperature_tuning": True}, 500000.0),
    ],
)
def test_the_base_of_rope_is_that_of_transformers(config, theta, tmp_path):
    kinds = {"GptOssForCausalLM": "gpt_oss", "LlamaForCausalLM": "llama", "Llama4ForCausalLM": "llama4_text"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": kinds[config["architectures"][0]]}))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == theta
    assert model_config(config, "here").rope_theta == theta


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        *((name, CONFIG) for name in ("llama", "mistral", "qwen2", "qwen3")),
        *((name, CONFIG) for name in ("granite", "olmo2", "phi3")),
        ("qwen3_moe", QWEN3_MOE),
        ("gpt_oss", GPT_OSS),
        ("llama4_text", LLAMA4 | {"attn_temperature_tuning": True}),
    ],
)
def test_the_width_of_a_head_that_is_not_stated_is_that_of_transformers(model_type, config, tmp_path):
    """Whose modules take the hidden size's part where a configuration class has no width of its own."""
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    reference = AutoConfig.from_pretrained(tmp_path)
    family = {"architectures": [model_type.removesuffix("_text")]}
    expected = getattr(reference, "head_dim", None) or reference.hidden_size // reference.num_attention_heads
    assert model_config({**config, **family}, "here").head_dim == expected


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "yarn", "factor": 4.0}])
def test_the_original_context_beside_the_table_of_rope_is_that_of_transformers(scaling, tmp_path):
    config = {**CONFIG, "original_max_position_embeddings": 16, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    reference = AutoConfig.from_pretrained(tmp_path)
    reference.standardize_rope_params()  # as it does before it computes frequencies
    found = model_config(config, "here").rope_scaling
    assert isinstance(found, RopeScaling | YarnScaling)
    assert found.original_max_position == reference.rope_parameters["original_max_position_embeddings"] == 16


def test_a_missing_configuration_value_is_named():
    with pytest.raises(ConfigError, match=r"here/config.json lacks 'hidden_size'"):
        model_config({key: value for key, value in CONFIG.items() if key != "hidden_size"}, "here")


def test_a_gguf_file_without_merges_of_another_kind_is_sentencepiece(tmp_path):
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.Q4_0.gguf", model="llama", pre="default")))
    tokenizer = checkpoint.tokenizer()
    assert checkpoint.name == "m" and checkpoint.add_bos
    assert tokenizer.encode("ab").tokens == ["</s>", "▁ab"]
    assert tokenizer.decode([4, 3]) == "abab"


@pytest.mark.parametrize(
    ("pre", "rule"),
    [
        ("llama3", "llama-bpe"),
        ("llama-v3", "llama-bpe"),
        ("deepseek-r1-qwen", "qwen2"),
        ("refact", "smollm"),
        ("glm4", "dbrx"),
    ],
)
def test_a_rule_has_several_names_in_gguf_files(tmp_path, pre, rule):
    given, named = (open_checkpoint(str(write_gguf(tmp_path / f"{name}.gguf", pre=name))) for name in (pre, rule))
    assert given.tokenizer().to_str() == named.tokenizer().to_str()
    assert given.add_bos == named.add_bos == (rule == "llama-bpe")


def test_tekken_cuts_a_word_where_its_capitals_begin_anew(tmp_path):
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", pre="tekken")))
    rule = checkpoint.tokenizer().pre_tokenizer
    assert rule is not None
    cut = [
        text.replace("Ġ", " ").replace("Ċ", "\n") for text, _ in rule.pre_tokenize_str("HTTPServer isOK 2026//\n it's")
    ]
    assert cut == ["HTTPServer", " is", "OK", " ", "2", "0", "2", "6", "//\n", " it", "'s"]
    assert checkpoint.add_bos


def test_a_mixture_of_no_experts_is_none(tmp_path):
    assert (
        open_checkpoint(str(write_gguf(tmp_path / "m.gguf", fields={"llama.expert_count": 0}))).config.experts is None
    )


def test_a_cut_gguf_file_is_damaged_wherever_it_is_cut(tmp_path):
    data = write_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for nbytes in (0, 3, 4, 23, 24, 100, len(data) // 2, len(data) - 4):
        cut.write_bytes(data[:nbytes])
        refused(cut, "cut.gguf")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            {"arch": "gpt2"},
            "architecture 'gpt2' is not supported; supported are deepseek_v3, gemma3, glm4, glm4_moe, gpt_oss",
        ),
        ({"model": "bert"}, "tokenizer 'bert' is not supported"),
        ({"pre": "gpt-4o"}, "pre-tokenizer 'gpt-4o' is not supported; supported are smollm, llama-bpe, qwen2, tekken"),
    ],
)
def test_gguf_of_other_kinds_is_refused_by_name(tmp_path, kind, words):
    refused(write_gguf(tmp_path / "other.gguf", **kind), words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported; supported are none, linear"),
        ({"llama.rope.scale_linear": 4.0}, "'llama.rope.scale_linear' is 4.0; it is not supported"),
        ({"llama.rope.dimension_count": 2}, "'llama.rope.dimension_count' is 2; heads have 4 columns, and rope that"),
        ({"llama.attention.scale": 0.5}, "'llama.attention.scale' is 0.5; it is not supported"),
        ({"split.count": 3}, r"one of 3 files of a model; join them: llama-gguf-split --merge"),
        ({"tokenizer.ggml.eot_token_id": 6}, r"tokenizer.ggml.eot_token_id is 6; its vocabulary has 6 tokens"),
    ],
)
def test_gguf_fields_that_would_give_wrong_text_are_refused(tmp_path, fields, words):
    refused(write_gguf(tmp_path / "other.gguf", fields=fields), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"llama.block_count": 1.5}, "llama.block_count is 1.5; a whole number from 1 to 2147483647 is expected"),
        ({"llama.context_length": -1}, "llama.context_length is -1; a whole number from 1"),
        ({"llama.embedding_length": "x"}, "llama.embedding_length is 'x'; a whole number from 1"),
        ({"llama.embedding_length": 1}, "the size of a head, .* is 0; a whole number from 1"),
        ({"llama.embedding_length": 6}, "the size of a head, .* is 3; an even number is expected"),
        ({"llama.attention.head_count": [2] * 99}, r"llama.attention.head_count is \[2, .{,60}\.\.; a whole number"),
        ({"llama.attention.head_count_kv": 0}, "llama.attention.head_count_kv is 0; a whole number from 1"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon is nan; a number above 0"),
        ({"llama.rope.freq_base": "x"}, "llama.rope.freq_base is 'x'; a number above 1"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "9 of 8 experts are not supported"),
        ({"split.count": "x"}, "split.count is of the wrong kind, str; a whole number is expected"),
        ({"tokenizer.chat_template": 1}, "tokenizer.chat_template is of the wrong kind, int; text is expected"),
        ({"tokenizer.ggml.pre": ["smollm"]}, "tokenizer.ggml.pre is of the wrong kind, list; text is expected"),
        ({"tokenizer.ggml.tokens": 3}, "tokenizer.ggml.tokens is of the wrong kind, int; a list is expected"),
        ({"tokenizer.ggml.tokens": ["a", 3]}, r"tokenizer.ggml.tokens\[1\] is of the wrong kind, int"),
        ({"tokenizer.ggml.token_type": 3}, "tokenizer.ggml.token_type is of the wrong kind, int; a list is expected"),
        ({"tokenizer.ggml.eos_token_id": 1.5}, "tokenizer.ggml.eos_token_id is 1.5; its vocabulary has 6 tokens"),
        ({"tokenizer.ggml.unknown_token_id": 6}, "tokenizer.ggml.unknown_token_id is 6; its vocabulary has 6 tokens"),
        ({"tokenizer.ggml.merges": ["ab"]}, "its tokenizer is damaged: its merge 'ab' is not of two tokens that make"),
        ({"tokenizer.ggml.merges": ["a x"]}, "other.gguf: its tokenizer is damaged: its merge 'a x' is not of"),
        ({"tokenizer.ggml.merges": ["b a"]}, "its merge 'b a' is not of two tokens that make a third"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]},
            "other.gguf: its tokenizer is damaged: it has 6 tokens and 1 scores; download the file again",
        ),
    ],
)
def test_gguf_fields_of_another_kind_are_refused_by_name(tmp_path, monkeypatch, changes, words):
    whole = GgufFile.open(write_gguf(tmp_path / "other.gguf"))
    changed = replace(whole, metadata=whole.metadata | changes)
    monkeypatch.setattr("checkpoint.gguf.checkpoint.GgufFile.open", lambda _: changed)
    refused(whole.path, words)


@pytest.mark.parametrize(
    ("arch", "fields", "words"),
    [
        *(
            (arch, {"attention.sliding_window": 32}, f"'{arch}.attention.sliding_window' is 32 of 64 tokens; a window")
            for arch in ("llama", "olmo2", "qwen2")
        ),
        ("gemma3", {"final_logit_softcapping": 30.0}, "'gemma3.final_logit_softcapping' is 30.0; it is not supported"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "'gemma3.attn_logit_softcapping' is 50.0; it is not supported"),
        ("gemma3", {"attention.sliding_window": 0}, "attention.sliding_window is 0; a whole number from 1"),
        ("gemma3", {"rope.freq_base_swa": 0.0}, "rope.freq_base_swa is 0.0; a number above 1"),
        ("qwen2moe", {"expert_feed_forward_length": 1.5}, "expert_feed_forward_length is 1.5; a whole number from 1"),
        ("qwen2moe", {"expert_used_count": "2"}, "its metadata has a value of the wrong kind: "),
        ("llama", {"attention.head_count_kv": 3}, "head_count is 2; a multiple of attention.head_count_kv, 3, is"),
    ],
)
def test_gguf_fields_of_one_family_are_checked_too(tmp_path, arch, fields, words):
    own = {"gemma3": {"attention.key_length": 4, "attention.sliding_window": 32}}
    own["qwen2moe"] = {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 4}
    stated = {f"{arch}.{name}": value for name, value in (own.get(arch, {}) | fields).items()}
    refused(write_gguf(tmp_path / "other.gguf", arch, fields=stated), words)


@pytest.mark.parametrize("window", [0, 64])
def test_a_gguf_window_that_is_none_or_the_whole_context_is_served(tmp_path, window):
    path = write_gguf(tmp_path / "m.gguf", fields={"llama.attention.sliding_window": window})
    assert open_checkpoint(str(path)).config.window == 0


def test_longrope_of_a_gguf_file_has_a_factor_for_each_pair(tmp_path):
    fields = {"phi3.rope.scaling.original_context_length": 16, "phi3.rope.scaling.attn_factor": 1.2}
    for short, long, words in ((2, 3, "long.weight has 3 numbers; .* have 2 pairs"), (1, 2, "short.weight has 1 num")):
        counts = {"short": short, "long": long}
        tensors = {f"rope_factors_{name}.weight": np.ones(count, np.float32) for name, count in counts.items()}
        refused(write_gguf(tmp_path / "m.gguf", "phi3", fields=fields, tensors=tensors), f"rope_factors_{words}")


@pytest.mark.parametrize("shape", [(2**32, 2**31), (2**32, 2**32), (0, 8)])
def test_a_gguf_tensor_of_an_impossible_shape_is_damage(tmp_path, shape):
    """The product of some is 0 in 64 bits, or less."""
    path = write_gguf(tmp_path / "other.gguf")
    name = b"token_embd.weight" + (2).to_bytes(4, "little")
    data, sizes = path.read_bytes(), b"".join(size.to_bytes(8, "little") for size in shape)
    at = data.index(name) + len(name)
    path.write_bytes(data[:at] + sizes + data[at + 16 :])
    refused(path, "cannot be used: .*token_embd.weight")


def test_a_gguf_file_whose_lists_are_too_deep_is_damage(tmp_path):
    path = tmp_path / "deep.gguf"
    key = len(b"z").to_bytes(8, "little") + b"z" + (9).to_bytes(4, "little")
    lists = ((9).to_bytes(4, "little") + (1).to_bytes(8, "little")) * 5000
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    path.write_bytes(head + key + lists)
    refused(path, "deep.gguf cannot be used: its header is damaged")


@pytest.mark.parametrize("name", ["blk.0.attn_output.bias", "blk.0.ffn_gate_inp.weight", "blk.0.attn_sinks.weight"])
def test_a_gguf_tensor_that_nothing_reads_is_refused(tmp_path, name):
    """A Llama with attention_bias, say: llama.cpp adds it."""
    tensors = {name: np.zeros(8, np.float32), "blk.0.attn_q.bias": np.zeros(8, np.float32)}
    refused(write_gguf(tmp_path / "other.gguf", tensors=tensors), f"its tensor '{name}' is of no model that is")


def test_an_answer_of_qwen_ends_at_either_of_its_ends(tmp_path):
    path = write_gguf(tmp_path / "q.gguf", "qwen2", pre="qwen2", more_tokens=("<|endoftext|>", "<|im_end|>"))
    assert open_checkpoint(str(path)).eos_token_ids == (5, 7, 6)


def test_an_answer_of_phi_3_ends_with_its_turn(tmp_path):
    path = write_gguf(tmp_path / "p.gguf", "phi3", more_tokens=("<|user|>", "<|end|>"))
    assert open_checkpoint(str(path)).eos_token_ids == (5, 7)
    path = write_gguf(tmp_path / "l.gguf", more_tokens=("<|user|>", "<|end|>"))
    assert open_checkpoint(str(path)).eos_token_ids == (5,)


def test_frequencies_of_rope_in_a_gguf_file_are_llama_3s_or_refused(tmp_path):
    llama3 = np.array([1, 8], np.float32)
    path = write_gguf(tmp_path / "a.gguf", fields={"llama.rope.freq_base": 5e7}, tensors={"rope_freqs.weight": llama3})
    assert open_checkpoint(str(path)).config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    for other in ([1, 1], [2, 8], [1, 8, 8]):
        tensors = {"rope_freqs.weight": np.array(other, np.float32)}
        path = write_gguf(tmp_path / "b.gguf", fields={"llama.rope.freq_base": 5e7}, tensors=tensors)
        if other == [1, 1]:
            assert open_checkpoint(str(path)).config.rope_scaling == RopeScaling(1.0, 1.0, 4.0, 8192)
        else:
            refused(path, "rope_freqs.weight' are not those of Llama 3")


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "nothing.gguf", "nothing"])
def test_a_path_that_does_not_exist_is_no_download(model):
    refused(model, "does not exist on this machine|cannot read")


def test_offline_says_what_to_do_about_a_hub_id(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("nobody/no-such-model", "not in its local cache; download it where there is a network")


@pytest.mark.parametrize(
    "fault",
    [httpx2.ReadError("it ended"), httpx2.ReadTimeout("it ended"), RuntimeError("it ended"), OSError(28, "it ended")],
)
def test_a_download_that_breaks_off_says_what_to_do(monkeypatch, fault):
    def breaks_off(*_, **__):
        raise fault

    monkeypatch.setattr("checkpoint.huggingface.hub.snapshot_download", breaks_off)
    refused("org/name", f"'org/name' .*: {type(fault).__name__}: .*it ended; try again.*; or give the path of a folder")


def test_of_a_hub_id_nothing_is_fetched_twice(monkeypatch, folder):
    """Folders hold the same weights in other layouts, and Mistral's files under other names."""
    fetched = []

    def listing(model, allow_patterns, ignore_patterns):
        names = ["config.json", "a.safetensors", "chat.jinja", "README.md", "original/a.safetensors", "metal/m/c.json"]
        names += ["additional_chat_templates/tool_use.jinja", "consolidated.safetensors", "adapter_model.safetensors"]
        names += ["consolidated-00001-of-00002.safetensors"]
        fetched.extend(filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return folder

    monkeypatch.setattr("checkpoint.huggingface.hub.snapshot_download", listing)
    open_checkpoint("org/name")
    assert fetched == ["config.json", "a.safetensors", "chat.jinja", "additional_chat_templates/tool_use.jinja"]


def test_weights_of_one_shape_are_told_apart(folder):
    """Two fine-tunes of a model: the same header, other numbers."""
    before = weights_fingerprint(folder)
    assert weights_fingerprint(folder) == before
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert weights_fingerprint(folder) != before


@pytest.mark.parametrize("index", [None, {"weight_map": {"w": "model.safetensors"}}])
def test_weights_are_known_again_whatever_lies_beside_them(folder, index):
    """Mistral's repositories hold them twice, and another client may have fetched both."""
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    before = weights_fingerprint(folder)
    save_file({"w": np.ones(4, np.float32)}, folder / "consolidated.safetensors")
    assert weights_fingerprint(folder) == before


def test_the_fingerprint_looks_at_all_of_a_large_file(tmp_path):
    seen = set()
    for changed in range(0, 64 << 20, 16 << 20):
        file = tmp_path / f"{changed}.safetensors"
        with file.open("wb") as stream:
            stream.truncate(64 << 20)
            stream.seek(changed)
            stream.write(b"x" * (1 << 19))
        seen.add(weights_fingerprint(file))
    assert len(seen) == 4
