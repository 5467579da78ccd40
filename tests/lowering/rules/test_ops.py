"""Op table against plain JAX: every rule forward and backward, by the engine, split literally, and tile by tile.

The rows of a family are compiled together and divided among targets of several sizes, which takes a tenth of the
time; most gradients only run with `-m slow`, which also compiles each row alone, for every size and with the
optimisations of XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipujax.lowering.gcl.collective_params import COLLECTIVES
from ipujax.lowering.jax_compat import ClosedJaxpr, jaxprs_in_params
from ipujax.lowering.rules import RULES
from ipujax.lowering.rules.base import fallback
from ipujax.lowering.rules.flow import streaming
from tests.lowering.helpers import TILES, assert_same, lowered, passed, quick_jit, run_engine, run_tiles, small_target
from tests.lowering.rules.op_case import OpCase
from tests.lowering.rules.op_table import CASES, FAMILIES

GRADIENT_TILES = (4, 7)
BY_NAME = {case.id: case for case in CASES}
# Tile-level functions name tiles, so their targets have several.
SIZES = {family: TILES[1:] if family == "tiles" else TILES for family in FAMILIES}


def primitives(jaxpr: ClosedJaxpr) -> set[str]:
    """Names of all primitives of a jaxpr, those in loops and branches too."""
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    inner = chain.from_iterable(jaxprs_in_params(eqn.params) for eqn in jaxpr.eqns)
    return names.union(*map(primitives, inner))


def inlined(case: OpCase) -> ClosedJaxpr:
    """Jaxpr of a row after all passes."""
    return passed(case.fun, *case.arguments())


def together(functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """One function of all arguments, a tuple for each of `functions`, with all results."""
    return lambda *arguments: [fun(*args) for fun, args in zip(functions, arguments, strict=True)]


def compare(
    cases: Sequence[OpCase],
    functions: Sequence[Callable[..., Any]],
    tiles: int,
    tolerances: Sequence[tuple[float, float]],
    split_tolerances: Sequence[tuple[float, float]],
    jit: Callable[..., Any],
) -> None:
    """Asserts that all executions of all functions equal plain JAX, row by row."""
    arguments = [case.arguments() for case in cases]
    fun = together(functions)
    expected = jit(fun)(*arguments)
    program = lowered(fun, arguments, small_target(tiles))
    assert not program.graph.notes.fallbacks, set(program.graph.notes.fallbacks.values())
    runs = {
        "engine": (run_engine(program, arguments, jit=jit), tolerances),
        "literal engine": (run_engine(program, arguments, exact_splits=True, jit=jit), split_tolerances),
        "interpreter": (run_tiles(program, arguments, tiles), split_tolerances),
    }
    for execution, (results, allowed) in runs.items():
        results = iter(results)
        for case, rows, (rtol, atol) in zip(cases, expected, allowed, strict=True):
            leaves = jax.tree.leaves(rows)
            actual = [next(results) for _ in leaves]
            assert_same(actual, leaves, rtol, atol, f"{case.id}: {execution}, {tiles} tiles")


def forward(cases: Sequence[OpCase], tiles: int, jit: Callable[..., Any] = quick_jit) -> None:
    """Compares the results of rows."""
    exact = [(case.rtol, case.atol) for case in cases]
    split = [(case.split_rtol or case.rtol, case.split_atol or case.atol) for case in cases]
    compare(cases, [case.fun for case in cases], tiles, exact, split, jit)


def gradient(cases: Sequence[OpCase], tiles: int, jit: Callable[..., Any] = quick_jit) -> None:
    """Compares the gradients of rows."""
    allowed = [(case.grad_rtol, case.grad_rtol) for case in cases]
    compare(cases, [gradient_of(case) for case in cases], tiles, allowed, allowed, jit)


def gradient_of(case: OpCase) -> Callable[..., Any]:
    """Gradient of a weighted sum of a row's results with respect to its floating-point arguments."""

    def weighted(*args: Any) -> jax.Array:
        leaves = [y for y in jax.tree.leaves(case.fun(*args)) if jnp.issubdtype(y.dtype, jnp.floating)]
        ramps = [np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape) for y in leaves]
        return sum((jnp.sum(y * ramp) for y, ramp in zip(leaves, ramps, strict=True)), jnp.float32(0))

    floats = [n for n, x in enumerate(case.arguments()) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jax.grad(weighted, floats)


def share(cases: Sequence[OpCase], number: int, of: int) -> Sequence[OpCase]:
    """A share of the rows: each row runs on one size of target, each size runs rows of every kind."""
    return cases[number::of]


def test_every_rule_has_a_row_and_every_row_a_rule() -> None:
    # Tables of their own, and code on one tile in `tests/ipujax/test_opaque_calls.py`.
    tested_elsewhere = {*COLLECTIVES, *streaming.RULES, *fallback.RULES, "call_once"}
    assert {case.primitive for case in CASES} | tested_elsewhere == set(RULES)


def test_rows_have_names_of_their_own() -> None:
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_trace_to_their_primitive(family: str) -> None:
    for case in FAMILIES[family]:
        assert case.primitive in primitives(inlined(case)), case.id


@pytest.mark.parametrize(("family", "tiles"), [(family, tiles) for family, sizes in SIZES.items() for tiles in sizes])
def test_forward(family: str, tiles: int) -> None:
    sizes = SIZES[family]
    forward(share(FAMILIES[family], sizes.index(tiles), len(sizes)), tiles)


@pytest.mark.parametrize(("family", "tiles"), [*product(FAMILIES, GRADIENT_TILES)])
def test_gradient(family: str, tiles: int) -> None:
    cases = [case for case in FAMILIES[family] if case.grad]
    gradient(share(cases, GRADIENT_TILES.index(tiles), len(GRADIENT_TILES)), tiles)


@pytest.mark.parametrize("name", BY_NAME)
def test_row_alone(name: str) -> None:
    case = BY_NAME[name]
    (family,) = (family for family, cases in FAMILIES.items() if case in cases)
    for tiles in SIZES[family]:
        forward([case], tiles, jax.jit)
        if case.grad and tiles in GRADIENT_TILES:
            gradient([case], tiles, jax.jit)
