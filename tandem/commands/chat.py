"""The command `tandem chat`, to talk to the model of a running system and see how fast it answers."""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.errors import TandemError
from tandem.commands import target
from tandem.commands.terminal_text import piped, typed

DESCRIPTION = "Talk to the model of a running system. Each answer ends with its time to first token and its speed."
EXAMPLES = """\
examples:
  tandem chat                                talk; Ctrl-C stops an answer, Ctrl-D ends the talk
  tandem chat "What is the moon?"            one question, one answer
  git diff | tandem chat "What changed?"     a question about what comes in on standard input
  tandem chat --url http://10.0.0.5:8000     a system elsewhere

The answer goes to standard output, all else, reasoning too, to standard error.
An API key is taken from TANDEM_API_KEY or OPENAI_API_KEY.
"""
PROMPT = "> "
TEMPERATURE = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", nargs="*", help="ask this and end; without it, talk")
    target.add_arguments(parser)
    parser.add_argument("--system", help="what the model is told before the first question")
    parser.add_argument("--max-tokens", type=int, help="longest answer, in tokens; the model's context by default")
    words = f"0: always the likeliest token; {TEMPERATURE} by default, for small models ramble at OpenAI's 1"
    parser.add_argument("--temperature", type=float, default=TEMPERATURE, help=words)
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer again")


def run(options: argparse.Namespace, home: Path) -> int:
    url = target.gateway_url(options, home)
    question = _one_question(options.question)
    talk = Talk(url, target.ask(f"{url}/v1/models")["data"][0]["id"], _sampling(options))
    if options.system:
        talk.messages.append({"role": "system", "content": options.system})
    if question:
        print(talk.answer(question, _show, _show_thought).words(), file=sys.stderr)
        return 0
    print(f"{talk.model} at {url}; Ctrl-D ends", file=sys.stderr)
    _converse(talk)
    return 0


@dataclass
class Timing:
    """The timing of one answer.

    Times are seconds of one clock; `num_tokens` is as the server counts them, of which `num_guessed` were guessed.
    """

    asked_s: float
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    num_guessed: int = 0

    def piece(self, now: float) -> None:
        self.first_s = now if self.first_s is None else self.first_s
        self.last_s = now

    def count(self, usage: Mapping[str, Any]) -> None:
        """Take in what the server has counted so far, if it says so."""
        self.num_tokens = usage.get("completion_tokens", self.num_tokens)
        details = usage.get("completion_tokens_details") or {}
        self.num_guessed = details.get("accepted_prediction_tokens", self.num_guessed)

    @property
    def tokens_per_s(self) -> float:
        """Return the rate after the first token; 0.0 if there was no second."""
        span_s = self.last_s - (self.first_s or self.last_s)
        return (self.num_tokens - 1) / span_s if span_s > 0 else 0.0

    def words(self) -> str:
        if self.first_s is None:
            return "[no token]"
        rate = f", {self.tokens_per_s:.1f} tok/s" if self.tokens_per_s else ""
        guessed = f", {self.num_guessed} guessed" if self.num_guessed else ""
        return f"[TTFT {(self.first_s - self.asked_s) * 1000:.0f} ms, {self.num_tokens} tokens{guessed}{rate}]"


@dataclass
class Talk:
    """A conversation. `messages`: both sides'; an interrupted answer is kept as far as it came."""

    url: str
    model: str
    sampling: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer(
        self, question: str, show: Callable[[str], None], think: Callable[[str], None] = lambda text: None
    ) -> Timing:
        """Ask a question, and pass each piece of the answer to `show` as it comes.

        Pieces of the reasoning, which come first, are passed to `think`. Raises Unavailable. A question without any
        answer is dropped from `messages`.
        """
        self.messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        is_thinking = False
        timing = Timing(time.monotonic())
        try:
            for event in target.stream(f"{self.url}/v1/chat/completions", self._body()):
                timing.count(event.get("usage") or {})
                for thought in _pieces(event, "reasoning"):
                    timing.piece(time.monotonic())
                    is_thinking = True
                    think(thought)
                for piece in _pieces(event, "content"):
                    timing.piece(time.monotonic())
                    if is_thinking:
                        think("\n\n")
                    is_thinking = False
                    pieces.append(piece)
                    show(piece)
        finally:
            if is_thinking:
                think("\n")
            if pieces:
                show("\n")
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()
        return timing

    def _body(self) -> dict[str, Any]:
        usage = {"include_usage": True, "continuous_usage_stats": True}
        stream = {"stream": True, "stream_options": usage}
        return {"model": self.model, "messages": self.messages} | stream | self.sampling


def _pieces(event: dict[str, Any], kind: str) -> list[str]:
    return [text for choice in event["choices"] if (text := choice["delta"].get(kind))]


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "seed")
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _one_question(words: list[str]) -> str:
    """Return the question from the command line, and from standard input unless that is a terminal."""
    given = "" if sys.stdin and sys.stdin.isatty() else piped().strip()
    return "\n\n".join(filter(None, [typed(words), given]))


def _converse(talk: Talk) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input(); absent from some Pythons
    while True:
        try:
            question = input(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if question:
            _answer_or_stop(talk, question)


def _answer_or_stop(talk: Talk, question: str) -> None:
    try:
        print(talk.answer(question, _show, _show_thought).words(), file=sys.stderr)
    except KeyboardInterrupt:
        print("[stopped]", file=sys.stderr)
    except TandemError as error:  # the next question may succeed
        print(f"[{error}]", file=sys.stderr)


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _show_thought(piece: str) -> None:
    """Print a piece of reasoning, dimmed on a terminal."""
    print(f"\033[2m{piece}\033[0m" if sys.stderr.isatty() else piece, end="", file=sys.stderr, flush=True)
