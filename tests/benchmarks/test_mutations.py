"""Mutations of a line, one place each; and the tests that mirror a file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "mutations.py"
SPEC = importlib.util.spec_from_file_location("mutations", PATH)
assert SPEC is not None and SPEC.loader is not None
MUTATIONS = importlib.util.module_from_spec(SPEC)
sys.modules["mutations"] = MUTATIONS  # its dataclass looks for its module there
SPEC.loader.exec_module(MUTATIONS)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["(a <= b)"]),
        ("é == a is b", ["(é != a is b)", "(é == a is not b)"]),
        ("f(7)", ["f(8)", "f(6)"]),
        ("n = 0", ["n = 1", "n = (-1)"]),
        ("2 * (a - b)", ["3 * (a - b)", "1 * (a - b)", "2 * ((a + b))"]),
        ("min(a)", ["max(a)"]),
        ("not a or b", ["(not a and b)", "a or b"]),
        ("a[b:c]", ["a[b + 1:c]", "a[b:c - 1]"]),
        ("x: C[3] = f'{1}'", []),
        ("True, 'text'", []),
    ],
)
def test_each_place_is_mutated(source: str, expected: list[str]) -> None:
    actual = MUTATIONS.mutations(Path("a.py"), source)
    assert sorted(mutation.applied(source) for mutation in actual) == sorted(expected)


def test_all_mutations_of_the_product_are_python() -> None:
    path = Path("runtime/page/source_listing.py")
    source = (MUTATIONS.ROOT / path).read_text(encoding="utf-8")
    actual = list(MUTATIONS.mutations(path, source))
    assert len({mutation.applied(source) for mutation in actual}) == len(actual) >= 5
    for mutation in actual:
        compile(mutation.applied(source), path, "exec")
        assert mutation.diff(source).startswith(f"--- a/{path}\n+++ b/{path}\n@@ ")


def test_the_nearest_tests_come_first() -> None:
    page = MUTATIONS.tests_of(Path("runtime/page/source_listing.py"))
    assert {file.parent for file in page} == {Path("tests/runtime/page")}
    assert MUTATIONS.tests_of(Path("runtime/analysis/liveness.py"))[0] == Path(
        "tests/runtime/analysis/test_liveness.py"
    )
    # A room without tests of its name: those of the room around it.
    linear = MUTATIONS.tests_of(Path("lowering/rules/numerics/linear.py"))
    assert Path("tests/lowering/rules/test_ops.py") in linear


def test_files_of_a_room_are_among_all() -> None:
    assert set(MUTATIONS.product_files("runtime/page")) < set(MUTATIONS.product_files(None))
