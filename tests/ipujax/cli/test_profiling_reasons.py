"""Reasons in the table of `ipujax profile` are sentences that name the step and the line, whatever was raised."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax.jax_scripts import compiling

DEVICE = ipu.IPUModel(tiles_per_ipu=4)
X = jnp.ones((8, 8))


def _raise(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def square(x: Any) -> Any:
    return x @ x


def doubled(x: Any) -> Any:
    return jax.lax.while_loop(lambda x: x.sum() < 900, lambda x: 2 * x, x)


# Where it fails, the function, what is raised, and the reason.
FAILURES: dict[str, tuple[Any, str, Any, Exception, str]] = {
    "plan": (
        compiling.LoweringPlan,
        "of",
        square,
        KeyError("x"),
        r"its lowering failed at .*:\d+ .* with KeyError \('x'\)",
    ),
    "check": (
        compiling,
        "check_jaxpr",
        square,
        ValueError("one\ntwo"),
        r"its lowering failed at .* with ValueError \(one\)",
    ),
    "no text": (compiling, "find_or_lower", square, IndexError(), r"its lowering failed at .* with IndexError$"),
    "profile": (compiling, "_cycles_of", doubled, KeyError(3), r"its profile failed at .* with KeyError \(3\)"),
    "run": (
        compiling,
        "profiles_of_calls",
        doubled,
        KeyError("x"),
        r"its run on arguments of the script's calls failed at .* with KeyError",
    ),
    "typed": (compiling, "check_jaxpr", square, ipu.ArgumentError("it is no program\nat all"), "^it is no program$"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_reasons_are_sentences(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    owner, attribute, fun, error, reason = FAILURES[name]
    with ipu.profiling(DEVICE, every=True) as run:
        jax.jit(fun)(X)
        jax.jit(jnp.sin)(X)
    monkeypatch.setattr(owner, attribute, _raise(error))
    rows = {row.name: row for row in run.functions}
    failed = rows[fun.__name__]
    assert (failed.profile is None) == (name != "run")  # without a run it has all but its trip counts
    assert re.search(reason, failed.reason or failed.unrecorded), failed
    assert (failed.reason or failed.unrecorded) in str(run)
    assert isinstance(error, ipu.IpuError) or "failed for" in caplog.text
