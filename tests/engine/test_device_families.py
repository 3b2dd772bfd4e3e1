"""The GPU's adapter, on the reference kernels: each family's numbers are those of transformers on the same weights."""

from dataclasses import dataclass

import pytest

from contracts.errors import ConfigError
from engine.loader import load_engine
from kernels.registry import Registry
from tests.engine.device_engines import device_engine
from tests.engine.driving import answers, drain, greedy, random_prompts, request, settings, tokens_of
from tests.engine.tiny_models import DEVICE_FAMILIES, FAMILIES, VOCAB, save_tiny

pytestmark = pytest.mark.slow

LENGTHS = (1, 5, 63, 64, 65, 150, 300)  # of the prompts that `family` answers


def test_greedy_answers_equal_transformers(family):
    folder, prompts, expected = family
    assert answers(device_engine(folder), prompts, greedy()) == expected


def test_chunked_prefill_and_prefix_hits_change_nothing(family):
    folder, prompts, expected = family
    engine = device_engine(folder, max_batched_tokens=134, max_mixed_tokens=64, max_num_seqs=3)
    assert answers(engine, prompts, greedy()) == expected
    assert answers(engine, prompts, greedy()) == expected
    assert engine.stats().prefix_hit_tokens > 0


def test_preempted_sequences_answer_the_same(family):
    folder, prompts, expected = family
    layout = device_engine(folder).layout
    engine = device_engine(folder, kv_cache_nbytes=8 * layout.block_nbytes)
    long_answers = answers(engine, prompts[:5], greedy(100))
    assert engine.stats().num_preemptions > 0
    assert [answer[:12] for answer in long_answers] == expected[:5]


def test_a_prompt_is_scored_as_on_the_cpu(family):
    folder, prompts, _ = family
    params = greedy(2, prompt_logprobs=2, logprobs=3)
    told = []
    for engine in (load_engine(settings(model=str(folder))), device_engine(folder)):
        engine.submit(request("a", prompts[5], params))
        outputs = drain(engine)
        scored = [token for output in outputs for item in output.scored for token in item.tokens]
        told.append((scored, [s.token for output in outputs for s in output.sampled]))
    (scored, sampled), (scored_too, sampled_too) = told
    assert [token.rank for token in scored] == [token.rank for token in scored_too]
    assert [t.logprob for t in scored_too] == pytest.approx([t.logprob for t in scored], abs=1e-3)
    assert [t.logprob for t in sampled_too] == pytest.approx([t.logprob for t in sampled], abs=1e-3)
    assert [[i for i, _ in t.top_logprobs] for t in sampled_too] == [[i for i, _ in t.top_logprobs] for t in sampled]


def test_logprobs_of_given_tokens_are_those_of_the_cpu(family):
    folder, prompts, _ = family
    wishes = [{"logprobs": 2}, {"logprobs": 0, "logprob_token_ids": (9, 3, 200)}, {}, {"logprob_token_ids": (7,)}]
    told = []
    for engine in (load_engine(settings(model=str(folder))), device_engine(folder)):
        for index, wish in enumerate(wishes):
            engine.submit(request(str(index), prompts[index], greedy(3, **({"logprobs": 0} if wish else {}) | wish)))
        sampled = [one for output in drain(engine) for one in output.sampled]
        told.append({(one.request_id, one.token.index): one.token.top_logprobs for one in sampled})
    on_cpu, on_device = told
    assert on_device.keys() == on_cpu.keys()
    for key, pairs in on_cpu.items():
        found = on_device[key]
        assert [index for index, _ in found or ()] == [index for index, _ in pairs or ()]
        assert [value for _, value in found or ()] == pytest.approx([value for _, value in pairs or ()], abs=1e-3)
    assert [index for index, _ in on_cpu["1", 0]][1:] == [9, 3, 200]


REFUSED = {
    "deepseek_v2": r"a latent for keys and values \(kv_lora_rank\)",
    "deepseek_v3": r"a latent for keys and values \(kv_lora_rank\)",
    "gemma3": "norms after attention and MLP",
    "glm4": "norms after attention and MLP",
    "glm4_moe": "experts scored by a sigmoid",
    "granite": "multipliers of embedding, residual, attention or logits",
    "olmo2": "norms after attention and MLP",
    "qwen2_moe": "a gated shared_expert",
    "qwen3_5": "recurrent layers",
    "qwen3_5_moe": "recurrent layers",
    "qwen3_next": "recurrent layers",
}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - set(DEVICE_FAMILIES)))
def test_families_that_the_cpu_alone_computes_are_refused_by_name(family, tmp_path):
    save_tiny(tmp_path, family)
    with pytest.raises(
        ConfigError, match=f"a model with {REFUSED[family]} is not supported on a GPU: set device to cpu"
    ):
        device_engine(tmp_path)


def test_a_window_of_a_dense_model_is_refused(tmp_path):
    save_tiny(tmp_path, "mistral", sliding_window=16)
    with pytest.raises(ConfigError, match="a model with a sliding_window is not supported on a GPU"):
        device_engine(tmp_path)


@dataclass(frozen=True)
class Plan:
    """The plan of one batch."""

    total: tuple[int, ...]


def test_attention_by_plans_has_its_own_for_whole_prompts_and_for_their_segments(tmp_path, monkeypatch):
    save_tiny(tmp_path, "llama4", num_hidden_layers=5)  # the fourth sees all, and the last asks newest tokens alone
    prompts = random_prompts(VOCAB, (150, 40))
    expected, get, planned = answers(device_engine(tmp_path), prompts, greedy(2)), Registry.get, []

    def get_planned(registry, op, spec):
        run = get(registry, op, spec)

        def attend(q, keys, values, tables, lengths, *rest, prepared, **options):
            assert prepared == Plan(tuple(lengths.tolist()))
            planned.append(prepared)
            run(q, keys, values, tables, lengths, *rest, prepared=prepared, **options)

        return attend if op == "attn_prefill" else run

    monkeypatch.setattr(Registry, "get", get_planned)
    monkeypatch.setattr(Registry, "preparer", lambda *_: lambda tables, new, total: Plan(tuple(total)))
    engine = device_engine(tmp_path)
    planned.clear()
    assert answers(engine, prompts, greedy(2)) == expected
    assert {plan.total for plan in planned} == {(150, 40), (64, 64, 22, 40)}


def test_prefill_attention_has_room_for_rounded_queries_of_many_heads_too(tmp_path, monkeypatch):
    """FlashInfer's attention refuses to run without."""
    save_tiny(tmp_path, "llama", num_attention_heads=16, num_key_value_heads=2)
    get, queries = Registry.get, []

    def get_watched(registry, op, spec):
        run = get(registry, op, spec)

        def attend(q, *args, **options):
            assert args[7].numel() >= q.numel()
            queries.append(len(q))
            run(q, *args, **options)

        return attend if op == "attn_prefill" else run

    monkeypatch.setattr(Registry, "get", get_watched)
    answers(device_engine(tmp_path, max_num_seqs=1, max_model_len=512), random_prompts(VOCAB, (500,)), greedy(2))
    assert max(queries) >= 500


def test_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'tpu' is not supported"):
        load_engine(settings(device="tpu"))
    save_tiny(tmp_path, "llama")
    with pytest.raises(ConfigError, match="not supported on a GPU; supported are auto, float8"):
        device_engine(tmp_path, dtype="int8")
    with pytest.raises(ConfigError, match="not in the host's memory"):
        _ = device_engine(tmp_path).pool_bytes


def test_tokens_of_a_batch_are_told_in_order(family):
    folder, prompts, expected = family
    engine = device_engine(folder)
    engine.submit(request("first", prompts[0], greedy()))
    outputs = [engine.step(), engine.step()]
    engine.submit(request("second", prompts[3], greedy()))
    outputs += drain(engine)
    assert [tokens_of(outputs, name) for name in ("first", "second")] == [expected[0], expected[3]]
