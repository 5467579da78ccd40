"""Ctrl-C ends a compilation also where Python drops its exception, in callbacks of the garbage collector."""

from __future__ import annotations

import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu

DEVICE = ipu.IPUModel(1, tiles_per_ipu=4)


class _Garbage:
    """An object whose end may be watched."""


@pytest.fixture(autouse=True)
def handler_of_python() -> Iterator[None]:
    """Handle SIGINT as Python does: a shell that starts the tests in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Exceptions that Python drops."""
    exceptions: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: exceptions.append(unraisable.exc_type))
    return exceptions


def _interrupted(result: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """Return a function that is interrupted, while it is traced, inside of a callback of a weak reference."""

    def function(x: jax.Array) -> Any:
        garbage = _Garbage()
        watch = weakref.ref(garbage, lambda _: signal.raise_signal(signal.SIGINT))
        del garbage
        assert watch() is None
        return result(x)

    return function


def test_interrupt_in_a_callback_ends_the_compilation(lost: list[Any]) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        ipu.jit(_interrupted(lambda x: jnp.tanh(x @ x)), device=DEVICE).profile(jnp.ones((8, 8)))
    assert lost == [KeyboardInterrupt]
    assert signal.getsignal(signal.SIGINT) is handler


def test_interrupt_in_a_callback_ends_a_search(lost: list[Any]) -> None:
    step = _interrupted(lambda x: jnp.tanh(x @ x.T).sum())
    found = ipu.search(step, jax.ShapeDtypeStruct((8, 8), jnp.float32), device=DEVICE, batch_argnums=0)
    assert lost == [KeyboardInterrupt]
    assert found.ended == "interrupt"


def test_handler_that_raises_nothing_has_the_signal_alone() -> None:
    numbers: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: numbers.append(number))
    try:
        assert ipu.jit(_interrupted(jnp.sin), device=DEVICE).profile(jnp.ones((8, 8))).cycles > 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert numbers == [signal.SIGINT]
