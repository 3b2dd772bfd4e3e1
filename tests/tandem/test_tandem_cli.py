"""The command line itself: help that teaches, codes, completion, and nothing imported in vain."""

import argparse
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic_settings import BaseSettings
from safetensors.numpy import save_file

from bench.models.random_model import (
    GPT_OSS_20B,
    LLAMA4_MAVERICK,
    LLAMA_8B,
    LLAMA_70B,
    byte_tokenizer,
    random_checkpoint,
)
from checkpoint.quantization import Quantization, Scheme
from contracts.errors import ConfigError
from coordinator.settings import CoordinatorSettings
from gateway.settings import GatewaySettings
from kernels.caps import Caps
from models.config import NormPlacement
from service.settings import read_settings
from tandem import cli
from tandem.commands import doctor
from tandem.commands import top_snapshot as look
from tandem.commands.chat import Timing
from tandem.commands.completion import script
from tandem.local.gpu_assignment import Gpu
from tandem.local.settings import UpSettings
from tests.engine import tiny_models
from tests.engine.quantized_models import LAYOUTS, damage, save_quantized
from tests.environment import plain_environment
from tests.tandem.typed import Done, typed
from worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
BASH = """
source "$SCRIPT"
COMP_WORDS=({words}) COMP_CWORD={index}
_tandem
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def test_the_help_names_every_command_and_the_codes() -> None:
    said = typed("--help").stdout
    assert all(f"    {name}" in said for name in cli.COMMANDS)
    assert all(f"  {code}  " in said for code in range(4))
    assert typed() == Done(2, "", said)


def test_a_reader_of_help_who_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tandem", "worker", "--help"]
    done = subprocess.run(command, cwd=ROOT, env=plain_environment(), stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [*cli.TOOLS, "up", "worker", "bench", "completion"])
def test_the_help_of_a_command_has_examples_of_it(command: str) -> None:
    done = typed(*command.split(), "--help")
    assert done.returncode == 0
    assert f"usage: tandem {command}" in done.stdout
    examples, _, codes = done.stdout.partition("examples:")[2].partition("exit codes:")
    assert f"tandem {command}" in examples
    assert all(f"\n  {code}  " in codes for code in range(3))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("nonsense",), 2),
        (("ps", "--nonsense"), 2),
        (("up", "--nonsense"), 2),
        (("completion", "powershell"), 2),
        (("top", "--interval", "soon"), 2),
        (("top", "--interval", "0"), 2),
        (("bench",), 2),
        (("bench", "nonsense"), 2),
        (("version",), 0),
        (("--version",), 0),
        (("--version", "nonsense"), 2),
        (("ps", "--port", "1"), 0),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int) -> None:
    assert typed(*arguments).returncode == code


def test_the_version_is_printed_either_way() -> None:
    assert typed("--version") == typed("version") and typed("version").stdout.startswith("tandem ")


@pytest.mark.parametrize("kind", [WorkerSettings, GatewaySettings, CoordinatorSettings, UpSettings])
def test_help_says_what_is_run_and_what_may_be_typed(
    kind: type[BaseSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_settings(kind, ["--help"])
    said = capsys.readouterr().out
    assert re.search(r"^(Run one|Start a whole) ", said, re.MULTILINE) and "Frozen" not in said
    assert ("{prefill,decode,mixed}" in said) == (kind is WorkerSettings)


def test_the_code_reaches_the_shell() -> None:
    command = [sys.executable, "-m", "tandem", "nonsense"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2 and "invalid choice: 'nonsense'" in done.stderr


def test_small_commands_do_not_wait_for_torch() -> None:
    commands = ["ps", "top", "chat", "bench serve", "doctor", "tokenize", "completion", "version"]
    code = f"""
import sys
from tandem import cli
for command in {commands}:
    try:
        cli.main([*command.split(), "--help"])
    except SystemExit:
        print(command, "torch" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stderr.splitlines() == [f"{command} False" for command in commands]


@pytest.fixture(scope="module")
def completion_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "tandem.bash"
    path.write_text(typed("completion", "bash").stdout)
    return path


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("tandem d", ["doctor"]),
        ("tandem t", ["top", "tokenize"]),
        ("tandem up --tr", ["--transfer"]),
        ("tandem up --transfer s", ["shm"]),
        ("tandem worker --role ''", ["prefill", "decode", "mixed"]),
        ("tandem top --o", ["--once"]),
        ("tandem chat --s", ["--system", "--seed"]),
        ("tandem up --transfer = t", ["tcp"]),  # as bash divides --transfer=t
        ("tandem completion f", ["fish"]),
        ("tandem bench s", ["serve", "speculation", "serving", "slow_network", "structured", "soak"]),
        ("tandem bench serve --le", ["--lengths"]),
        ("tandem bench --le", [""]),
        ("tandem up --model ./", [""]),  # a file: the shell's own business
    ],
)
def test_bash_offers(completion_script: Path, words: str, offered: list[str]) -> None:
    code = BASH.format(words=words, index=len(words.split()) - 1)
    env = os.environ | {"SCRIPT": str(completion_script)}
    done = subprocess.run(["bash", "-c", code], env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.splitlines() == offered


TYPED = [
    ("tandem d", "doctor"),
    ("tandem up --tran", "--transfer"),
    ("tandem up --transfer sh", "shm"),
    ("tandem bench tra", "transfer"),
    ("tandem bench serve --le", "--lengths"),
]


@pytest.fixture(scope="module")
def fish_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "tandem.fish"
    path.write_text(typed("completion", "fish").stdout)
    return path


@pytest.mark.skipif(not shutil.which("fish"), reason="no fish here")
@pytest.mark.parametrize(("words", "offered"), TYPED)
def test_fish_offers(fish_script: Path, tmp_path: Path, words: str, offered: str) -> None:
    command = ["fish", "--no-config", "-c", f'source {fish_script}; complete -C "{words}"']
    env = os.environ | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert offered in [line.split()[0] for line in done.stdout.splitlines()]


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh here")
def test_zsh_completes_at_its_prompt(tmp_path: Path) -> None:
    (tmp_path / "tandem.zsh").write_text(typed("completion", "zsh").stdout)
    ours, theirs = pty.openpty()
    env = os.environ | {"HOME": str(tmp_path), "ZDOTDIR": str(tmp_path), "TERM": "xterm", "PS1": "> "}
    shell = subprocess.Popen(["zsh", "-f", "-i"], env=env, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        os.write(ours, b"ZDOTDIR=.; autoload -U compinit; compinit -u; source ./tandem.zsh; echo he''re\n")
        read_until(ours, "here")
        for words, offered in TYPED:
            os.write(ours, f"{words}\t".encode())
            read_until(ours, f"{offered} ")  # the only one: completed, and a space after it
            os.write(ours, b"\x15")  # Ctrl-U: the line is empty again
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)


def read_until(terminal: int, words: str) -> None:
    said, deadline_s = "", time.monotonic() + DEADLINE_S
    while words not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said):
        assert time.monotonic() < deadline_s and select.select([terminal], [], [], DEADLINE_S)[0], said
        said += os.read(terminal, 4096).decode(errors="replace")


def test_fish_gets_values_of_options() -> None:
    said = script("fish", {"up": {"--transfer": ("ucx", "shm"), "--model": ()}})
    assert "'__fish_seen_subcommand_from up' -l transfer -x -a 'ucx shm'\n" in said
    assert "-l model\n" in said


def test_the_times_of_an_answer() -> None:
    timing = Timing(asked_s=10.0)
    assert timing.words() == "[no token]"
    timing.piece(10.25)
    timing.num_tokens = 1
    assert timing.words() == "[TTFT 250 ms, 1 tokens]"
    timing.piece(12.25)
    timing.num_tokens = 21
    assert timing.words() == "[TTFT 250 ms, 21 tokens, 10.0 tok/s]"


METRICS = """\
# TYPE tandem_gateway_requests counter
tandem_gateway_requests_total{code="ok"} 5.0
tandem_gateway_requests_total{code="unavailable"} 2.0
tandem_gateway_requests_total{code="disconnected"} 1.0
tandem_gateway_requests_total{code="invalid_request"} 10.0
tandem_gateway_requests_total{code="overloaded"} 3.0
# TYPE tandem_link_nbytes counter
tandem_link_nbytes_total{peer="a",direction="out",transport="shm",state="up"} 10.0
tandem_link_nbytes_total{peer="b",direction="in",transport="ucx",state="up"} 20.0
# TYPE tandem_link_codec_nbytes counter
tandem_link_codec_nbytes_total{peer="a",direction="out",level="raw"} 2.0
tandem_link_codec_nbytes_total{peer="a",direction="out",level="4bit"} 8.0
tandem_link_codec_nbytes_total{peer="b",direction="in",level="4bit"} 9.0
# TYPE tandem_link_codec_wire_nbytes counter
tandem_link_codec_wire_nbytes_total{peer="a",direction="out",level="raw"} 2.0
tandem_link_codec_wire_nbytes_total{peer="a",direction="out",level="4bit"} 2.0
# TYPE tandem_coordinator_requests gauge
tandem_coordinator_requests{state="TRANSFERRING"} 2.0
tandem_coordinator_requests{state="COMMITTED"} 1.0
"""


def test_a_page_of_metrics() -> None:
    page = look.parse(METRICS)
    assert (page.sums["tandem_gateway_requests_total"], page.sums["errors"]) == (21.0, 2.0)
    assert page.sums["tandem_link_nbytes_total"] == 30.0  # over all labels
    assert page.states == {"TRANSFERRING": 2.0, "COMMITTED": 1.0}
    assert page.links == (
        look.LinkView("a", "shm", "up", 10.0, {"raw": (2.0, 2.0), "4bit": (8.0, 2.0)}),
    )  # who sends tells of it


def test_rates_and_means_of_an_interval() -> None:
    change = look.Change(
        {"a": 10.0, "t_sum": 1.0, "t_count": 2.0}, {"a": 30.0, "t_sum": 4.0, "t_count": 8.0, "b": 1.0}, 2.0
    )
    assert change.rate("a") == 10.0
    assert change.rate("b") is None and change.rate() is None  # not there before: a worker that has just come
    assert change.mean("t") == 0.5
    assert look.Change(change.after, change.after, 0.0).rate("a") is None  # the first look
    assert look.Change({"t_sum": 1.0, "t_count": 2.0}, {"t_sum": 1.0, "t_count": 2.0}, 1.0).mean("t") is None


def test_a_counter_that_began_anew_is_no_negative_rate() -> None:
    assert look.Change({"a": 10.0}, {"a": 1.0}, 1.0).rate("a") == 0.0


HOPPER = Caps("cuda", 90, "NVIDIA H200", 132, torch=(2, 13, 0), triton=(3, 7, 0))


@pytest.mark.parametrize("found", [HOPPER, replace(HOPPER, cc=100, name="NVIDIA B200"), replace(HOPPER, triton=None)])
def test_a_gpu_is_explained_by_operation(found: Caps) -> None:
    said = list(doctor.explain_device(found))
    assert said[0] == (f"{found.name}, sm_{found.cc}, 132 multiprocessors", doctor.Level.OK)
    warnings = [words for words, level in said if level is doctor.Level.WARNING]
    assert any("pip install flashinfer-python" in words for words in warnings)
    assert any("pip install triton" in words for words in warnings) is (found.triton is None)
    (attention,) = [words for words, _ in said if words.startswith("  attn_decode: ")]
    assert ("; not triton: " in attention) is (found.triton is None)


def test_without_a_gpu_one_line_says_what_runs_instead() -> None:
    ((words, level),) = doctor.explain_device(Caps("cpu"))
    assert level is doctor.Level.OK and words == "none that CUDA shows: models run on the CPU"


GPTQ_64 = Quantization("gptq", Scheme.GPTQ, group_size=64)
WEIGHTS_ONLY = Quantization("compressed-tensors", Scheme.FP8_ROWS, rounds_activations=False)


@pytest.mark.parametrize(
    ("quantization", "cc", "chosen", "reason"),
    [
        (Quantization("fp8", Scheme.FP8_BLOCKS), 90, "float8", None),
        (Quantization("awq", Scheme.AWQ, group_size=128), 120, "int4", None),
        (GPTQ_64, 90, "bfloat16", "plain ones: group_size is 64: the kernels want multiples of 128, or -1"),
        (replace(GPTQ_64, act_order=True), 90, "bfloat16", "plain ones: desc_act is true: the columns of a group lie"),
        (WEIGHTS_ONLY, 90, "float8", None),
        (GPTQ_64, 80, "float32", "plain ones: the kernels want compute capability 9.0"),
        (None, 90, "float8", None),
    ],
)
def test_how_a_gpu_holds_quantized_weights_is_explained(
    quantization: Quantization | None, cc: int, chosen: str, reason: str | None
) -> None:
    checkpoint = replace(random_checkpoint("random", LLAMA_8B), quantization=quantization)
    said = list(doctor.explain_weights(checkpoint, replace(HOPPER, cc=cc)))
    assert said[0] == (f"dtype auto holds this model's weights as {chosen} here", doctor.Level.OK)
    assert [level for _, level in said[1:]] == [doctor.Level.WARNING] * (reason is not None)
    assert reason is None or reason in said[1][0]
    assert not list(doctor.explain_weights(checkpoint, Caps("cpu")))


@pytest.mark.parametrize(
    ("quantization", "words", "level"),
    [
        (Quantization("modelopt", Scheme.FP8_ROWS), "kept as they are stored", doctor.Level.OK),
        (Quantization("fp8", Scheme.FP8_BLOCKS), "rounded once more, with a scale a row", doctor.Level.WARNING),
        (Quantization("awq", Scheme.AWQ, group_size=128), "widened to bfloat16", doctor.Level.WARNING),
    ],
)
def test_what_becomes_of_quantized_experts_is_explained(
    quantization: Quantization, words: str, level: doctor.Level
) -> None:
    checkpoint = replace(random_checkpoint("random", LLAMA4_MAVERICK), quantization=quantization)
    _, (said, found) = doctor.explain_weights(checkpoint, HOPPER)
    assert said.startswith(f"the matrices of its experts are {words}") and found is level


@pytest.mark.parametrize(
    ("cc", "chosen", "words", "level"),
    [
        (90, "float8", "the matrices of its experts are kept as they are stored, in MXFP4", doctor.Level.OK),
        (120, "float8", "the matrices of its experts are kept as they are stored, in MXFP4", doctor.Level.OK),
        (80, "float32", "its quantized matrices are widened on load, and take the memory", doctor.Level.WARNING),
    ],
)
def test_what_becomes_of_mxfp4_experts_is_explained(cc: int, chosen: str, words: str, level: doctor.Level) -> None:
    (first, _), (said, found) = doctor.explain_weights(random_checkpoint("random", GPT_OSS_20B), replace(HOPPER, cc=cc))
    assert first == f"dtype auto holds this model's weights as {chosen} here"
    assert said.startswith(words) and found is level


def test_a_plain_gpt_oss_is_not_told_to_be_quantized() -> None:
    assert GPT_OSS_20B.experts is not None
    plain = replace(GPT_OSS_20B, experts=replace(GPT_OSS_20B.experts, is_mxfp4=False))
    assert len(list(doctor.explain_weights(random_checkpoint("random", plain), HOPPER))) == 1


def test_doctor_says_which_model_a_gpu_does_not_serve():
    checkpoint = random_checkpoint("random", replace(LLAMA_8B, norms=NormPlacement.AROUND))
    ((said, level),) = doctor.explain_weights(checkpoint, HOPPER)
    assert "a GPU does not serve this model, which has norms after attention and MLP: set --device to cpu" in said
    assert level is doctor.Level.WARNING


def test_keys_with_biases_that_float8_would_ruin_are_explained() -> None:
    checkpoint = replace(random_checkpoint("random", LLAMA_8B), quantization=Quantization("fp8", Scheme.FP8_BLOCKS))
    biased = replace(checkpoint, config=replace(checkpoint.config, qkv_bias=True))
    (chosen, _), (said, level) = doctor.explain_weights(biased, HOPPER)
    assert "as bfloat16" in chosen and level is doctor.Level.WARNING
    assert said.endswith("they are FP8, and float8 has keys in e4m3, which biases make hundreds")


def test_experts_that_would_round_what_a_checkpoint_leaves_plain_are_widened() -> None:
    checkpoint = replace(random_checkpoint("random", LLAMA4_MAVERICK), quantization=WEIGHTS_ONLY)
    (chosen, _), (said, level) = doctor.explain_weights(checkpoint, HOPPER)
    assert "as bfloat16" in chosen and level is doctor.Level.WARNING
    assert said.endswith("input_activations is null: grouped products of experts would round activations")


@pytest.mark.parametrize(
    ("gib", "words"),
    [
        ((141,), None),
        ((68, 141), "leaves little .* KV cache: set tensor_parallel to 2 or more"),
        (
            (24,),
            r"least 67.7 GiB as float8, of 24\.0 GiB that a GPU has, and do not fit: set tensor_parallel to 4 or",
        ),
    ],
)
def test_weights_that_a_gpu_does_not_hold_are_told(gib: tuple[int, ...], words: str | None) -> None:
    cards = [Gpu(count << 30, 90) for count in gib]
    ((said, level),) = doctor.explain_room(random_checkpoint("random", LLAMA_70B), cards)
    assert level is (doctor.Level.WARNING if words else doctor.Level.OK)
    assert re.search(words or "GiB that a GPU has$", said), said
    assert not list(doctor.explain_room(random_checkpoint("random", LLAMA_70B), []))


def test_a_long_list_of_what_is_plain_is_cut() -> None:
    found = Quantization("compressed-tensors", Scheme.FP8_ROWS, tuple(f"vision_model.{n}" for n in range(200)))
    assert found.words().endswith("; as they were: " + ", ".join(found.skipped[:4]) + " and 196 more")


def test_a_quantized_folder_is_told_in_words(tmp_path: Path) -> None:
    shape = {"vocab_size": 3, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    config = {
        "architectures": ["LlamaForCausalLM"], "num_attention_heads": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, **shape,
        "quantization_config": {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["lm_head", "mlp.down"]},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    save_file({"w": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    said = [words for words, _ in doctor.CHECKS["model"](argparse.Namespace(model=str(tmp_path)))]
    assert (
        "quantized: INT4 as AWQ packs it (awq), a scale for 128 columns; as they were: lm_head, mlp.down; "
        "widened on load for a CPU"
    ) in said


@pytest.mark.parametrize("is_mxfp4", [True, False])
def test_a_gpt_oss_folder_tells_of_its_experts(is_mxfp4: bool, tmp_path: Path) -> None:
    model = tiny_models.save_tiny(tmp_path, "gpt_oss")
    if is_mxfp4:
        tiny_models.save_mxfp4(tmp_path, model)
    said = [words for words, _ in doctor.CHECKS["model"](argparse.Namespace(model=str(tmp_path)))]
    words = (
        "quantized: MXFP4 (mxfp4), a scale for 32 columns; as they were: all but its experts; widened on load for a CPU"
    )
    assert [line for line in said if line.startswith("quantized")] == [words] * is_mxfp4


def test_the_doctor_tells_of_weights_that_do_not_fit_their_configuration(tmp_path: Path) -> None:
    save_quantized(tmp_path, LAYOUTS["gptq"])
    damage(tmp_path, {"model.layers.0.self_attn.o_proj.qzeros": None})
    with pytest.raises(ConfigError, match=r"lacks 'model\.layers\.0\.self_attn\.o_proj\.qzeros'"):
        list(doctor.CHECKS["cpu"](argparse.Namespace(model=str(tmp_path))))
    assert list(doctor.CHECKS["cpu"](argparse.Namespace(model=str(tmp_path / "none"))))  # told of beside the model


def test_the_doctor_says_what_becomes_of_each_group_of_tensors(tmp_path: Path) -> None:
    save_quantized(tmp_path, LAYOUTS["packed"], "qwen3_moe", moe_intermediate_size=128)
    said = [words for words, _ in doctor.CHECKS["cpu"](argparse.Namespace(model=str(tmp_path)))]
    (dtype,) = (words.split()[-2] for words in said if words.startswith("dtype auto holds"))
    groups = {words.split(":")[0].strip(): words.rpartition("; ")[2] for words in said if words.startswith("  ")}
    assert groups == {
        "experts": f"widened, then held as {dtype}",
        "attention": f"widened, then held as {dtype}",
        "MLP": f"widened, then held as {dtype}",
        "embedding and output head": f"held as {dtype}, rows of the embedding as float32",
        "norms and others": "held as float32",
    }


def test_the_doctor_says_what_a_mixture_is_made_of(tmp_path: Path) -> None:
    tiny_models.save_tiny(tmp_path, "qwen3_moe")
    said = [words for words, _ in doctor.CHECKS["model"](argparse.Namespace(model=str(tmp_path)))]
    assert "a mixture in 2 of its layers: 8 experts, 3 of them for each token; all of their weights are held" in said


UCX_INFO = """\
#
#      Transport: tcp
#         Device: eth0
#      Transport: tcp
#         Device: lo
#      Transport: cma
#         Device: memory
"""


def test_ucx_devices_in_a_line() -> None:
    assert doctor.ucx_devices(UCX_INFO) == "tcp (eth0, lo), cma (memory)"
    assert doctor.ucx_devices("") == "no device"
