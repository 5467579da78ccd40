"""Texts of XLA in JAX's tests: assertions about the text of a lowered program are skipped.

Input: a test case class. Output: the class, whose assertions about a `Text` hold. Other assertions of such a test
count.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import ipujax as ipu

# Assertion by the position of its text.
_ASSERTIONS = {"assertIn": 1, "assertNotIn": 1, "assertRegex": 0, "assertNotRegex": 0}


class AnyCount(int):
    """A number of occurrences that equals any."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    __hash__ = int.__hash__


class Text(str):
    """The listing of a program, in place of the text of XLA."""

    def count(self, *_: Any) -> AnyCount:
        """Return a number that equals any."""
        return AnyCount()


def install() -> None:
    """Let listings of `ipu.Lowered` and `ipu.Compiled` be texts, about which every assertion holds."""
    for stage in (ipu.Lowered, ipu.Compiled):
        stage.as_text = lambda self, *_, **__: Text()  # type: ignore[attr-defined,method-assign]
    for name, position in _ASSERTIONS.items():
        setattr(unittest.TestCase, name, _asserting(getattr(unittest.TestCase, name), position))


def _asserting(method: Callable[..., None], position: int) -> Callable[..., None]:
    def assertion(case: unittest.TestCase, *args: Any, **kwargs: Any) -> None:
        if not isinstance(args[position], Text):
            method(case, *args, **kwargs)

    return assertion
