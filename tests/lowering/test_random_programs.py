"""Random programs: value and gradient by `ipu.jit` and by the tile interpreter, against plain JAX.

Fixed seeds: a failure comes again. `-m slow` runs 2,000 programs in 20 parts, each with a seed of its own, a quarter of
them by the engine, a quarter split as the machine splits, half by the tile interpreter. In half of the parts every
callee that is called twice is a function, however little it does; in half of the engine's XLA optimises as for users,
and computes fused values more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, reject, seed, settings, strategies as st

import ipujax as ipu
from tests.lowering.helpers import assert_same, lowered, quick_jit, run_tiles, share_all, small_target
from tests.lowering.random_programs import Program, programs

DEVICE = ipu.IPUModel(tiles_per_ipu=64)
TOLERANCE = 2e-4  # chains of up to 40 roundings, each of which later steps may magnify a little
EVERY = settings(
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


def with_bytes(tree: Any) -> list[Any]:
    """Leaves but those of float0."""
    return [x for x in jax.tree.leaves(tree) if x.dtype != jax.dtypes.float0]


def by_jax(fun: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a function of plain JAX gives; rejects programs that JAX refuses, as it does gradients of some refs."""
    try:
        return fun(*args)
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError):
        reject()


def compare(program: Program, *, on_tiles: int = 0, exact_splits: bool = False, jit: Any = quick_jit) -> None:
    """Asserts that a program, and its gradient, equal plain JAX: on the engine, or on tiles of the interpreter."""
    arguments = program.arguments()

    def fun(*args: Any) -> Any:
        return program(*args), program.gradient(*args) if program.differentiable else ()

    expected = with_bytes(by_jax(jit(fun), arguments))
    if on_tiles:
        program_on_tiles = lowered(lambda *args: with_bytes(fun(*args)), arguments, small_target(on_tiles))
        assert_same(
            run_tiles(program_on_tiles, arguments), expected, TOLERANCE, TOLERANCE, f"interpreter, {on_tiles} tiles"
        )
        return
    ready = ipu.jit(fun, device=DEVICE, options=ipu.Options(exact_splits=exact_splits)).lower(*arguments)
    ready.compile()  # verified, and fits its tiles
    got = with_bytes(jit(ready.evaluate)(*arguments))
    assert_same(got, expected, TOLERANCE, TOLERANCE, "engine, 64 tiles")


@seed(1)
@settings(EVERY, max_examples=6)
@given(programs(4, 9))
def test_engine(program: Program) -> None:
    compare(program)


@seed(2)
@settings(EVERY, max_examples=2)
@given(programs(4, 7))
def test_interpreter(program: Program) -> None:
    compare(program, on_tiles=7)


# A part has as many programs as a process can hold: XLA's memory of each adds up.
@pytest.mark.parametrize("exact_splits", [False, True])
@pytest.mark.parametrize("part", range(5))
def test_engine_on_many(part: int, exact_splits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if part % 2:
        share_all(monkeypatch)
    jit = jax.jit if part % 4 < 2 else quick_jit
    run_part(part + 5 * exact_splits, programs(), 100, exact_splits=exact_splits, jit=jit)


@pytest.mark.parametrize("part", range(10))
def test_interpreter_on_many(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if part % 2:
        share_all(monkeypatch)
    run_part(part, programs(4, 9), 100, on_tiles=16)


def run_part(part: int, strategy: st.SearchStrategy[Program], number: int, **comparison: Any) -> None:
    """Compares `number` programs of the part's seed."""

    @seed(100 + part)
    @settings(EVERY, max_examples=number)
    @given(strategy)
    def run(program: Program) -> None:
        compare(program, **comparison)

    run()
    jax.clear_caches()
