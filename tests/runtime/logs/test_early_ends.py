"""A deadline ends compilations of its own thread, in their middle."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax.runtime.logs import OutOfTime, early_ends, ending_at

DEVICE = ipu.IPUModel(1, tiles_per_ipu=4)


def _cycles() -> int:
    def function(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x) + 1

    return int(ipu.jit(function, device=DEVICE).profile(jnp.ones((8, 8))).cycles)


@pytest.mark.parametrize("checks", [0, 1, 5, 17])
def test_compilation_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch, checks: int) -> None:
    clock = count()
    monkeypatch.setattr(early_ends, "time", SimpleNamespace(monotonic=clock.__next__))
    with pytest.raises(OutOfTime), ending_at(checks - 1):
        _cycles()
    assert next(clock) == checks + 1


def test_compilation_within_the_time_is_as_without() -> None:
    with ending_at(time.monotonic() + 1000):
        cycles = _cycles()
    assert cycles == _cycles()


def test_earlier_deadline_counts() -> None:
    with pytest.raises(OutOfTime), ending_at(0), ending_at(time.monotonic() + 1000):
        _cycles()


def test_other_threads_have_no_deadline() -> None:
    with ThreadPoolExecutor(1) as executor, ending_at(0):
        assert executor.submit(_cycles).result() > 0
