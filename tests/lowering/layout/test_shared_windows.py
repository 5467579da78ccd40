"""Windows that a vertex reads once for several operands: their views, and the bytes and loads they save."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.layout import shared_windows
from ipujax.lowering.popops.vertices.kernel import Input, Kernel, Op, Step
from ipujax.lowering.popops.vertices.kernel_codelet import kernel_codelet
from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import Tensor, concat
from tests.lowering.helpers import check, lowered, small_target

RNG = np.random.default_rng(0)


def rolled(x: Tensor, shift: int, axis: int) -> Tensor:
    """Tensor view of `jnp.roll`."""
    start = -shift % x.shape[axis]
    return concat([x.slice(start, x.shape[axis], axis=axis), x.slice(0, start, axis=axis)], axis)


def variable(*shape: int) -> Tensor:
    return Graph(small_target(4)).add_variable(shape, np.float32, "u")


def test_slices_share_a_larger_slice() -> None:
    u = variable(66, 34)
    views = [u[1:-1, 1:-1], u[:-2, 1:-1], u[2:, 1:-1], u[1:-1, 2:]]
    (window,) = shared_windows(views, (16, 16))
    assert window.tensor.shape == (66, 33) and window.reach == (2, 1)
    assert window.begins == {0: (1, 0), 1: (0, 0), 2: (2, 0), 3: (1, 1)}


def test_rolls_share_an_array_that_continues_at_the_other_end() -> None:
    u = variable(64, 32)
    views = [u, rolled(u, 1, 0), rolled(u, -1, 0), rolled(rolled(u, 1, 0), -1, 1)]
    (window,) = shared_windows(views, (16, 16))
    assert window.tensor.shape == (66, 33) and window.reach == (2, 1)
    assert window.begins == {0: (1, 0), 1: (0, 0), 2: (2, 0), 3: (0, 1)}
    for number, begin in window.begins.items():
        part = window.tensor.slice(begin, [b + n for b, n in zip(begin, u.shape, strict=True)])
        assert part.node == views[number].node


def test_slices_of_edge_padding_share_an_array() -> None:
    u = variable(64, 32)
    rows = concat([u[:1], u, u[-1:]], 0)
    views = [rows[:-2], rows[1:-1], rows[2:]]
    (window,) = shared_windows(views, (16, 16))
    assert window.tensor.node == rows.node
    assert window.begins == {0: (0, 0), 1: (1, 0), 2: (2, 0)}


def test_shares_no_window_larger_than_its_parts() -> None:
    u = variable(64, 32)
    v = variable(64, 32)
    assert not shared_windows([u, v], (64, 32))
    assert not shared_windows([u[:32], u[32:]], (32, 32))  # halves: the gap between them is as large as one
    assert not shared_windows([u, None], (64, 32))
    assert not shared_windows([u[1:], u[:-1].reverse(1)], (16, 16))
    assert not shared_windows([rolled(u, 1, 0), rolled(u, -1, 0)], (1, 16))  # a block of one row, in a window of three


def padded(u: jax.Array) -> Any:
    """Blur inside of zeros, which are padding, and so computed."""
    p = jnp.pad(u, 1)
    return sum(p[i : i + u.shape[0], j : j + u.shape[1]] for i in range(3) for j in range(3)) / 9


def edged(u: jax.Array) -> Any:
    """Blur with the edge repeated."""
    p = jnp.pad(u, 1, mode="edge")
    return sum(p[i : i + u.shape[0], j : j + u.shape[1]] for i in range(3) for j in range(3)) / 9


def differences(u: jax.Array) -> Any:
    """Differences along one dimension with their sums, reduced in the same vertices, and a broadcast row."""
    d = (u[1:] - u[:-1]) * u[0]
    return d, d.sum(1), (u[1:] * u[:-1]).max(0)


def upwind(u: jax.Array) -> Any:
    """Halves and integers of one array read at several offsets, with a select."""
    forward = u - jnp.roll(u, 1, 1)
    backward = jnp.roll(u, -1, 1) - u
    return jnp.where(u > 0, forward, backward).astype(jnp.float16), jnp.roll(u, 2, 0).astype(jnp.int32) + u.astype(
        jnp.int32
    )


@pytest.mark.parametrize("fun", [padded, edged, differences, upwind])
@pytest.mark.parametrize("shape", [(24, 36), (7, 13)])
def test_programs_with_windows_match_jax(fun: Any, shape: tuple[int, ...]) -> None:
    check(fun, RNG.standard_normal(shape).astype(np.float32), tiles=(6,), rtol=1e-5, atol=1e-5)


def test_connects_one_window_for_all_rolls() -> None:
    """A blur of nine rolled operands reads one window, with a row and a column more on each side."""
    program = lowered(
        lambda u: lax.fori_loop(0, 2, lambda _, u: sum_of_rolls(u), u),
        (np.zeros((256, 512), np.float32),),
        small_target(64),
    )
    (group,) = (group for groups in program.graph.groups.values() for group in groups if "Map" in group.codelet.name)
    reads = [n for n, field in enumerate(group.codelet.fields) if field.is_read]
    assert len(reads) == 1
    assert group.accesses[0].tensor.shape == (258, 514)


def sum_of_rolls(u: jax.Array) -> Any:
    return sum(jnp.roll(u, (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1)) / 9


def test_loads_parts_that_begin_inside_a_vector_twice() -> None:
    """Of an array of floats, two to a vector, parts that begin at odd positions take one more load a vector."""
    add = Op("add", lax.add, np.dtype(np.float32))
    target = small_target(4)

    def cycles(column: int, *steps: tuple[int, int]) -> int:
        parts = [Input(np.dtype(np.float32), (0, 1), 0, (0, at), (0, 2)) for at in (0, column)]
        kernel = Kernel(2, tuple(parts), tuple(Step(add, step) for step in steps), (1 + len(steps),))
        blocks = [[np.asarray(8), np.asarray(n)] for n in (602, 600)]
        return int(kernel_codelet(kernel).cycles(blocks, target))

    twice = (0, 1), (2, 0)
    assert cycles(1, *twice) - cycles(2, *twice) == 8 * 600 // 2
    assert cycles(1, (0, 1)) > cycles(2, (0, 1)) == cycles(0, (0, 1))


def test_fits_a_blur_on_a_first_generation_ipu() -> None:
    """2,200 × 1,122 pixels of four floats: nine copies of a tile's block took 334 of its 256 KiB."""

    def blurred(u: jax.Array) -> Any:
        return lax.fori_loop(0, 4, lambda _, u: sum_of_rolls(u), u)

    step = ipu.jit(blurred, device=ipu.IPUModel(arch="mk1"), donate_argnums=0)
    profile = step.lower(jax.ShapeDtypeStruct((1122, 2200, 4), np.float32)).compile().profile
    assert profile.memory.max_tile_bytes < 128 * 1024
