"""The text of a corpus: prompts, and turns of users and answers that the model writes."""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpoint import Checkpoint
from contracts.errors import ConfigError
from tools.eagle3.generation import Request, Writer, Written
from tools.eagle3.prompts import HELD_OUT_CHAT, KINDS, Message, Prompt, PromptWriter

_log = logging.getLogger(__name__)

MAX_USER = 96
"""Tokens of a user's turn at most."""
SAMPLED, TEMPERATURE, USER_TEMPERATURE = 0.25, 0.8, 1.0
"""The part of answers that are sampled, and how; users' turns are always sampled."""
MIN_TEXT = 120
"""Characters of an answer that is worth a question about it."""
HELD_OUT_SEED = 20_000


@dataclass(frozen=True)
class WritingPlan:
    """How much is written.

    `prompts` first turns, of which the part `self_written` is opened by us and written by the model.
    `second_turns` as a part of the first ones; `held_out` prompts of each kind; at most `budget_s` seconds.
    """

    prompts: int = 50_000
    self_written: float = 0.4
    second_turns: float = 0.16
    held_out: int = 100
    held_out_tokens: int = 256
    max_new: int = 384
    budget_s: float = float("inf")


@dataclass(frozen=True)
class Texts:
    """What was written: to train on, and greedily by kind to judge a head by."""

    training: list[Written]
    held_out: dict[str, list[Written]]


class Conversations:
    """The chat template and the tokenizer of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        if checkpoint.chat_template is None:
            raise ConfigError(f"{checkpoint.path} has no chat template, which its conversations need")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(checkpoint.chat_template)
        self._names = {"bos_token": checkpoint.bos_token, "eos_token": checkpoint.eos_token}
        self._tokenizer = checkpoint.tokenizer()

    def render(self, messages: Sequence[Message], answers: bool = True) -> str:
        """Return the text of a conversation; with `answers` it ends where the model begins to."""
        return self._template.render(messages=list(messages), add_generation_prompt=answers, **self._names)

    def user_opening(self, before: Sequence[Message], opener: str) -> str:
        """Return the text up to the first words of a user's turn."""
        mark = "\x00"
        text = self.render([*before, {"role": "user", "content": mark}], answers=False)
        return text[: text.index(mark)] + opener

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, texts: Sequence[Sequence[int]]) -> list[str]:
        return self._tokenizer.decode_batch([list(text) for text in texts], skip_special_tokens=True)


def write_texts(talk: Conversations, writer: Writer, plan: WritingPlan, seed: int) -> Texts:
    """Write the corpus: users' turns and essays, answers, further users' turns, second answers."""
    prompts, draw = PromptWriter(seed), random.Random(seed)
    judged = PromptWriter(HELD_OUT_SEED, held_out=True)
    rounds = _Rounds(talk, writer, draw, plan)

    num_own = int(plan.prompts * plan.self_written)
    first = [prompts.first_turn() for _ in range(plan.prompts - num_own)]
    essays = [judged.essay() for _ in range(plan.held_out)]
    essay_texts, own = rounds.users(prompts, [prompts.opening() for _ in range(num_own)], essays)
    held_out = _held_out(judged, essay_texts, plan.held_out)
    first += own
    draw.shuffle(first)
    greedy = [Request(ids, 0.0, plan.held_out_tokens) for ids in rounds.tokens(held_out)]
    answered = rounds.answers(first, greedy, 0.62)
    judged_texts: dict[str, list[Written]] = {kind: [] for kind in KINDS}
    for prompt, text in zip(held_out, answered[: len(held_out)], strict=True):
        if text is not None and len(text.tokens) > text.start + 1:
            judged_texts[prompt.kind].append(text)
    answers = answered[len(held_out) :]
    second = _second_turns(rounds, prompts, first, answers, int(plan.prompts * plan.second_turns))
    texts = [text for text in (*answers, *rounds.answers(second, [], 0.25)) if text is not None]
    return Texts(texts, judged_texts)


def _held_out(judged: PromptWriter, essays: Sequence[str], count: int) -> list[Prompt]:
    makes: dict[str, Callable[[int], Prompt]] = {
        "chat": judged.chat,
        "code": lambda _: judged.code(),
        "code edits": lambda _: judged.code_edit(),
        "summaries": lambda index: judged.about(essays[index]),
        "extraction": lambda _: judged.extraction(),
    }
    usable = [index for index, essay in enumerate(essays) if essay]
    numbers = {kind: list(range(count)) for kind in KINDS}
    numbers |= {"chat": list(range(min(count, len(HELD_OUT_CHAT)))), "summaries": usable}
    rows = [(kind, index) for kind in KINDS for index in numbers[kind]]
    return [makes[kind](index) for kind, index in rows]


def _second_turns(
    rounds: "_Rounds", prompts: PromptWriter, first: Sequence[Prompt], answers: Sequence[Written | None], count: int
) -> list[Prompt]:
    """Return questions about answers, and further turns of users, in equal parts."""
    told = [(prompt, answer) for prompt, answer in zip(first, answers, strict=True) if answer is not None][: 2 * count]
    texts = rounds.written(told)
    pairs = [(prompt, text) for (prompt, _), text in zip(told, texts, strict=True) if len(text) >= MIN_TEXT][:count]
    half = len(pairs) // 2
    about = [prompts.about(text) for _, text in pairs[:half]]
    before = [(*prompt.messages, {"role": "assistant", "content": text}) for prompt, text in pairs[half:]]
    return about + rounds.users(prompts, before, [])[1]


class _Rounds:
    """The rounds of writing, each with its part of the time."""

    def __init__(self, talk: Conversations, writer: Writer, draw: random.Random, plan: WritingPlan) -> None:
        self._talk, self._writer, self._draw, self._plan = talk, writer, draw, plan

    def tokens(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return self._talk.encode([self._talk.render(prompt.messages) for prompt in prompts])

    def answers(self, prompts: Sequence[Prompt], before: Sequence[Request], share: float) -> list[Written | None]:
        """Answer requests that come `before`, then prompts, some of them sampled."""
        requests = [
            Request(ids, TEMPERATURE if self._draw.random() < SAMPLED else 0.0, self._plan.max_new)
            for ids in self.tokens(prompts)
        ]
        return self._write([*before, *requests], share, "answers")

    def users(
        self, prompts: PromptWriter, before: Sequence[tuple[Message, ...]], essays: Sequence[Prompt]
    ) -> tuple[list[str], list[Prompt]]:
        """Let the model write users' turns after conversations, and essays for the held-out summaries.

        A turn that was not ended, or has no words, is left out.
        """
        openers = [prompts.opener() for _ in before]
        texts = [self._talk.user_opening(talk, opener) for talk, opener in zip(before, openers, strict=True)]
        own = [Request(ids, USER_TEMPERATURE, MAX_USER) for ids in self._talk.encode(texts)]
        asked = [Request(ids, 0.0, self._plan.max_new) for ids in self.tokens(essays)]
        written = self._write([*asked, *own], 0.065, "users' turns and essays")
        said = self._talk.decode([[] if text is None else text.tokens[text.start :].tolist() for text in written])
        turns = [
            Prompt("own", (*talk, {"role": "user", "content": f"{opener}{turn}".strip()}))
            for talk, opener, turn, text in zip(before, openers, said[len(asked) :], written[len(asked) :], strict=True)
            if text is not None and len(text.tokens) - text.start < MAX_USER and len(f"{opener}{turn}".split()) > 2
        ]
        return [text.strip() for text in said[: len(asked)]], turns

    def written(self, told: Sequence[tuple[Prompt, Written]]) -> list[str]:
        """Return the text of answers."""
        return self._talk.decode([answer.tokens[answer.start :].tolist() for _, answer in told])

    def _write(self, requests: Sequence[Request], share: float, what: str) -> list[Written | None]:
        found = self._writer.write(requests, share * self._plan.budget_s)
        num_tokens = sum(len(text.tokens) - text.start for text in found if text is not None)
        _log.info("%s: %d of %d, %d tokens", what, sum(text is not None for text in found), len(requests), num_tokens)
        return found
