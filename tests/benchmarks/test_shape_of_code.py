"""`benchmarks/shape_of_code.py`: state and complexity, against a count by hand."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
import shape_of_code  # noqa: E402

sys.path.remove(BENCHMARKS)

CLASS = """
class C:
    shared = 1

    def __init__(self, other):
        self.a = self.b = 1
        self.b += 1
        other.c = self.d

    def __post_init__(self):
        self.e, (self.f, _) = 1, (2, 3)

    def later(self):
        self.g = 1
"""
DATACLASS = """
@dataclass{}
class D:
    a: int
    b: int = 1
"""
FUNCTION = """
def f(x):
    for y in x:
        if y and x:
            pass
        elif y:
            pass
    try:
        match x:
            case 1:
                pass
            case _:
                pass
    except (A, B):
        pass

    def g():
        return 1 if x else [y for y in x if y]

    return g
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CLASS, {"a", "b", "e", "f"}),
        (DATACLASS.format(""), {"a", "b"}),
        (DATACLASS.format("(slots=True)"), {"a", "b"}),
        (DATACLASS.format("(frozen=True)"), set()),
    ],
)
def test_attributes_that_a_constructor_sets(source: str, expected: set[str]) -> None:
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef) and shape_of_code.attributes(node) == expected


def test_complexity_counts_places_that_decide() -> None:
    (node,) = ast.parse(FUNCTION).body
    assert isinstance(node, ast.FunctionDef) and shape_of_code.complexity(node) == 7
