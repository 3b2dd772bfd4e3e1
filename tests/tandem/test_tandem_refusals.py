"""What `tandem up` refuses before the first process is started: through the real command."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from contracts.errors import ConfigError
from tandem.commands import up
from tandem.local.preflight import (
    MAKE_VARIABLES,
    OF_COMPOSE,
    SERVICES,
    absolute_adapters,
    absolute_drafter,
    handed_on,
    unread,
)
from tandem.local.run_dir import RunDir
from tandem.local.settings import UpSettings
from tandem.local.vllm_options import ALWAYS, OTHERWISE, SAME, translated
from tests.docs.lookup import compose_variables
from tests.e2e.tiny import save_tiny
from tests.environment import plain_environment
from tests.tandem.typed import typed
from worker.settings import Dtype

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0
DTYPES = get_args(Dtype)


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """What the command says. It must be one line, and nothing may have been started: there is not even a run folder."""

    def run(*flags: str, **environment: str) -> str:
        home = tmp_path / "state"
        common = {"XDG_STATE_HOME": str(home), "TANDEM_PORT": "0"}
        done = typed("up", *flags, **(common | environment))
        assert done.returncode == 1, done
        assert done.stdout == "" and done.stderr.count("\n") == 1 and done.stderr.startswith("tandem up: "), done
        assert not home.exists()
        return done.stderr.removeprefix("tandem up: ").strip()

    return run


def test_a_hub_id_that_is_not_in_the_cache_is_one_line_and_a_code_in_the_shell(tmp_path: Path) -> None:
    """In a process of its own: the hub's client reads its settings once."""
    command = [sys.executable, "-m", "tandem", "up", "--port", "0", "--model", "org/no-such-model"]
    folders = {"HF_HOME": str(tmp_path / "hub"), "XDG_STATE_HOME": str(tmp_path)}
    env = plain_environment() | folders | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "'org/no-such-model'" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("transfer", "bogus", "'auto', 'nvlink', 'ucx', 'shm' or 'tcp'"),
        ("dtype", "float31", f"{', '.join(map(repr, DTYPES[:-1]))} or {DTYPES[-1]!r}"),
        ("port", "65536", "less than or equal to 65535"),
        ("port", "http", "a valid integer"),
        ("prefill", "-1", "greater than or equal to 0"),
        ("mixed", "one", "a valid integer"),
        ("redis_url", "http://h", "begin with redis://, rediss://, unix://"),
    ],
)
def test_a_wrong_setting_names_itself_its_value_and_what_is_allowed(
    refused: Callable[..., str], name: str, value: str, allowed: str
) -> None:
    said = refused(**{f"TANDEM_{name.upper()}": value})
    assert said.startswith(f"{name} is '{value}': ") and allowed in said
    assert said.endswith(f"(set by --{name.replace('_', '-')} or TANDEM_{name.upper()} or {name.upper()} of make)")


def test_a_flag_is_refused_as_the_variable_is(refused: Callable[..., str]) -> None:
    assert refused("--transfer", "bogus") == refused(TANDEM_TRANSFER="bogus")


def test_all_that_is_wrong_is_said_at_once(refused: Callable[..., str]) -> None:
    said = refused("--transfer", "a", "--dtype", "b", "--decode", "c")
    assert re.findall(r"(\w+) is '", said) == ["decode", "transfer", "dtype"]


def test_a_variable_that_nobody_reads_is_told_and_what_may_have_been_meant(monkeypatch, capsys) -> None:
    environ = {"TANDEM_MODLE": "x", "Tandem_Kv_Cache_Mb": "1", "TANDEM_XYZ": "", "TANDEM_PORT": "0", "PATH": ""}
    monkeypatch.setattr(up, "preflight", lambda settings: None)
    monkeypatch.setattr(up, "run", lambda *inputs: 0)
    assert up.main(["--port", "0"], environ) == 0
    assert capsys.readouterr().err.splitlines() == [
        "tandem up: TANDEM_MODLE is no setting; TANDEM_MODEL is one",
        "tandem up: TANDEM_XYZ is no setting",
        "tandem up: Tandem_Kv_Cache_Mb is no setting; TANDEM_KV_CACHE_MIB is one",
    ]


def test_a_variable_that_nobody_reads_is_told_beside_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    environ = plain_environment() | {"TANDEM_MIXD": "1"}
    assert up.main(["--port", "0", "--prefill", "0", "--decode", "0"], environ) == 1
    assert capsys.readouterr().err.splitlines() == [
        "tandem up: TANDEM_MIXD is no setting; TANDEM_MIXED is one",
        "tandem up: nobody could answer: set PREFILL and DECODE to 1 or more, or MIXED",
    ]


def test_a_worker_tells_a_variable_that_nobody_reads_too() -> None:
    done = typed("worker", TANDEM_KV_CACHE_MB="4096", TANDEM_MAX_INFLIGHT="8")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "tandem worker: TANDEM_KV_CACHE_MB is no setting; TANDEM_KV_CACHE_MIB is one",
        "tandem worker: secret is empty: set TANDEM_SECRET to the same value for all services of the pool",
    ]


def test_variables_of_the_compose_files_are_no_mistake() -> None:
    assert not unread(compose_variables())
    assert set(OF_COMPOSE) <= compose_variables()


def test_nobody_to_answer(refused: Callable[..., str]) -> None:
    assert "set PREFILL and DECODE to 1 or more, or MIXED" in refused("--decode", "0")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TANDEM_KV_CACHE_MIB", "lots"),
        ("TANDEM_LOG_LEVEL", "loud"),
        ("TANDEM_MAX_INFLIGHT", "0"),
        ("TANDEM_KV_HOST_GIB", "inf"),
        ("TANDEM_KV_DISK_GIB", "nan"),
        ("TANDEM_KV_CODEC", "zip"),
        ("TANDEM_KV_STORE", "redis://h:port"),
    ],
)
def test_settings_that_only_the_services_read_are_checked_too(
    refused: Callable[..., str], variable: str, value: str
) -> None:
    said = refused(**{variable: value})
    flag = variable.removeprefix("TANDEM_").lower().replace("_", "-")
    assert f"'{value}'" in said and said.endswith(f"(set by --{flag} or {variable})")


def test_a_wrong_value_is_shown_without_its_password(refused: Callable[..., str]) -> None:
    said = refused(TANDEM_KV_STORE="s4://me:hush@host/kv")
    assert "kv_store is 's4://...@host/kv': it must begin with redis://" in said


def test_a_taken_port(refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert f"port {port} is taken by" in refused("--port", str(port))


def test_a_port_that_a_system_of_ones_own_has(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gateway:
        port = gateway.getsockname()[1]
        with RunDir(tmp_path / "tandem", port):
            done = typed("up", "--port", str(port), XDG_STATE_HOME=str(tmp_path))
    words = f"a Tandem system runs on port {port} already (`tandem ps` shows it); set PORT to another"
    assert (done.returncode, done.stderr) == (1, f"tandem up: {words}\n")


@pytest.mark.parametrize("host", ["1.2.3.4", "nobody.invalid", "a..b"])
def test_a_host_that_is_not_of_this_machine_is_not_a_fault_of_the_port(refused: Callable[..., str], host: str) -> None:
    said = refused("--host", host)
    assert f"can't listen on {host}" in said and "set --host or TANDEM_HOST" in said and "PORT" not in said


def test_an_empty_host_is_not_every_address(refused: Callable[..., str]) -> None:
    said = refused(TANDEM_HOST="")
    assert said == "host is '': it must have at least 1 character (set by --host or TANDEM_HOST)"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-model-len", "-5"), "max_model_len is '-5': it must be greater than or equal to 0"),
        (
            ("--prefill", "2", "--log-level=loud"),
            "log_level is 'loud': it must be 'debug', 'info', 'warning' or 'error'",
        ),
        (("--api-key", "k"), "--api-key is a secret, which others could read here: set TANDEM_API_KEY"),
        (("--max-num-seqs",), "--max-num-seqs needs a value"),
        (("--override-generation-config", "{"), "override_generation_config"),
        (("--gpu-memory-utilization", "0.9"), "--gpu-memory-utilization is an option of vLLM's: the KV cache takes"),
        (("--max-loras", "4"), "--max-loras is an option of vLLM's: all adapters that are loaded may be in one batch"),
        (("--lora-modules", "sql"), "lora_modules is 'sql': NAME=FOLDER is expected, with commas between, where 'sql'"),
        (("--lora-modules", "{"), "--lora-modules takes NAME=PATH, or JSON with 'name' and 'path', and got '{'"),
        (("--model", "x", "-pp=2"), "-pp is an option of vLLM's: a model is split by --tensor-parallel alone"),
    ],
)
def test_an_option_of_the_services_or_of_vllm_is_refused_in_words(
    refused: Callable[..., str], flags: tuple[str, ...], words: str
) -> None:
    assert words in refused(*flags)


def test_a_command_line_of_vllm_is_understood() -> None:
    line = "Qwen/Qwen3-0.6B -tp 2 --dtype half --served-model-name a b --max-num-batched-tokens=64 --port 0"
    line += " --enable-prefix-caching --reasoning-parser qwen3 --tool-call-parser hermes"
    words, notes = translated(line.split())
    own, handed = handed_on(words)
    assert own == ["--model", "Qwen/Qwen3-0.6B", "--tensor-parallel", "2", "--dtype", "float16", "--port", "0"]
    names = {"TANDEM_SERVED_MODEL_NAME": "a,b", "TANDEM_MAX_BATCHED_TOKENS": "64", "TANDEM_TOOL_PARSER": "hermes"}
    assert handed == names
    assert [note.split()[0] for note in notes] == ["--enable-prefix-caching", "--reasoning-parser"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--max-model-len 8k", "--max-model-len 8000"),
        ("--max-model-len=25.6K", "--max-model-len=26214"),
        ("--max-model-len auto", "--max-model-len 0"),
        ("--max-num-batched-tokens 1M", "--max-batched-tokens 1048576"),
        ("--max-num-seqs 64", "--max-num-seqs 64"),
        ("--max-num-seqs k", "--max-num-seqs k"),
        ("--model 8k --dtype=half", "--model 8k --dtype=float16"),
    ],
)
def test_numbers_may_have_vllm_s_units(given: str, told: str) -> None:
    assert translated(given.split()) == (told.split(), [])


def test_vllm_s_lora_modules_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = [
        "--enable-lora",
        "--lora-modules",
        "sql=/a/sql",
        '{"name": "law", "path": "/a/law", "base_model_name": "x"}',
    ]
    words, _ = translated([*line, "--port", "0"])
    assert words == ["--enable-lora=true", "--lora-modules", "sql=/a/sql,law=/a/law", "--port", "0"]
    _, handed = handed_on(words)
    assert handed == {"TANDEM_ENABLE_LORA": "true", "TANDEM_LORA_MODULES": "sql=/a/sql,law=/a/law"}
    (tmp_path / "sql").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute_adapters("sql=sql,law=nowhere") == f"sql={tmp_path / 'sql'},law=nowhere"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (['{"method": "ngram", "num_speculative_tokens": 5}'], ["--speculate", "ngram", "--draft-tokens", "5"]),
        (['{"method": "suffix"}', "--port", "0"], ["--speculate", "suffix", "--port", "0"]),
        (['{"method": "eagle3"}'], ["--speculate", "eagle3"]),
        (['{"method": "eagle3", "model": "./head"}'], ["--speculate", "./head"]),
        (['{"method": "draft_model", "model": "org/small"}'], ["--speculate", "org/small"]),
        (['{"method": "mtp", "num_speculative_tokens": 1}'], ["--speculate", "mtp", "--draft-tokens", "1"]),
    ],
)
def test_vllm_s_drafters_are_ours(given: list[str], told: list[str]) -> None:
    assert translated(["--speculative-config", *given]) == (told, [])
    assert translated([f"--speculative-config={given[0]}", *given[1:]]) == (told, [])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('{"method": "draft_model", "model": 5}', "'model' is 5; a path is expected"),
        ('{"method": "draft_model"}', "the method 'draft_model' needs the path of a 'model'"),
        ('{"method": "medusa", "model": "x"}', "the method 'medusa' is not served; there are ngram, suffix, eagle3"),
        ('{"method": "ngram", "prompt_lookup_max": 4}', "there is no equal here to prompt_lookup_max; leave it out"),
        ("ngram", "takes a JSON object, and got 'ngram'"),
        ("[]", "takes a JSON object"),
    ],
)
def test_other_drafters_of_vllm_are_refused_by_name(given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        translated(["--speculative-config", given])


@pytest.mark.parametrize("name", sorted({*ALWAYS, *OTHERWISE, *SAME}))
def test_no_name_of_vllm_is_one_of_ours(name: str) -> None:
    """Otherwise it would be accepted in one place and refused in another."""
    ours = {f"--{field.replace('_', '-')}" for kind in (UpSettings, *SERVICES) for field in kind.model_fields}
    assert name not in ours and (name not in SAME or SAME[name] in ours)


@pytest.mark.parametrize("flag", ["--role", "--worker-id", "--pool", "--no-such-thing"])
def test_an_option_that_nobody_has_or_that_up_chooses_is_not_known(flag: str) -> None:
    done = typed("up", flag, "x")
    assert done.returncode == 2 and f"unrecognized arguments: {flag}" in done.stderr


@pytest.mark.parametrize("url", ["redis://:pw@host:six", "redis://:pw@[host"])
def test_a_redis_url_that_cannot_be_read(refused: Callable[..., str], url: str) -> None:
    said = refused("--redis-url", url)
    assert "redis_url" in said and "pw" not in said and "or TANDEM_REDIS_URL or REDIS_URL of make" in said


def test_a_wrong_redis_url_is_told_without_its_password(refused: Callable[..., str]) -> None:
    assert "pw" not in refused("--redis-url", "http://:pw@host")


def missing(folder: Path) -> str:
    return str(folder / "nothing.gguf")


def noise(folder: Path) -> str:
    (folder / "noise.gguf").write_bytes(os.urandom(4096))
    return str(folder / "noise.gguf")


def half_a_header(folder: Path) -> str:
    (folder / "half.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + (99).to_bytes(8, "little") * 2)
    return str(folder / "half.gguf")


def empty_folder(folder: Path) -> str:
    return str(folder)


def broken_config(folder: Path) -> str:
    (save_tiny(folder) / "config.json").write_text("{")
    return str(folder)


def unknown_family(folder: Path) -> str:
    config = save_tiny(folder) / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    )
    return str(folder)


def weights_cut_short(folder: Path) -> str:
    weights = save_tiny(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return str(folder)


def no_tokenizer(folder: Path) -> str:
    (save_tiny(folder) / "tokenizer.json").unlink()
    return str(folder)


MODELS = [missing, noise, half_a_header, empty_folder, broken_config, unknown_family, weights_cut_short, no_tokenizer]


@pytest.mark.parametrize("make", MODELS)
def test_a_model_whose_files_are_no_good(refused: Callable[..., str], tmp_path: Path, make: Callable) -> None:
    (tmp_path / "model").mkdir()
    path = make(tmp_path / "model")
    said = refused("--model", path)
    assert path in said and "(set by --model or TANDEM_MODEL or MODEL of make)" in said


def test_the_words_name_the_variables_that_make_hands_on() -> None:
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("SETTINGS :=")]
    assert tuple(line.split()[2:]) == MAKE_VARIABLES


def test_a_drafters_path_is_made_absolute_where_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drafts" / "tiny").mkdir(parents=True)
    assert absolute_drafter("drafts/tiny") == str(tmp_path / "drafts" / "tiny")
    assert absolute_drafter("suffix+./drafts/tiny") == f"suffix+{tmp_path / 'drafts' / 'tiny'}"
    for name in ("suffix", "suffix+eagle3", "org/name"):
        assert absolute_drafter(name) == name
