"""Wording of the code in numbers, floor by floor: bounds on signs of prose that names nothing.

Counted are, of all docstrings, the word "what" and beginnings such as "Which"; of all names that are assigned, those
that are a pronoun or a bare participle; of assignments, those that pack unrelated values in a tuple; and comments.
They are thermometers: a rename that makes worse sense to please them is a fault.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.test_layering import ROOT

VAGUE_WORDS = """
    found made kept given taken held left said wanted tried shown known own here there one again whole what done seen
    asked told heard meant moved joined least most few some others more less ends facts things them such
"""
VAGUE_NAMES = frozenset(VAGUE_WORDS.split())
VAGUE_BEGINNING = re.compile(r"(What|Which|Where|How|When|Whose|Whether|The same|Likewise|As `)\b")
FLOORS = ("ipujax", "lowering", "runtime")
# Sign → bound, out of how many of which total. Signs of comments are a lower bound, all others upper bounds.
MAX_SIGNS = {
    "what": (2, 1000, "words"),
    "beginnings": (1, 100, "docstrings"),
    "vague names": (0.5, 100, "names"),
    "packed": (2, 100, "assignments"),
}
MIN_COMMENTS_PER_1000_LINES = {"ipujax": 25, "lowering": 25, "runtime": 25}
# Beside the floors: programs that users read, and tests, whose local names are not counted.
SIGNS_OF_FOLDERS = {
    "examples": MAX_SIGNS,
    "benchmarks": MAX_SIGNS,
    "tests": {sign: bound for sign, bound in MAX_SIGNS.items() if sign != "vague names"},
}


def files_of(floor: str) -> Iterator[Path]:
    for path in sorted((ROOT / floor).rglob("*.py")):
        if not any(part.is_symlink() for part in (path, *path.parents) if part != ROOT):
            yield path


def signs(text: str) -> Counter[str]:
    """Counts of signs and of their totals in one file."""
    tree = ast.parse(text)
    counts = Counter(lines=text.count("\n"))
    for node in ast.walk(tree):
        count_docstring(node, counts)
        count_names(node, counts)
        if isinstance(node, ast.Assign):
            counts["assignments"] += 1
            counts["packed"] += isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    counts["comments"] = sum(token.type == tokenize.COMMENT for token in tokens)
    return counts


def count_docstring(node: ast.AST, counts: Counter[str]) -> None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    docstring = ast.get_docstring(node)
    if docstring:
        counts["docstrings"] += 1
        counts["words"] += len(docstring.split())
        counts["what"] += len(re.findall(r"\bwhat\b", docstring, re.IGNORECASE))
        counts["beginnings"] += bool(VAGUE_BEGINNING.match(docstring))


def count_names(node: ast.AST, counts: Counter[str]) -> None:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            pass
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            pass
        case _:
            return
    counts["names"] += 1
    counts["vague names"] += name.strip("_").lower() in VAGUE_NAMES


def total(floor: str) -> Counter[str]:
    return sum((signs(path.read_text(encoding="utf-8")) for path in files_of(floor)), Counter())


def check_signs(counts: Counter[str], bounds: Mapping[str, tuple[float, int, str]]) -> None:
    for sign, (bound, per, of) in bounds.items():
        assert per * counts[sign] / counts[of] <= bound, f"{sign}: {counts[sign]} of {counts[of]} {of}"


@pytest.mark.parametrize("folder", SIGNS_OF_FOLDERS)
def test_examples_and_tests_name_things(folder: str) -> None:
    check_signs(total(folder), SIGNS_OF_FOLDERS[folder])


@pytest.mark.parametrize("floor", FLOORS)
def test_the_code_names_things(floor: str) -> None:
    counts = total(floor)
    check_signs(counts, MAX_SIGNS)
    comments = 1000 * counts["comments"] / counts["lines"]
    assert comments >= MIN_COMMENTS_PER_1000_LINES[floor], f"{comments:.0f} comments per 1,000 lines"


def test_counts_the_signs_of_a_file() -> None:
    text = '"""What is found."""\n\n\ndef kept(one, size):\n    """Return a size."""\n    low, high = 0, size  # both\n'
    counts = signs(text)
    expected = {"what": 1, "beginnings": 1, "docstrings": 2, "vague names": 2, "names": 5, "packed": 1, "comments": 1}
    assert {sign: counts[sign] for sign in expected} == expected
