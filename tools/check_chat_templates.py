"""Does each text of a conversation reach the model? Tried with every chat template of a folder.

`python -m tools.check_chat_templates FOLDER [-v]` renders each `*.jinja` with conversations of every kind: developer
and system messages anywhere, tools, calls and their results, answers that go on. Each text has a word of its own,
which must be in the prompt, unless the answer is a 400. Prints a table; the exit status is 1 if a word is lost.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from checkpoint import Checkpoint, open_checkpoint
from contracts.errors import ConfigError, RequestError
from gateway.prompting.chat_template import Prompting
from gateway.prompting.request_fields import ChatRequest
from gateway.reasoning.harmony import Harmony
from gateway.tool_calling.tool_choice import calling_of

Message = dict[str, Any]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Looks it up.", "parameters": PARAMETERS}}
    for name in ("wx_lookup", "tz_lookup")
]


@dataclass(frozen=True)
class TemplateOutcome:
    """What became of one conversation: `ok`, `400` with the message, or `lost` with the words."""

    kind: str
    detail: str = ""


def said(role: str, word: str, **fields: Any) -> Message:
    return {"role": role, "content": f"Remember {word}.\n\n  And so on: {word}-end. "} | fields


def called(*names: str, content: str | None = None) -> Message:
    calls = [
        {
            "id": f"call0000{at}",
            "type": "function",
            "function": {"name": name, "arguments": f'{{"city": "{name}ville"}}'},
        }
        for at, name in enumerate(names)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(at: int, word: str, is_json: bool = False) -> Message:
    content = f'{{"sky": "{word}", "degrees": 21}}' if is_json else f"Sky: {word}"
    return {"role": "tool", "tool_call_id": f"call0000{at}", "content": content}


SYSTEM, DEVELOPER = said("system", "sysalpha"), said("developer", "devalpha")
USER, MORE, LAST = said("user", "useralpha"), said("user", "userbeta"), said("user", "usergamma")
ANSWER, OTHER = said("assistant", "asstalpha"), said("assistant", "asstbeta")
ONE = [called("wx_lookup"), result(0, "ressunny")]
TWO = [called("wx_lookup", "tz_lookup"), result(0, "ressunny"), result(1, "resnoon")]
BESIDE = [called("wx_lookup", content="Let me look, asstlook."), result(0, "ressunny")]

PLAIN: dict[str, Sequence[Message]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "developer": [DEVELOPER, USER],
    "turns": [USER, ANSWER, MORE],
    "system, turns": [SYSTEM, USER, ANSWER, MORE, OTHER, LAST],
    "developer, turns": [DEVELOPER, USER, ANSWER, MORE],
    "system, developer": [SYSTEM, DEVELOPER, USER],
    "developer, system": [DEVELOPER, SYSTEM, USER],
    "two systems": [SYSTEM, said("system", "sysbeta"), USER],
    "system later": [USER, ANSWER, SYSTEM, MORE],
    "system, system later": [SYSTEM, USER, ANSWER, said("system", "sysbeta"), MORE],
    "system, developer later": [SYSTEM, USER, ANSWER, DEVELOPER, MORE],
    "developer later": [USER, ANSWER, DEVELOPER, MORE],
    "developer last": [USER, ANSWER, MORE, DEVELOPER],
    "system last": [USER, SYSTEM],
    "system alone": [SYSTEM],
    "developer alone": [DEVELOPER],
    "two users": [USER, MORE],
    "two answers": [USER, ANSWER, OTHER, MORE],
    "answer first": [ANSWER, USER],
    "thought": [USER, ANSWER | {"reasoning": "Hm."}, MORE],
    "thought in text": [USER, ANSWER | {"content": "<think>Hm.</think>\n\nasstalpha"}, MORE],
    "same words": [said("developer", "useralpha"), USER],
    "parts": [USER | {"content": [{"type": "text", "text": "userone"}, {"type": "text", "text": "usertwo"}]}],
    "switch": [SYSTEM | {"content": "sysalpha /no_think"}, USER | {"content": "useralpha /think"}],
}
WITH_TOOLS: dict[str, Sequence[Message]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "developer": [DEVELOPER, USER],
    "turns": [USER, ANSWER, MORE],
    "call": [USER, *ONE],
    "system, call": [SYSTEM, USER, *ONE],
    "developer, call": [DEVELOPER, USER, *ONE],
    "call, answer": [USER, *ONE, ANSWER, MORE],
    "two calls": [USER, *TWO],
    "two calls, answer": [SYSTEM, USER, *TWO, ANSWER, MORE],
    "call after call": [USER, *ONE, called("tz_lookup"), result(0, "resnoon", is_json=True)],
    "text beside a call": [USER, *BESIDE],
    "text beside a call, answer": [USER, *BESIDE, ANSWER, MORE],
    "system later": [USER, *ONE, ANSWER, SYSTEM, MORE],
    "developer later": [SYSTEM, USER, *ONE, ANSWER, DEVELOPER, MORE],
    "result in parts": [USER, ONE[0], ONE[1] | {"content": [{"type": "text", "text": "ressunny"}]}],
    "thought before a call": [USER, ONE[0] | {"reasoning": "Hm."}, ONE[1]],
}
GOES_ON: dict[str, Sequence[Message]] = {
    "answer": [USER, ANSWER],
    "system, answer": [SYSTEM, USER, ANSWER],
    "developer later": [USER, ANSWER, DEVELOPER, MORE, OTHER],
    "calls": [USER, called("wx_lookup", content="asstlook")],
}


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the body of each conversation."""
    for name, messages in PLAIN.items():
        yield name, {"messages": messages}
    for name, messages in WITH_TOOLS.items():
        yield f"tools: {name}", {"messages": messages, "tools": TOOLS}
    yield "calls without tools", {"messages": [USER, *ONE, ANSWER, MORE]}
    for name, messages in GOES_ON.items():
        yield f"goes on: {name}", {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def words_of(body: dict[str, Any]) -> Counter[str]:
    """Return the words that have to be in the prompt, and how often."""
    words: Counter[str] = Counter(tool["function"]["name"] for tool in body.get("tools", ()))
    for message in body["messages"]:
        content = message["content"]
        text = " ".join(part["text"] for part in content) if isinstance(content, list) else content or ""
        for word in text.replace('"', " ").replace(".", " ").replace(",", " ").split():
            if word.startswith(("sys", "dev", "user", "asst", "res")):
                words[word.removesuffix("-end")] += 1
        for call in message.get("tool_calls", ()):
            words[call["function"]["name"] + "ville"] += 1
    return words


def outcome(prompting: Prompting, body: dict[str, Any]) -> TemplateOutcome:
    """Return what became of one conversation."""
    request = msgspec.convert(body, ChatRequest)
    try:
        if calling_of(request.tools, None, None) is not None and prompting.tool_form is None:
            return TemplateOutcome("400", "tools: unknown form of calls")
        prompt = prompting.render(request)
    except RequestError as error:
        return TemplateOutcome("400", str(error))
    lost = [word for word, count in words_of(body).items() if prompt.count(word) < count]
    return TemplateOutcome("lost", ", ".join(lost)) if lost else TemplateOutcome("ok")


def with_template(checkpoint: Checkpoint, template: str) -> Checkpoint:
    """Return the checkpoint with this template; its tokenizer knows the tokens of harmony."""

    def build() -> Any:
        tokenizer = checkpoint.tokenizer()
        tokenizer.add_special_tokens(list(Harmony.markers))
        return tokenizer

    return replace(checkpoint, chat_template=template, tool_template=None, build_tokenizer=build)


def check(path: Path, checkpoint: Checkpoint) -> dict[str, TemplateOutcome]:
    """Return what became of each conversation with this template."""
    try:
        prompting = Prompting(with_template(checkpoint, path.read_text()))
    except ConfigError as error:
        return {"compile": TemplateOutcome("400", str(error))}
    try:
        return {name: outcome(prompting, body) for name, body in requests()}
    finally:
        prompting.close()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true", help="print each conversation that is not shown")
    given = parser.parse_args(arguments)
    checkpoint, total = open_checkpoint(""), Counter[str]()
    print(f"{'template':64} {'ok':>4} {'400':>4} {'lost':>4}")
    for path in sorted(given.folder.glob("*.jinja")):
        outcomes = check(path, checkpoint)
        counts = Counter(outcome.kind for outcome in outcomes.values())
        total += counts
        print(f"{path.stem[:64]:64} {counts['ok']:4} {counts['400']:4} {counts['lost']:4}")
        for name, found in outcomes.items():
            if found.kind == "lost" or (given.verbose and found.kind != "ok"):
                print(f"    {found.kind} {name}: {found.detail[:160]}")
    print(f"{'all':64} {total['ok']:4} {total['400']:4} {total['lost']:4}")
    return 1 if total["lost"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
