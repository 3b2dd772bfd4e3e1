#!/usr/bin/env bash
# Expected: a grammar in Lark takes the texts of its language. Lexers take the longest match and back up to it when what
#   follows leads nowhere; Lark's own three parsers do so for this grammar, as lex and flex do.
# Seen: llguidance's lexer decides byte by byte and never backs up. Where a terminal may go on with the first byte of the
#   next one (here `<` of `<b>` and of `</a>`), that byte commits it: the text of the language is cut off, and a model
#   that is held to the grammar can only write `<b>` again. Nothing warns: the grammar compiles.
# Packages: llguidance 1.9.1, lark 1.3.1 (PyPI).
# Why it matters to who serves models: grammars that clients send for structured output or for a custom tool's input are
#   written and tried with Lark; held to one of this kind, an answer goes on to max_tokens. Split such a terminal, so that
#   the characters that share a beginning are terminals of their own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps llguidance==1.9.1 lark==1.3.1
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from lark import Lark
from llguidance import LLMatcher, LLTokenizer

ONE_TERMINAL = 'start: "<a>" TEXT "</a>"\nTEXT: /([^<]|<b>)+/\n'
SPLIT = 'start: "<a>" (/[^<]+/ | "<b>")+ "</a>"\n'
TEXT = "<a>some<b>bold</a>"


def taken(grammar: str) -> tuple[int, bool]:
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(TEXT.encode())), matcher.is_accepting()


print("llguidance", version("llguidance"), "lark", version("lark"))
for parser, lexer in (("lalr", "contextual"), ("earley", "basic"), ("earley", "dynamic")):
    tree = Lark(ONE_TERMINAL, parser=parser, lexer=lexer).parse(TEXT)
    print(f"Lark, {parser} with the {lexer} lexer: {TEXT!r} parses, TEXT is {str(tree.children[0])!r}")
whole, split = taken(ONE_TERMINAL), taken(SPLIT)
print(f"llguidance, the same grammar: takes {whole[0]} of {len(TEXT)} bytes, and may end there: {whole[1]}")
print(f"llguidance, the terminal split in two: takes {split[0]} of {len(TEXT)} bytes, and may end there: {split[1]}")
assert whole == (TEXT.index("</a>") + 1, False), "llguidance's lexer behaves otherwise now"
assert split == (len(TEXT), True), "the way around it behaves otherwise now"
PYTHON
