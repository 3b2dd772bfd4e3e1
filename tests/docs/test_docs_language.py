"""The rules of language and of shape in CONTRIBUTING.md, as far as a program can hold them."""

import ast
import gc
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple

import pytest

from tests.docs.fences import ROOT

OPENINGS = {"Of", "By", "As", "Where", "Who", "Else", "Amid"}
FIRST_LINE = 100
"""Characters that the first line of a docstring may have."""
FILE_LINES = 400
TESTS = "tests"


class Source(NamedTuple):
    path: str
    text: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        return self.path.split("/")[0]


@cache
def listed_paths() -> tuple[str, ...]:
    """Return every Python file in a folder of the repository, the new ones that git does not ignore included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*/*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(path for path in listed.stdout.splitlines() if (ROOT / path).exists())


@cache
def sources() -> tuple[Source, ...]:
    """Return all files, parsed. Only tests ask: each process that collects them would parse for seconds."""
    texts = {path: (ROOT / path).read_text() for path in listed_paths()}
    gc.disable()  # it would look at all trees again and again, for 5 s of CPU instead of 1
    try:
        return tuple(Source(path, text, ast.parse(text)) for path, text in texts.items())
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _trees_end_with_the_file() -> Iterator[None]:
    """Forget the trees, millions of objects, which the garbage collector would look at in all later tests."""
    yield
    sources.cache_clear()


def classes() -> Iterator[tuple[Source, ast.ClassDef]]:
    """Yield the classes of production code, with their files."""
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and source.folder != TESTS:
                yield source, node


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings: of modules, classes and functions, and below constants and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def openings(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the docstrings that begin in the middle of a sentence."""
    for line, text in strings(source.tree):
        if text.split(maxsplit=1)[0].strip(",.:;") in OPENINGS:
            yield line, text


def sentences(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the docstrings whose first line is no sentence of its own, or is long."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(source.tree):
        if not isinstance(node, documented) or not (text := ast.get_docstring(node)):
            continue
        first, *rest = text.splitlines()
        if not first.endswith((".", "?", ":")) or len(first) > FIRST_LINE or (rest and rest[0]):
            yield node.body[0].lineno, first


def splats(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the constructions of our frozen types that take a tuple apart instead of naming the fields."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).split(".")[-1] not in frozen_types():
            continue
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            yield node.lineno, ast.unparse(node)


def long_files(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the file if it is too long. A kernel and its cases may be longer."""
    if source.folder != "kernels" and (num_lines := len(source.text.splitlines())) > FILE_LINES:
        yield num_lines, f"more than {FILE_LINES} lines"


@cache
def frozen_types() -> set[str]:
    """Return the names of our frozen dataclasses, frozen structs and named tuples."""
    return {node.name for _, node in classes() if _is_frozen(node)}


def _is_frozen(node: ast.ClassDef) -> bool:
    decorators = [decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
    words = [*node.keywords, *(word for decorator in decorators for word in decorator.keywords)]
    return any(word.arg == "frozen" for word in words) or any(ast.unparse(base) == "NamedTuple" for base in node.bases)


RULES: dict[str, Callable[[Source], Iterable[tuple[int, str]]]] = {
    "opening": openings,
    "sentence": sentences,
    "splat": splats,
    "length": long_files,
}
PRODUCTION = sorted({path.split("/")[0] for path in listed_paths()} - {TESTS})
EVERY = [(folder, rule) for folder in PRODUCTION for rule in RULES] + [(TESTS, "opening")]


@pytest.mark.parametrize(("folder", "rule"), EVERY)
def test_a_folder_meets_a_rule(folder: str, rule: str) -> None:
    found = [
        f"{source.path}:{line}: {text[:FIRST_LINE]}"
        for source in sources()
        if source.folder == folder
        for line, text in RULES[rule](source)
    ]
    assert found == [], "\n".join([f"{len(found)} faults", *found])


def test_the_name_of_a_class_is_unique() -> None:
    places = defaultdict(list)
    for source, node in classes():
        places[node.name].append(source.path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("opening", '"""Of the chosen implementation."""'),
        ("opening", 'class A:\n    x: int\n    """Who is asked, and how."""'),
        ("sentence", '"""A first line\nthat goes on."""'),
        ("sentence", '"""A first line without an end"""'),
        ("sentence", f'"""{"A" * FIRST_LINE}."""'),
        ("splat", "request.Job(*head, timeout_s=1.0)"),
        ("length", "pass\n" * (FILE_LINES + 1)),
    ],
)
def test_a_rule_finds_its_fault(rule: str, text: str) -> None:
    assert list(RULES[rule](Source("bench/example.py", text, ast.parse(text))))
