"""The command `tandem tokenize`: what a model's tokenizer makes of a text, without a server."""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer

from checkpoint import open_checkpoint
from contracts.errors import RequestError
from tandem.commands.terminal_text import piped, typed

DESCRIPTION = "Show the tokens of a text, by the tokenizer of a model's own files. Needs no running system."
EXAMPLES = """\
examples:
  tandem tokenize "Hello, world"             one line per token: id and text
  tandem tokenize --count < prompt.txt       how many tokens a prompt takes
  tandem tokenize --decode 19556 28 905      the way back
  tandem tokenize --model ./Qwen3-0.6B --json "Hello"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="*", help="the text, or token ids with --decode; else standard input is read")
    parser.add_argument("--model", default="", help="as for `tandem up`; SmolLM2-135M-Instruct by default")
    parser.add_argument("--decode", action="store_true", help="from token ids to text")
    parser.add_argument(
        "--no-special", action="store_true", help="without the tokens that the model wants at the start"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--count", action="store_true", help="only the number of tokens")
    form.add_argument("--json", action="store_true", help="a JSON object: count, ids, tokens")


def run(options: argparse.Namespace, home: Path) -> int:
    tokenizer = open_checkpoint(options.model).tokenizer()
    text = typed(options.text) if options.text else piped()
    if options.decode:
        print(tokenizer.decode(parse_ids(text, tokenizer.get_vocab_size()), skip_special_tokens=False))
    else:
        ids = tokenizer.encode(text, add_special_tokens=not options.no_special).ids
        print(shown(tokenizer, ids, options))
    return 0


def parse_ids(text: str, vocab_size: int) -> list[int]:
    """Return the numbers in a text, divided by spaces, commas or brackets as in logs.

    Raises RequestError if one is no token id.
    """
    words = text.translate(str.maketrans(",[]", "   ")).split()
    wrong = [word for word in words if not word.isdecimal() or int(word) >= vocab_size]
    if wrong:
        raise RequestError(f"{wrong[0]!r} is not a token id: they are whole numbers below {vocab_size}")
    return [int(word) for word in words]


def shown(tokenizer: Tokenizer, ids: list[int], options: argparse.Namespace) -> str:
    """Return the tokens in the form that the options ask for."""
    texts = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids]
    if options.count:
        return str(len(ids))
    if options.json:
        return json.dumps({"count": len(ids), "ids": ids, "tokens": texts}, ensure_ascii=False)
    lines = [f"{token_id:>8}  {text!r}" for token_id, text in zip(ids, texts, strict=True)]
    return "\n".join([*lines, f"{len(ids)} tokens"])
