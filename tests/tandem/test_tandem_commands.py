"""The commands for people, as they are typed, against one running system with the real model."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.system.local_system import System, running
from tandem.commands import ps
from tandem.local.run_dir import RunDir
from tests.tandem.typed import Done, typed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0
TIMES = re.compile(r"\[TTFT \d+ ms, (\d+) tokens, \d+\.\d tok/s\]\n")
FRANCE = "What is the capital of France?"


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running(TANDEM_NUM_THREADS="1", TANDEM_KV_CACHE_MIB="512") as found:
        yield found


@pytest.fixture(scope="module")
def chat(system: System) -> Callable[..., Done]:
    return lambda *words, **how: typed("chat", "--port", str(system.port), "--temperature", "0", *words, **how)


def test_one_question_gets_one_answer_and_its_times(chat: Callable) -> None:
    done = chat(FRANCE)
    assert done.returncode == 0
    assert "Paris" in done.stdout and done.stdout.endswith("\n")
    assert TIMES.fullmatch(done.stderr)


def test_a_question_may_come_through_a_pipe_and_beside_words(chat: Callable) -> None:
    assert chat(given=FRANCE).stdout == chat(FRANCE).stdout
    both = chat("Answer in one word.", "--max-tokens", "8", given=FRANCE)
    assert both.returncode == 0 and both.stdout.strip()


def test_the_sampling_options_reach_the_model(chat: Callable, system: System) -> None:
    short = chat("Tell me a story.", "--max-tokens", "5")
    assert TIMES.fullmatch(short.stderr).group(1) == "5"  # type: ignore[union-attr]
    drawn = ("chat", "--port", str(system.port), "--max-tokens", "12", "--seed", "7", "Tell me a story.")
    assert typed(*drawn).stdout == typed(*drawn).stdout


def test_what_the_server_refuses_is_said_in_its_words(system: System) -> None:
    done = typed("chat", "--port", str(system.port), "--temperature", "9", "x")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("tandem chat: temperature: ") and done.stderr.count("\n") == 1


class Terminal:
    """`tandem chat` on a terminal of its own."""

    def __init__(self, system: System) -> None:
        self._fd, theirs = pty.openpty()
        command = [sys.executable, "-m", "tandem", "chat", "--port", str(system.port), "--temperature", "0"]
        options: dict = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True, "cwd": ROOT}
        self.process = subprocess.Popen(command, **options)
        os.close(theirs)
        os.set_blocking(self._fd, False)
        self.said = ""

    def type(self, words: str) -> None:
        os.write(self._fd, words.encode())

    def wait_for(self, pattern: str) -> str:
        """What was said up to the pattern; it is gone from `said` afterwards."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not (found := re.search(pattern, self.said)):
            assert time.monotonic() < deadline_s, self.said
            try:
                self.said += os.read(self._fd, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)
        before, self.said = self.said[: found.end()], self.said[found.end() :]
        return before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(system: System) -> Iterator[Terminal]:
    opened = Terminal(system)
    yield opened
    opened.close()


def test_a_talk_goes_on_until_ctrl_d(terminal: Terminal) -> None:
    terminal.wait_for("Ctrl-D ends")
    for question in ("My name is Ada.", "What is my name?"):
        terminal.wait_for("> ")
        terminal.type(f"{question}\n")
        terminal.wait_for(r"tok/s\]")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(DEADLINE_S) == 0


def test_ctrl_c_stops_an_answer_and_not_the_talk(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("Count from one to a thousand, in words, one number a line.\n")
    terminal.wait_for("line.\r?\n.")
    os.killpg(terminal.process.pid, signal.SIGINT)
    terminal.wait_for(r"\[stopped\]")
    terminal.wait_for("> ")
    terminal.type(f"{FRANCE}\n")
    terminal.wait_for(r"tok/s\]")


def test_top_shows_what_works(system: System) -> None:
    long = ("--temperature", "0", "--max-tokens", "400", "Tell a long story.")  # at random it was once ten tokens
    chat = ("chat", "--port", str(system.port), *long)
    load = [sys.executable, "-m", "tandem", *chat]
    with subprocess.Popen(load, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.read(1)
        done = typed("top", "--once", "--interval", "1", "--port", str(system.port))
        busy.kill()
    assert done.returncode == 0 and "\x1b" not in done.stdout  # no terminal, no colours
    gateway, handoffs, workers, links, _ = done.stdout.split("\n\n")  # the last: tiers, those of peers at least
    assert gateway.splitlines()[1].split()[:4] == ["gateway", f":{system.port}", "ready", "1"]
    assert handoffs.split()[-2:] == ["1", "committed"]
    rows = {line.split()[0]: line.split() for line in workers.splitlines()}
    assert set(rows) == {"worker", "prefill-0", "decode-0"}
    assert rows["decode-0"][1:3] == ["ready", "1"]  # one answer runs there
    assert float(rows["decode-0"][6]) > 0  # answer t/s
    assert links.splitlines()[1].split()[:5] == ["prefill-0", "→", "decode-0", "shm", "up"]


@pytest.mark.parametrize(("columns", "term"), [(80, "xterm-256color"), (120, "xterm-256color"), (80, "dumb")])
def test_top_fits_into_a_terminal(system: System, columns: int, term: str) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    once = () if term == "dumb" else ("--once",)  # what can't be redrawn is shown once
    command = [sys.executable, "-m", "tandem", "top", *once, "--interval", "0.2", "--port", str(system.port)]
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": term}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # so a terminal says that nobody holds its other end any more
            while data := os.read(ours, 65536):
                said += data
        assert process.wait(DEADLINE_S) == 0
    os.close(ours)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.decode()).replace("\r", "").splitlines()
    assert any(line.startswith("decode-0 ") for line in lines)
    assert max(map(len, lines)) <= columns and not any("…" in line for line in lines)
    assert (b"\x1b[" in said) is (term != "dumb")


def test_top_on_a_terminal_redraws_until_ctrl_c(system: System) -> None:
    command = [sys.executable, "-m", "tandem", "top", "--interval", "0.2", "--port", str(system.port)]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        said = b""
        while said.count(b"decode-0") < 3:
            said += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        while process.poll() is None:  # its last words must be read, or it waits for us
            try:
                os.read(ours, 65536)
            except OSError:
                break
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_without_a_system_the_commands_say_how_to_start_one(tmp_path: Path) -> None:
    nowhere = {"XDG_STATE_HOME": str(tmp_path)}
    done = typed("chat", "hello", **nowhere)
    assert (done.returncode, done.stdout) == (1, "")
    assert "start one with `tandem up`" in done.stderr and done.stderr.count("\n") == 1
    assert "`tandem up` starts a system" in typed("top", **nowhere).stdout
    assert "on port 9" in typed("chat", "--port", "9", "hello", **nowhere).stderr
    for url in ("http://127.0.0.1:9", "127.0.0.1:9/v1/"):
        assert "nobody answers at http://127.0.0.1:9/v1/models" in typed("chat", "--url", url, "hello").stderr


def test_several_systems_must_be_told_apart(tmp_path: Path) -> None:
    row = {"role": "gateway", "id": "gateway", "pid": 1, "core_pid": None, "state": "starting", "log": ""}
    home = tmp_path / "tandem"
    with RunDir(home, 8000) as one, RunDir(home, 9000) as two:
        for port, folder in ((8000, one), (9000, two)):
            processes = [row | {"url": f"http://127.0.0.1:{port}"}]
            folder.write_state({"port": port, "supervisor": ps.identify(os.getpid()), "processes": processes})
        done = typed("chat", "hello", XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "on ports 8000, 9000: choose one with --port" in done.stderr


def test_tokens_there_and_back() -> None:
    text = "Hello, wörld 🙂"
    found = json.loads(typed("tokenize", "--json", text).stdout)
    assert found["count"] == len(found["ids"]) == len(found["tokens"])
    assert typed("tokenize", "--count", given=text).stdout == f"{found['count']}\n"
    assert typed("tokenize", "--decode", *map(str, found["ids"])).stdout == f"{text}\n"
    assert typed("tokenize", "--decode", given=str(found["ids"])).stdout == f"{text}\n"
    lines = typed("tokenize", text).stdout.splitlines()
    assert lines[0].split() == [str(found["ids"][0]), "'Hello'"] and lines[-1] == f"{found['count']} tokens"


@pytest.mark.parametrize("words", ["-1", "x", "99999999"])
def test_what_is_no_token_id_is_refused(words: str) -> None:
    done = typed("tokenize", "--decode", given=words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"tandem tokenize: '{words}' is not a token id")


NOISE = b"a\xffb"


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize("command", [("tokenize",), ("chat", "--url", "http://127.0.0.1:9")])
def test_what_is_no_text_is_refused(command: tuple[str, ...], locale: str) -> None:
    """In a process of its own: what Python makes of such bytes is settled when it starts."""
    env = os.environ | {"LC_ALL": locale, "PYTHONIOENCODING": "" if locale == "C" else "utf-8:strict"}
    tandem = [sys.executable, "-m", "tandem", *command]
    piped = subprocess.run(tandem, input=NOISE, env=env, cwd=ROOT, capture_output=True, timeout=60)
    given = subprocess.run([*tandem, NOISE], input=b"", env=env, cwd=ROOT, capture_output=True, timeout=60)
    for done, where in ((piped, "standard input"), (given, "the command line")):
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.decode() == f"tandem {command[0]}: {where} is not text in UTF-8\n"


def test_a_closed_standard_input_says_nothing() -> None:
    command = f"{sys.executable} -m tandem tokenize --count <&-"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n"), done


def test_the_doctor_finds_this_machine_well() -> None:
    done = typed("doctor", "--json")
    findings = json.loads(done.stdout)
    said: dict[str, list[str]] = {}
    for finding in findings:
        said.setdefault(finding["section"], []).append(finding["words"])
    assert done.returncode == 0
    assert list(said) == ["versions", "memory", "redis", "model", "transports", "kv codec", "cpu", "drafts", "gpu"]
    assert any(words.startswith("weights as stored: Q4_1: 210 tensors") for words in said["model"])
    assert any(words.startswith("of it one KV head's, 15 KiB,") for words in said["model"])
    assert any("starts and answers" in words for words in said["redis"])
    assert said["transports"][1].startswith("UCX: ") and "tcp (" in said["transports"][1]
    assert any("bfloat16" in words for words in said["cpu"])
    assert any(words.startswith("dtype auto holds this model's weights as ") for words in said["cpu"])
    assert any("norms and others: F32: 61 tensors" in words for words in said["cpu"])
    assert said["cpu"][-1].startswith("dtype native computes this model's weights as they are stored")
    assert said["gpu"][0].startswith("none that CUDA shows") or "multiprocessors" in said["gpu"][0]


def test_the_doctor_goes_on_past_what_is_broken_and_says_so(tmp_path: Path) -> None:
    done = typed("doctor", "--model", str(tmp_path / "no.gguf"), "--redis-url", "redis://127.0.0.1:9/0")
    assert done.returncode == 1
    broken = [line for line in done.stdout.splitlines() if "BROKEN: " in line]
    assert [line.split()[0] for line in broken] == ["redis", "model"]
    assert "Redis does not answer at redis://127.0.0.1:9/0" in broken[0] and "no.gguf" in broken[1]
    assert "gpu" in done.stdout
