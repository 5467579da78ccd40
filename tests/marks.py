"""Cases of a parametrisation that run each time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_unless(fast: bool, *values: Any) -> Any:
    """A case of one or more plain values, marked slow if it is not fast."""
    return pytest.param(*values, marks=() if fast else pytest.mark.slow, id="-".join(map(str, values)))


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, all but the quick ones marked slow; a tuple is a case of several values."""
    return [slow_unless(case in quick, *(case if isinstance(case, tuple) else (case,))) for case in cases]
