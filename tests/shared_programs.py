"""Compilation anew, as in another process, for tests that compile one function several times."""

from __future__ import annotations

import sys


def forget_shared_programs() -> None:
    """Drop programs of functions that no function of `ipu.jit` holds; imports nothing."""
    module = sys.modules.get("ipujax.functions.function_calls")
    if module is not None:
        module.SHARED_CALLS.clear()
