"""JAX's tests in a checkout made here: passes, failures, skips and exclusions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "jax_tests.py"

TESTS = """
import functools
import os
import re
import unittest

import jax
import jax.numpy as jnp
from jax import jit


class JitTest(unittest.TestCase):
    def test_passes(self):
        for make in (jax.jit, jit, functools.partial(jax.jit, donate_argnums=0)):
            self.assertEqual(repr(make(jnp.sin)), "ipu.jit(sin)")
        self.assertIn("PjitFunction", repr(jax.jit(jnp.sin, backend="cpu")))
        self.assertEqual(repr(jax.jit(jnp.sin, keep_unused=True, inline=True, backend=None)), "ipu.jit(sin)")
        self.assertEqual(jit(lambda x: x + 1)(1), 2)
        with self.assertRaisesRegex(TypeError, re.compile("branches.*STRUCTURE", re.DOTALL | re.IGNORECASE)):
            raise TypeError("branches\\nof another structure")

    def test_fails(self):
        self.assertEqual(jit(lambda x: x + 1)(1), 3)

    def test_kills(self):
        os._exit(3)

    def test_skips(self):
        self.skipTest("on a Tuesday")

    def test_jit_repr(self):
        self.assertIn("PjitFunction", repr(jit(jnp.sin)))

    def test_words(self):
        with self.assertRaisesRegex(TypeError, "Error interpreting argument"):
            jit(lambda x: x)("no array")

    def test_words_of_another_class(self):
        self.assertRaisesRegex(ZeroDivisionError, "Error interpreting argument", jit(lambda x: x), "no array")
"""


def test_outcomes(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "api_test.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--only", "api_test"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[1].split() == ["api_test", "1", "3", "1", "2"]
    failed, excluded = done.stdout.partition("failed: 3")[2].split("excluded: 2")
    assert "!= 3" in failed and "the process died, code 3" in failed
    assert "JitTest.test_words_of_another_class" in failed
    assert "internals: repr" in excluded and "JitTest.test_words\n    wording: " in excluded
    assert "by argument: {'backend': 1}" in excluded
