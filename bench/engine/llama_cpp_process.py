"""The peer llama.cpp, in a process of its own, run by a Python that has llama-cpp-python."""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


class LlamaCppProcess:
    """llama.cpp in a process of its own, asked for one measurement at a time. It sleeps in between."""

    def __init__(self, python: Path, model: Path, threads: int, streams: int) -> None:
        script = Path(__file__).with_name("llama_cpp_peer.py")
        command = [str(python), str(script), str(model), str(threads), str(streams)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.version = self._answer()["version"]

    def decode(self, streams: int, prompt: int, num_tokens: int) -> float:
        """Return tokens per second of `streams` answers side by side, after prompts of `prompt` tokens."""
        return self._ask(what="decode", streams=streams, prompt=prompt, num_tokens=num_tokens)

    def prefill(self, num_tokens: int) -> float:
        """Return tokens per second of a prompt."""
        return self._ask(what="prefill", num_tokens=num_tokens)

    def forced_logits(self, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
        """Return the logits along a given answer, `[len(answer), vocab]`.

        The prompt is computed at once, the answer token by token.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "logits.npy")
            self._ask(what="forced_logits", prompt=list(prompt), answer=list(answer), file=str(file))
            return np.load(file)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _ask(self, **call: Any) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with {self._process.wait()}")
        return json.loads(line)
