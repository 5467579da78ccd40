"""Random programs: value and gradient by `ipu.jit` and by the tile interpreter, against plain JAX.

Fixed seeds: a failure comes again. `-m slow` runs 2,000 programs in 20 parts, each with a seed of its own; in half of
them every callee that is called twice is a function, however little it does.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

import ipujax as ipu
from tests.lowering.helpers import assert_same, lowered, quick_jit, run_tiles, share_all, small_target
from tests.lowering.random_programs import Program, programs

DEVICE = ipu.IPUModel(tiles_per_ipu=64)
TOLERANCE = 2e-4  # chains of up to 40 roundings, each of which later steps may magnify a little
EVERY = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


def with_bytes(tree: Any) -> list[Any]:
    """The leaves but those of float0."""
    return [x for x in jax.tree.leaves(tree) if x.dtype != jax.dtypes.float0]


def compare(program: Program, *, on_tiles: bool) -> None:
    """Asserts that a program gives what plain JAX gives, its gradient too where it has one."""
    arguments = program.arguments()

    def fun(*args: Any) -> Any:
        return program(*args), program.gradient(*args) if program.differentiable else ()

    expected = with_bytes(quick_jit(fun)(*arguments))
    ready = ipu.jit(fun, device=DEVICE).lower(*arguments)
    ready.compile()  # verified, and fits its tiles
    got = with_bytes(quick_jit(ready.evaluate)(*arguments))
    assert_same(got, expected, TOLERANCE, TOLERANCE, "engine, 64 tiles")
    if on_tiles:
        few = lowered(lambda *args: with_bytes(fun(*args)), arguments, small_target(7))
        assert_same(run_tiles(few, arguments), expected, TOLERANCE, TOLERANCE, "interpreter, 7 tiles")


@seed(1)
@settings(EVERY, max_examples=6)
@given(programs(4, 9))
def test_engine(program: Program) -> None:
    compare(program, on_tiles=False)


@seed(2)
@settings(EVERY, max_examples=2)
@given(programs(4, 7))
def test_interpreter(program: Program) -> None:
    compare(program, on_tiles=True)


# A part is a process' worth: what XLA keeps of each program adds up.
@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_engine_on_many(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if part % 2:
        share_all(monkeypatch)
    run_part(part, programs(), 100, on_tiles=False)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_interpreter_on_many(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if part % 2:
        share_all(monkeypatch)
    run_part(part, programs(4, 7), 100, on_tiles=True)


def run_part(part: int, strategy: st.SearchStrategy[Program], number: int, *, on_tiles: bool) -> None:
    """Compares `number` programs of a seed of their own."""

    @seed(100 + part)
    @settings(EVERY, max_examples=number)
    @given(strategy)
    def run(program: Program) -> None:
        compare(program, on_tiles=on_tiles)

    run()
    jax.clear_caches()
