"""A composed system under a project name of its own: up, ask, measure, down. Not a test."""

import json
import os
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from process.sockets import free_port
from tests.environment import plain_environment

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "tandem:test"
BUILD_TIMEOUT_S = 1500
UP_TIMEOUT_S = 300
COMMAND_TIMEOUT_S = 120
ASK_TIMEOUT_S = 120
FETCH = "import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1], timeout=60).read().decode())"


@dataclass
class Composed:
    """Commands against one project of `docker compose`. Its port is a free one, so that it disturbs nobody."""

    project: str
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def build(self) -> None:
        """Without a run first, so that a slow build and a slow start are told apart. Takes the old image's place."""
        self.compose("build", timeout_s=BUILD_TIMEOUT_S)
        docker("image", "prune", "--force", "--filter", "label=org.opencontainers.image.title=tandem")

    def up(self, *options: str) -> None:
        """Return when every container is healthy. On failure, shows why."""
        try:
            self.compose(
                "up", "--detach", "--wait", f"--wait-timeout={UP_TIMEOUT_S}", *options, timeout_s=UP_TIMEOUT_S + 60
            )
        except subprocess.CalledProcessError as error:
            raise AssertionError(
                f"{error.stderr}\n{self.compose('ps', '--all')}\n{self.compose('logs', '--tail=30')}"
            ) from error

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout=20")

    def compose(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        ours = {"TANDEM_PORT": str(self.port), "TANDEM_IMAGE": IMAGE, "TANDEM_TRANSFER": "ucx"}
        command = ["docker", "compose", "--project-name", self.project, *arguments]
        return _run(command, timeout_s, plain_environment() | ours)

    def containers(self, service: str = "") -> list[dict]:
        """What `docker inspect` says of each container of the service, or of all."""
        ids = self.compose("ps", "--all", "--quiet", *filter(None, [service])).split()
        return json.loads(docker("inspect", *ids)) if ids else []

    def left(self) -> dict[str, list[str]]:
        """What exists of this project: containers, networks, volumes."""
        label = f"label=com.docker.compose.project={self.project}"
        kinds = {"container": ["ps", "--all"], "network": ["network", "ls"], "volume": ["volume", "ls"]}
        return {kind: docker(*command, "--quiet", "--filter", label).split() for kind, command in kinds.items()}

    def metrics(self, container: dict) -> dict[tuple[str, str], float]:
        """(sample name, transport label or "") -> sum over the other labels, of one worker."""
        text = docker("exec", container["Id"], "python", "-c", FETCH, "http://127.0.0.1:9000/metrics")
        sums: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = sample.name, sample.labels.get("transport", "")
                sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=ASK_TIMEOUT_S) as response:
            return json.load(response)

    def ask(self, question: str, max_tokens: int = 24) -> str:
        """The greedy answer."""
        body = {
            "model": self.get("/v1/models")["data"][0]["id"],
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as response:
                return json.load(response)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error.code} {error.read().decode()}\n{self.compose('logs', '--tail=8')}") from error


def docker(*arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    return _run(["docker", *arguments], timeout_s, dict(os.environ))


def _run(command: list[str], timeout_s: float, environ: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environ, timeout=timeout_s, capture_output=True, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(
            done.returncode, command, done.stdout, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done.stdout
