"""Stand-ins for modules of JAX's tests that JAX's wheel is without.

Hypothesis tests few examples, always the same ones; tests of Pallas run where they interpret kernels, which is what
CPUs can do.
"""

from __future__ import annotations

import importlib
import sys
import types
import unittest
from typing import Any

import hypothesis
from jax.experimental import pallas

_EXAMPLES = 5


class InterpretedTests(unittest.TestCase):
    """Part of the base class of the tests of Pallas, whose subclasses for CPUs set `INTERPRET`."""

    INTERPRET = False

    def setUp(self) -> None:
        if not self.INTERPRET:
            self.skipTest("a CPU runs kernels in interpret mode only")
        super().setUp()

    def pallas_call(self, *args: Any, **kwargs: Any) -> Any:
        """Call a kernel as the class does."""
        return pallas.pallas_call(*args, **kwargs, interpret=self.INTERPRET)


def _setup_hypothesis(*_: Any, **__: Any) -> None:
    hypothesis.settings.register_profile(
        "few",
        max_examples=_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("few")


def install() -> None:
    """Add the modules that are missing to those that can be imported."""
    test_case = importlib.import_module("jax._src.test_util").JaxTestCase
    pallas_test = type("PallasTest", (InterpretedTests, test_case), {})
    for name, contents in (
        ("jax._src.hypothesis_test_util", {"setup_hypothesis": _setup_hypothesis, "hypothesis_is_thread_safe": bool}),
        ("jax._src.pallas.pallas_test_util", {"PallasTest": pallas_test, "use_mosaic_gpu": False}),
    ):
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules.setdefault(name, module)
        package, _, short_name = name.rpartition(".")
        setattr(sys.modules[package], short_name, sys.modules[name])
