"""Tests of JAX that ask for something else than what a function computes, each with the reason.

`jax_tests.py` reads the table. A pattern is one of `fnmatch`, of class and test.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_EXCLUSIONS: dict[str, dict[str, str]] = {}


def exclusion(file: str, name: str) -> str | None:
    """The reason why a test is excluded; None if it is not.

    Args:
        file: name of the test file, without `.py`.
        name: class and test, as in `JitTest.test_jit`.
    """
    return next((why for pattern, why in _EXCLUSIONS.get(file, {}).items() if fnmatchcase(name, pattern)), None)
