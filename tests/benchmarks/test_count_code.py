"""Lines of a module by kind, against a count by hand."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "count_code.py"

SOURCE = '''"""A docstring

of three lines."""

import os
from a import (
    b,
)

# a comment


class C:
    """Docstring."""

    text = """a string
    # no comment
    """  # trailing

    def f(self):
        "docstring"
        import d
        return [
            1,  # still code
            # a comment
        ]


if os:
    "no docstring"
'''


def test_lines_are_counted_by_kind() -> None:
    spec = importlib.util.spec_from_file_location("count_code", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    expected = {"docstring": 5, "import": 5, "comment": 2, "code": 10}
    counted = module.count(SOURCE)
    assert counted == Counter({**expected, "blank": len(SOURCE.splitlines()) - sum(expected.values())})
