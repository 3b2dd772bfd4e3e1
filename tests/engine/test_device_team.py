"""A model on several GPUs, a process each: on the reference kernels, and where there are two GPUs on those too."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec import structs

from bench.models.random_model import GPT_OSS_20B
from checkpoint import open_checkpoint
from contracts.errors import ConfigError
from contracts.ids import RequestId
from engine.cuda.model.format_choice import has_fused_step
from engine.cuda.runtime.pinned_copy import PinnedCopier
from engine.cuda.runtime.process_group import hold_store, open_store
from engine.engine import Engine
from engine.loader import load_device_engine
from engine.model_loader.checkpoint_weights import open_weights
from engine.model_loader.tensor_parallel_shards import Shard, ShardedWeights, shard_config
from models.config import Experts
from tests.engine.device_engines import FUSIBLE, prefilled, taken_over
from tests.engine.driving import answers, drain, greedy, random_prompts, request, settings, tokens_of
from tests.engine.quantized_models import LAYOUTS, save_quantized
from tests.engine.tiny_models import VOCAB, save_mxfp4, save_tiny
from tests.environment import import_path
from tests.waiting import PATIENCE_S, is_gone, until

pytestmark = pytest.mark.slow

LENGTHS = (1, 63, 65, 150)
PROMPTS = random_prompts(VOCAB, (9, 64, 100))
FUSIBLE_PARTS = FUSIBLE | {"num_attention_heads": 16, "num_key_value_heads": 4}
"""Fusible in two parts as well."""
CUT_OTHERWISE = ["phi3", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "llama4"]
"""Families with something of their own to cut; two GPUs have a llama in other tests."""
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() and torch.cuda.device_count() > 1 else [])]


@pytest.fixture(autouse=True)
def _loopback(monkeypatch):
    """Make gloo listen on the loopback interface; it would ask for the address of the host's name."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@contextmanager
def engine_on(device, folder, num_gpus, dtype="float32", **changes):
    chosen = settings(model=str(folder), dtype=dtype, tensor_parallel=num_gpus, max_num_seqs=16, **changes)
    torch.set_num_threads(1)
    engine = load_device_engine(chosen, open_checkpoint(str(folder)), lambda *_: None, device=device)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("family", CUT_OTHERWISE, indirect=True)
def test_greedy_answers_equal_transformers(family, device):
    """Chunked, beside each other, and with prefix hits."""
    folder, prompts, expected = family
    with engine_on(device, folder, 2, max_batched_tokens=100) as engine:
        assert answers(engine, prompts, greedy()) == expected
        assert answers(engine, prompts, greedy()) == expected
        assert engine.stats().prefix_hit_tokens > 0


def test_the_rate_of_prompts_is_measured_by_all(folder, device):
    with engine_on(device, folder, 1) as engine:
        expected = answers(engine, PROMPTS, greedy(4))
    with engine_on(device, folder, 2) as engine:
        assert engine.measure_prefill_rate() > 0
        engine.check()
        assert engine.pool.num_available == engine.pool.num_blocks
        assert answers(engine, PROMPTS, greedy(4)) == expected


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_two_gpus_for_each_kv_head(tmp_path, device, family):
    """Norms of heads; biases and sinks. Four of them, if there are, have room for no more than two without copies."""
    num_gpus = 2 if device.type == "cuda" and torch.cuda.device_count() < 4 else 4
    save_tiny(tmp_path, family, hidden_size=128, num_attention_heads=8, num_key_value_heads=num_gpus // 2)
    with engine_on(device, tmp_path, 1) as engine:
        expected, whole = answers(engine, PROMPTS, greedy()), engine.layout
    with engine_on(device, tmp_path, num_gpus, kv_cache_nbytes=64 << 20) as engine:
        assert answers(engine, PROMPTS, greedy()) == expected
        assert engine.layout == structs.replace(whole, tp_size=num_gpus // 2)
        assert engine.capacity_tokens == (64 << 20) // engine.layout.shard_nbytes * whole.block_size


def test_what_the_first_one_alone_decides_reaches_all(tmp_path, device):
    """Penalties, forbidden words, chance and scores are one host's; a wrong token in one GPU's cache would change what
    follows.
    """
    save_tiny(tmp_path, "llama")
    adjusted = greedy(24, repetition_penalty=1.5, logit_bias={7: 5.0}, logprobs=2, prompt_logprobs=2)
    drawn = greedy(24, temperature=0.8, seed=3)
    told = []
    for num_gpus in (1, 2):
        with engine_on(device, tmp_path, num_gpus) as engine:
            for name, params in (("adjusted", adjusted), ("drawn", drawn), ("plain", greedy(24))):
                engine.submit(request(name, PROMPTS[1], params))
            outputs = drain(engine)
        sampled = [(s.request_id, s.token.token_id) for output in outputs for s in output.sampled]
        scored = [token for output in outputs for item in output.scored for token in item.tokens]
        told.append((sorted(sampled), [token.rank for token in scored]))
    assert told[0] == told[1]


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.04), ("float8", 0.3), ("float8-head", 0.3)])
def test_rounded_formats_stay_near_float32(tmp_path, device, dtype, bound):
    """The bounds are those of the same formats on one GPU in the tests of the device engine."""
    save_tiny(tmp_path, "llama", **FUSIBLE_PARTS)
    assert has_fused_step(shard_config(open_checkpoint(str(tmp_path)).config, Shard(0, 2)))
    found = {}
    for number_format, num_gpus in (("float32", 1), (dtype, 2)):
        with engine_on(device, tmp_path, num_gpus, number_format) as engine:
            found[number_format] = _logprobs(engine)
    error = float((found[dtype] - found["float32"]).norm() / found["float32"].norm())
    assert 1e-5 < error < bound


def test_experts_are_cut_where_the_kernels_take_them_apart(tmp_path, device):
    """gpt-oss's width is no even number of blocks: one GPU has 64 of the 192 columns, the other 128."""
    changes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 192}
    save_mxfp4(tmp_path, save_tiny(tmp_path, "gpt_oss", **changes))
    with engine_on(device, tmp_path, 1) as engine:
        expected, answered = _logprobs(engine), answers(engine, PROMPTS, greedy())
    with engine_on(device, tmp_path, 2) as engine:
        assert answers(engine, PROMPTS, greedy()) == answered
    with engine_on(device, tmp_path, 2, "bfloat16") as engine:
        assert (_logprobs(engine) - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_parts_of_an_expert_are_whole_tiles_and_make_up_all_of_it(size):
    configs = [shard_config(GPT_OSS_20B, Shard(rank, size)) for rank in range(size)]
    widths = [config.experts.intermediate_size for config in configs if config.experts]
    assert sum(widths) == 2880 and all(width % 64 == 0 for width in widths) and max(widths) - min(widths) <= 64


@pytest.mark.parametrize(("width", "size"), [(192, 4), (192, 8), (96, 2)])
def test_experts_with_less_than_a_tile_for_each_gpu_are_refused(width, size):
    experts = Experts(32, 4, width, True, as_gpt_oss=True, is_mxfp4=True)
    config = replace(GPT_OSS_20B, intermediate_size=width, experts=experts)
    with pytest.raises(ConfigError, match=f"is {size}; this model has {width} columns in an MXFP4 .* each GPU 64 of"):
        shard_config(config, Shard(0, size))
    plain = replace(experts, is_mxfp4=False)
    part = shard_config(replace(config, experts=plain), Shard(0, size))
    assert part.experts == replace(plain, intermediate_size=width // size)


def _logprobs(engine):
    """Return the log-probabilities of every token as the first of an answer, and as the next ones.

    The token before the second, third and so on is forced.
    """
    forced = greedy(4, logprobs=VOCAB, logit_bias={5: 100.0})
    for index, prompt in enumerate(PROMPTS):
        engine.submit(request(str(index), prompt, forced))
    tokens = [s.token for output in drain(engine) for s in output.sampled]
    assert {token.token_id for token in tokens} == {5}
    tops = [dict(token.top_logprobs or ()) for token in tokens]
    return torch.tensor([[top[i] for i in range(VOCAB)] for top in tops])


def test_members_find_each_other_where_no_other_machine_looks():
    store = hold_store(2)
    addresses = {line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
    assert {a for a in addresses if a.endswith(f":{store.port:04X}")} == {f"0100007F:{store.port:04X}"}  # 127.0.0.1
    open_store(2, store.port).set("name", "told")
    assert store.get("name") == b"told"
    ports = [line.split()[1].rpartition(":")[2] for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    assert f"{store.port:04X}" not in ports


def test_a_model_that_can_not_be_shared_is_refused_by_name(tmp_path):
    save_tiny(tmp_path, "llama")
    checkpoint = open_checkpoint(str(tmp_path))
    num_heads = checkpoint.config.num_kv_heads
    with pytest.raises(ConfigError, match=r"tensor_parallel is 16; this model has .* heads.*divides? them"):
        shard_config(checkpoint.config, Shard(0, 16))
    assert shard_config(checkpoint.config, Shard(0, num_heads)).num_kv_heads == 1


def test_kv_heads_are_cut_or_copied_but_not_both(tmp_path):
    save_tiny(tmp_path, "llama", num_attention_heads=24, num_key_value_heads=4)
    config = open_checkpoint(str(tmp_path)).config
    for size in (6, 3):
        with pytest.raises(ConfigError, match=f"is {size}; this model has 4 KV heads: .* divides them, or a multiple"):
            shard_config(config, Shard(0, size))
    for size, num_heads, num_kv_heads in ((2, 12, 2), (4, 6, 1), (8, 3, 1)):
        part = shard_config(config, Shard(size - 1, size))
        assert (part.num_heads, part.num_kv_heads) == (num_heads, num_kv_heads)


WIDENED = {"gptq-8", "int8", "int8-asymmetric", "nvfp4", "nvfp4-modelopt", "packed-8"}
"""Formats that a GPU does not hold: matrices become bfloat16 as they are read."""


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_parts_of_a_quantized_matrix_are_parts_of_what_it_stands_for(tmp_path, name):
    save_quantized(tmp_path, LAYOUTS[name], hidden_size=512, intermediate_size=1024, num_attention_heads=16)
    checkpoint = open_checkpoint(str(tmp_path))
    source = open_weights(checkpoint, PinnedCopier(torch.device("cpu")).carry)
    parts = [ShardedWeights(source, checkpoint.config, Shard(rank, 2)) for rank in range(2)]
    for module, dim in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1), ("mlp.up_proj", 0), ("mlp.down_proj", 1)):
        module = f"model.layers.1.{module}"
        whole = source.tensor(f"{module}.weight")
        stored = [part.quantized.matrix(module) for part in parts if part.quantized]
        assert any(stored) == (name not in WIDENED)
        if any(stored):
            assert torch.equal(torch.cat([matrix.dense() for matrix in stored if matrix], dim), whole)
        assert torch.equal(torch.cat([part.tensor(f"{module}.weight") for part in parts], dim), whole)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_kv_head_of_a_quantized_matrix_is_whole_on_each_gpu_that_holds_it(tmp_path, name):
    save_quantized(tmp_path, LAYOUTS[name], hidden_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    checkpoint = open_checkpoint(str(tmp_path))
    source = open_weights(checkpoint, PinnedCopier(torch.device("cpu")).carry)
    parts = [ShardedWeights(source, checkpoint.config, Shard(rank, 4)) for rank in range(4)]
    for module in ("model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj"):
        heads = source.tensor(f"{module}.weight").chunk(2)
        for rank, part in enumerate(parts):
            stored = part.quantized.matrix(module) if part.quantized else None
            assert (stored is None) == (name in WIDENED)
            assert stored is None or torch.equal(stored.dense(), heads[rank // 2])
            assert torch.equal(part.tensor(f"{module}.weight"), heads[rank // 2])


def test_a_scale_that_two_kv_heads_share_is_refused_by_the_number_of_gpus(tmp_path):
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    save_quantized(tmp_path, LAYOUTS["deepseek"], "llama3", ("lm_head",), hidden_size=1024, **shape)
    checkpoint = open_checkpoint(str(tmp_path))
    part = ShardedWeights(
        open_weights(checkpoint, PinnedCopier(torch.device("cpu")).carry), checkpoint.config, Shard(0, 4)
    )
    assert part.quantized and part.quantized.matrix("model.layers.0.self_attn.q_proj")
    with pytest.raises(ConfigError, match=r"tensor_parallel is 4; '.*k_proj' is \[128, 1024\]"):
        part.quantized.matrix("model.layers.0.self_attn.k_proj")


STARTED = """
    import os, torch
    from pathlib import Path
    from tests.engine.driving import greedy, request, settings
    from checkpoint import open_checkpoint
    from engine.loader import load_device_engine

    chosen = settings(model={folder!r}, dtype="float32", tensor_parallel=2, **{changes!r})
    engine = load_device_engine(chosen, open_checkpoint(chosen.model), lambda *_: None, device=torch.device("cpu"))
    engine.submit(request("a", [5, 6, 7], greedy(400)))
    engine.step()
    print("ready", flush=True)
    {then}
"""


def _started(folder, then, **changes):
    code = textwrap.dedent(STARTED).format(folder=str(folder), changes=changes, then=then)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _running(folder):
    """One that computes without end, and its follower's process id."""
    process = _started(folder, "while True: engine.step()")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    (follower,) = _children(process.pid)
    return process, follower


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_team_dies_together(tmp_path):
    """Killed while both compute: the first one's GPU would wait for the other's for good. (Gloo sees it, too.)"""
    save_tiny(tmp_path, "llama")
    process, follower = _running(tmp_path)
    os.kill(follower, signal.SIGKILL)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "the process of GPU 1 of this worker ended: exit status -9" in said or "was not launched here" in said


@pytest.mark.parametrize("error", ["torch.OutOfMemoryError", "contracts.errors.TransferError"])
def test_a_batch_that_one_could_not_launch_is_the_last(tmp_path, error):
    """Tried again piece by piece, as one GPU does, sums would be of different batches: wrong tokens. And whoever closes
    the engine then would wait for good: NCCL for the other, and that for sums.
    """
    save_tiny(tmp_path, "llama")
    process = _started(tmp_path, f"exec({_NOT_LAUNCHED.format(error=error)!r})")
    out, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, "ready\n")
    assert "a batch that the other GPUs of this worker compute was not launched here" in said
    assert f"{error}: none left" in said


_NOT_LAUNCHED = """
import contextlib, threading, contracts.errors
from engine.cuda.runtime.process_group import DistributedProcessGroup
def launch(*_):
    raise {error}("none left")
DistributedProcessGroup.close = lambda _: threading.Event().wait()
engine.runner.launcher.launch = launch
with contextlib.closing(engine):
    engine.step()
    engine.step()
print("goes on")
"""


def test_a_follower_that_can_not_launch_ends_at_once(tmp_path, monkeypatch):
    """Its interpreter's own end would wait for its GPU, which waits for the first one's."""
    save_tiny(tmp_path, "llama")
    _patched(
        monkeypatch,
        tmp_path,
        """
        import atexit, threading, torch
        from engine.cuda.launcher import Launcher
        def launch(self, batch, score):
            raise torch.OutOfMemoryError("none left")
        Launcher.launch = launch
        atexit.register(threading.Event().wait)
        """,
    )
    process = _started(tmp_path, "engine.step()")
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "the process of GPU 1 of this worker ended: OutOfMemoryError: none left" in said


@pytest.fixture
def others():
    """Children of this process that other tests have. What is left of a team that did not part goes afterwards."""
    yield set(_children(os.getpid()))
    dist.destroy_process_group()


def test_a_start_that_fails_waits_for_no_follower(tmp_path, monkeypatch, others):
    """It waits for a sum, and NCCL would wait for it to leave."""
    save_tiny(tmp_path, "llama")
    monkeypatch.setattr("engine.cuda.loader.compute_prompt", _raise)
    monkeypatch.setattr(
        "engine.cuda.runtime.process_group.DistributedProcessGroup.close", lambda _: threading.Event().wait()
    )
    with pytest.raises(ConfigError, match="none left"), engine_on(torch.device("cpu"), tmp_path, 2):
        pass
    assert set(_children(os.getpid())) <= others


def test_a_gpu_that_is_full_before_its_team_has_met_is_told_in_words(tmp_path, monkeypatch):
    """Another process has it."""

    def full(*_):
        raise RuntimeError("NCCL error in: NCCLUtils.hpp:94, unhandled cuda error. Cuda failure 2 'out of memory'")

    save_tiny(tmp_path, "llama")
    monkeypatch.setattr("engine.cuda.tensor_parallel.DistributedProcessGroup", full)
    others, words = set(_children(os.getpid())), r"do not fit on the GPU .*out of memory.*: free the GPU"
    with pytest.raises(ConfigError, match=words), engine_on(torch.device("cpu"), tmp_path, 2):
        pass
    assert set(_children(os.getpid())) <= others


def _raise(*_):
    raise torch.OutOfMemoryError("none left")


def test_a_team_that_does_not_part_is_ended(tmp_path, monkeypatch, others):
    save_tiny(tmp_path, "llama")
    with engine_on(torch.device("cpu"), tmp_path, 2):
        (follower,) = set(_children(os.getpid())) - others
        monkeypatch.setattr(
            "engine.cuda.runtime.process_group.DistributedProcessGroup.close", lambda _: threading.Event().wait()
        )
        monkeypatch.setattr("engine.cuda.tensor_parallel._END_TIMEOUT_S", 0.2)
        os.kill(follower, signal.SIGSTOP)  # it hears no goodbye
    assert set(_children(os.getpid())) <= others


def test_nobody_is_left_behind(tmp_path):
    save_tiny(tmp_path, "llama")
    process, follower = _running(tmp_path)
    process.kill()
    process.communicate()
    until(lambda: is_gone(follower), 30.0)


def test_a_follower_that_can_not_load_says_why(tmp_path, monkeypatch):
    save_tiny(tmp_path, "llama")
    _patched(
        monkeypatch,
        tmp_path,
        """
        import checkpoint
        from contracts.errors import ConfigError
        def refuse(*_, **__): raise ConfigError("no such folder on this disk")
        checkpoint.open_checkpoint = refuse
        """,
    )
    process = _started(tmp_path, "pass")
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "the process of GPU 1 of this worker ended: no such folder on this disk" in said


def _patched(monkeypatch, folder, code):
    """Followers run it first."""
    where = folder / "patched"
    where.mkdir()
    begin = "import sys\nif 'engine.cuda.rank_process' in ' '.join(sys.orig_argv):\n"
    (where / "sitecustomize.py").write_text(begin + textwrap.indent(textwrap.dedent(code), "    "))
    monkeypatch.setenv("PYTHONPATH", import_path(where, os.getcwd()))


@pytest.mark.parametrize(("dtype", "sizes"), [("float8", (1, 2)), ("float32", (2, 4))])
def test_workers_of_other_numbers_of_gpus_hand_over_to_each_other(tmp_path, device, dtype, sizes):
    """Pages are cut by heads on their way, of which four GPUs have each twice, and put together on the way back. In FP8
    both write by the same scales, or none could read the other's.
    """
    if device.type == "cuda" and torch.cuda.device_count() < max(sizes):
        pytest.skip("needs more GPUs")
    save_tiny(tmp_path, "llama", **FUSIBLE)
    with (
        _engine_process(device, tmp_path, sizes[0], dtype) as there,
        engine_on(device, tmp_path, sizes[1], dtype, max_batched_tokens=128) as engine,
    ):

        def here(job, *args):
            return job(engine, *args)

        layouts = [ask(_layout_of) for ask in (there, here)]
        assert structs.replace(layouts[0], tp_size=layouts[1].tp_size) == layouts[1]
        for source, target, seed in ((there, here, 0), (here, there, 1)):
            _hand_over_all(source, target, random_prompts(VOCAB, (9, 100), seed), is_exact=dtype == "float32")
        here(_all_given_back)
        there(_all_given_back)


def _hand_over_all(source, target, prompts, is_exact):
    """The last prompt twice, so that the second time most of it is there."""
    for ask in (source, target):
        ask(_agreed)
    shared = source(_share)
    for index, prompt in enumerate([*prompts, prompts[-1]]):
        told = source(prefilled, str(index), prompt, 2)
        handed = target(_taken_over, shared, told, str(index), prompt)
        with_prefix, alone = target(answers_of, f"again-{index}", prompt), source(answers_of, f"alone-{index}", prompt)
        if is_exact:
            assert handed == with_prefix == alone
        source(Engine.release, RequestId(str(index)))


def _taken_over(engine, shared, told, name, prompt):
    remote = engine.transfer_pool.attach(shared)
    answer = taken_over(engine, remote, told, name, prompt)
    remote.close()
    return answer


@contextmanager
def _engine_process(device, folder, num_gpus, dtype):
    """Asks an engine of a process of its own: a GPU's memory is mapped by other processes only."""
    context = multiprocessing.get_context("spawn")
    pipe, of_child = context.Pipe()
    child = context.Process(target=_answer_asks, args=(of_child, device, folder, num_gpus, dtype))
    child.start()
    of_child.close()

    def ask(job, *args):
        pipe.send((job, args))
        assert pipe.poll(120), f"no answer to {job.__name__}"
        return pipe.recv()

    try:
        yield ask
        pipe.send((None, ()))
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()


def _answer_asks(pipe, device, folder, num_gpus, dtype):
    with engine_on(device, folder, num_gpus, dtype, max_batched_tokens=128) as engine:
        while (told := pipe.recv())[0] is not None:
            job, args = told
            pipe.send(job(engine, *args))


def _layout_of(engine):
    return engine.layout


def _agreed(engine):
    engine.transfer_pool.agreed(2, True)


def _share(engine):
    return engine.transfer_pool.share()


def _all_given_back(engine):
    engine.check()
    assert engine.stats().free_tokens == engine.capacity_tokens


def answers_of(engine, name, prompt):
    engine.submit(request(name, prompt, greedy(8)))
    return tokens_of(drain(engine), name)
