"""Whether what a command names exists: targets, files, options, settings, services. Nothing is run. Not a test."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache, reduce
from itertools import pairwise
from urllib.parse import urlsplit

import yaml

from bench.__main__ import ALL as BENCHMARKS
from service.settings import read_settings, variable
from tandem import cli
from tandem.local.preflight import MAKE_VARIABLES, SERVICES, handed_on, read_up_settings, unread
from tests.docs.fences import ROOT
from tools.configuration import COMMANDS

MAKE_ENVIRONMENT = {"TORCH_INDEX_URL", "PYTHON", "ARGS"}
COMPOSE_OPTIONS = {
    "up": {"--build", "--detach", "--wait", "--scale"},
    "down": set(),
    "ps": {"--all"},
    "logs": {"--follow", "--tail"},
}
ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=")


def statements(text: str) -> Iterator[list[str]]:
    """The words of each command: lines, joined where a backslash goes on; comments are left out."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def look_up(words: list[str]) -> None:
    """Raises AssertionError, or what the command's own parser raises, for what does not exist."""
    while words and ASSIGNMENT.match(words[0]):
        _variable(words[0])
        words = words[1:]
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    assert program in PROGRAMS, f"no way to look up {program!r}"
    PROGRAMS[program](rest)


def _make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for word in words:
        if found := ASSIGNMENT.match(word):
            assert found[1] in {*MAKE_VARIABLES, *MAKE_ENVIRONMENT}, f"make does not hand on {found[1]}"
        else:
            assert re.search(rf"^{re.escape(word)}:", text, re.MULTILINE), f"no target {word}"


def _docker(words: list[str]) -> None:
    if words[0] in ("build", "push"):
        files = [word for option, word in pairwise(words) if option == "--file"]
        assert all((ROOT / file).exists() for file in files), f"no file {files}"
        return
    assert words.pop(0) == "compose"
    files, profiles = [], {""}
    while words[0].startswith("-"):
        option, value = words.pop(0), words.pop(0)
        (files.append(value) if option == "-f" else profiles.add(value))
        assert option in ("-f", "--profile"), option
    found = _composed(tuple(files or ["compose.yaml"]))
    known = {profile for service in found.values() for profile in service.get("profiles", ())}
    assert profiles <= {"", *known}, f"no profile {profiles}"
    command, *rest = words
    options = {word.partition("=")[0] for word in rest if word.startswith("--")}
    assert options <= COMPOSE_OPTIONS[command], f"{command} has no {options}"
    named = {word.partition("=")[0] for word in rest if not word.startswith("--")}
    assert named <= found.keys(), f"no service {named}"


@cache
def _composed(files: tuple[str, ...]) -> dict[str, dict]:
    """Name -> service, of all files."""
    assert all((ROOT / file).exists() for file in files), f"no file {files}"
    return {
        name: service
        for file in files
        for name, service in yaml.safe_load((ROOT / file).read_text())["services"].items()
    }


def _tandem(words: list[str]) -> None:
    command, *rest = words
    assert command in cli.COMMANDS, f"no command {command}"
    if command == "up":
        own, variables = handed_on(rest)
        for kind in SERVICES:
            given = [name for name in kind.model_fields if variable(name) in variables]
            read_settings(kind, [f"--{name.replace('_', '-')}={variables[variable(name)]}" for name in given])
        if any(word.startswith("cuda") for word in own):
            _settings("tandem up", own)  # whether this machine has such GPUs says nothing of the page
        else:
            read_up_settings(own)
    elif command == "worker":
        _settings("tandem worker", rest)
    elif (command, *rest[:1]) == ("bench", "serve"):
        cli.tool_parser("bench serve").parse_args(rest[1:])
    elif command == "bench":
        assert rest[0] in BENCHMARKS, f"no benchmark {rest[0]}"
    else:
        cli.tool_parser(command).parse_args(rest)


def _python(words: list[str]) -> None:
    if words[0] != "-m":
        assert (ROOT / words[0]).exists(), f"no file {words[0]}"
        return
    assert importlib.util.find_spec(words[1]) is not None, f"no module {words[1]}"
    if (command := f"python -m {words[1]}") in COMMANDS:
        _settings(command, words[2:])


def _settings(command: str, words: list[str]) -> None:
    read_settings(COMMANDS[command], words)


def _curl(words: list[str]) -> None:
    """Paths only: of the services, as their code spells them."""
    urls = [word for word in words if word.startswith("http://")]
    assert urls
    files = [
        *(ROOT / "gateway/http/routes").glob("*.py"),
        ROOT / "worker/front/app.py",
        ROOT / "coordinator/service.py",
    ]
    sources = [file.read_text() for file in files]
    for url in urls:
        assert any(f'"{urlsplit(url).path}"' in source for source in sources), f"no endpoint {url}"


def _helm(words: list[str]) -> None:
    """Files and values; Helm itself judges the chart in tests/deploy."""
    command, _, chart, *options = words
    assert command in ("install", "upgrade"), command
    values = yaml.safe_load((ROOT / chart / "values.yaml").read_text())
    for option, word in zip(options[::2], options[1::2], strict=True):
        assert option in ("--values", "--set"), option
        if option == "--values":
            assert (ROOT / word).exists(), f"no file {word}"
        else:
            reduce(lambda found, key: found[key], word.partition("=")[0].split("."), values)


def _kubectl(words: list[str]) -> None:
    assert words[0] in ("rollout", "port-forward"), f"no way to look up kubectl {words[0]}"


def _export(words: list[str]) -> None:
    for word in words:
        _variable(word)


def _numactl(words: list[str]) -> None:
    look_up(words[next(index for index, word in enumerate(words) if not word.startswith("-")) :])


def _variable(assignment: str) -> None:
    wrong = unread([assignment.partition("=")[0]])
    assert not wrong, wrong


def compose_variables() -> set[str]:
    """What the compose files take from the environment."""
    return set(compose_defaults())


def compose_defaults() -> dict[str, list[str]]:
    """Variable -> its default in compose.yaml and, if that is another one, in compose.gpu.yaml; none that are empty."""
    found: dict[str, list[str]] = {}
    for file in ("compose.yaml", "compose.gpu.yaml"):
        for name, default in re.findall(r"\$\{([A-Z0-9_]+)(?::-([^}]*))?\}", (ROOT / file).read_text()):
            defaults = found.setdefault(name, [])
            if default and default not in defaults:
                defaults.append(default)
    return found


PROGRAMS = {
    "make": _make,
    "docker": _docker,
    "tandem": _tandem,
    "python": _python,
    "python3": _python,
    "curl": _curl,
    "helm": _helm,
    "kubectl": _kubectl,
    "export": _export,
    "numactl": _numactl,
}
