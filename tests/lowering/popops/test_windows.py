"""Sliding windows against plain JAX: pooling with halos, padding and dilation, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.popops.indexing.windows import Windows
from tests.lowering.helpers import check, lowered, small_target

RNG = np.random.default_rng(1)
IMAGE = RNG.normal(size=(2, 7, 5, 2)).astype(np.float32)

GEOMETRY: dict[str, dict[str, Any]] = {
    "pool": {"window_dimensions": (1, 2, 2, 1), "window_strides": (1, 2, 2, 1), "padding": "VALID"},
    "overlap": {"window_dimensions": (1, 3, 3, 1), "window_strides": (1, 2, 1, 1), "padding": "SAME"},
    "uneven": {
        "window_dimensions": (1, 3, 2, 1),
        "window_strides": (1, 3, 2, 1),
        "padding": ((0, 0), (2, 1), (1, 3), (0, 0)),
    },
    "dilated": {
        "window_dimensions": (1, 2, 3, 1),
        "window_strides": (1, 1, 2, 1),
        "padding": ((0, 0), (1, 2), (0, 4), (0, 0)),
        "base_dilation": (1, 3, 2, 1),
        "window_dilation": (1, 2, 3, 1),
    },
    "channels": {"window_dimensions": (2, 1, 1, 2), "window_strides": (1, 1, 1, 1), "padding": "SAME"},
    "cropped": {
        "window_dimensions": (1, 2, 1, 1),
        "window_strides": (1, 1, 2, 1),
        "padding": ((0, 0), (-1, -2), (-1, 0), (0, 0)),
    },
    "all": {"window_dimensions": (1, 7, 5, 1), "window_strides": (1, 1, 1, 1), "padding": "VALID"},
}
OPS: dict[str, tuple[Callable[..., Any], float]] = {
    "max": (lax.max, -np.inf),
    "min": (lax.min, np.inf),
    "sum": (lax.add, 0.0),
}


def pool(op: str, geometry: str) -> Callable[[Any], Any]:
    reducer, start = OPS[op]
    return lambda x: lax.reduce_window(x, np.asarray(start, x.dtype), reducer, **GEOMETRY[geometry])


@pytest.mark.parametrize(("op", "geometry"), [*product(OPS, GEOMETRY)])
def test_reduce_window(op: str, geometry: str) -> None:
    tolerance = 1e-6 if op == "sum" else 0.0
    check(pool(op, geometry), IMAGE, tiles=(7,), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("geometry", ["pool", "overlap", "uneven", "channels", "all"])
def test_gradient_of_max(geometry: str) -> None:
    check(jax.grad(lambda x: (pool("max", geometry)(x) ** 2).sum()), IMAGE, tiles=(7,), rtol=1e-5, atol=1e-6)


EDGES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "gaps": ((1, 2, 1, 1), (1, 3, 2, 1), "VALID"),
    "rest": ((1, 2, 3, 1), (1, 3, 4, 1), "VALID"),
    "wide": ((1, 5, 4, 1), (1, 2, 3, 1), ((0, 0), (4, 3), (3, 3), (0, 0))),
    "all-dimensions": ((2, 3, 2, 2), (1, 2, 1, 1), "SAME"),
    "steep": ((1, 7, 1, 1), (1, 1, 1, 1), ((0, 0), (6, 6), (0, 0), (0, 0))),
    "much-padding": ((1, 3, 2, 1), (1, 3, 2, 1), ((0, 0), (2, 2), (1, 1), (0, 0))),
}


@pytest.mark.parametrize("edges", EDGES)
def test_gradient_of_max_with_cut_field(edges: str) -> None:
    """Blocks read the windows that cover them, halos included, for any strides and padding."""
    window, strides, padding = EDGES[edges]
    image = RNG.permutation(1 * 13 * 9 * 2).reshape(1, 13, 9, 2).astype(np.float32)

    def fun(x: Any, g: Any) -> Any:
        return jax.vjp(lambda x: lax.reduce_window(x, -np.inf, lax.max, window, strides, padding), x)[1](g)

    shape = jax.eval_shape(lambda x: lax.reduce_window(x, -np.inf, lax.max, window, strides, padding), image).shape
    cotangent = RNG.integers(-4, 5, shape).astype(np.float32)  # sums are exact in any order
    program = lowered(fun, (image, cotangent), small_target(16))
    (group,) = [g for groups in program.graph.groups.values() for g in groups]
    assert group.axes[1].blocks * group.axes[2].blocks > 2, "height and width are cut"
    check(fun, image, cotangent, tiles=(1, 7, 16))


def test_gradient_with_ties_and_of_min() -> None:
    flat = np.round(IMAGE)
    for op in ("max", "min"):  # `<=` selects for a minimum
        check(jax.grad(lambda x, op=op: (pool(op, "overlap")(x) * IMAGE[:, :4]).sum()), flat, tiles=(7,), rtol=1e-5)


def test_tangent_of_max() -> None:
    check(lambda x, t: jax.jvp(pool("max", "overlap"), (x,), (t,)), IMAGE, IMAGE[::-1].copy(), tiles=(1, 7))


def test_average_pooling_and_its_gradient() -> None:
    check(jax.grad(lambda x: (pool("sum", "overlap")(x) ** 2).sum()), IMAGE, tiles=(16,), rtol=1e-5, atol=1e-5)


def test_nan_and_integers() -> None:
    image = IMAGE.copy()
    image[0, 3, 2] = np.nan
    check(pool("max", "overlap"), image, tiles=(7,))
    check(
        lambda x: lax.reduce_window(x, 0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"),
        IMAGE.astype(np.int32),
        tiles=(4,),
    )


def test_no_windows() -> None:
    check(pool("max", "all"), IMAGE[:, :5], tiles=(4,))


def test_spreads_windows_over_tiles() -> None:
    image = np.zeros((4, 32, 32, 8), np.float32)
    program = lowered(pool("max", "pool"), (image,), small_target(64))
    (group,) = [g for groups in program.graph.groups.values() for g in groups]
    assert np.unique(group.tile).size == 64
    assert not program.graph.notes.fallbacks


@pytest.mark.parametrize("geometry", GEOMETRY)
def test_result_shape(geometry: str) -> None:
    params = GEOMETRY[geometry]
    undilated: Sequence[int] = (1, 1, 1, 1)
    padding = params["padding"]
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(IMAGE.shape, params["window_dimensions"], params["window_strides"], padding)
    windows = Windows(
        params["window_dimensions"],
        params["window_strides"],
        tuple(padding),
        params.get("base_dilation", undilated),
        params.get("window_dilation", undilated),
    )
    assert windows.result_shape(IMAGE.shape) == jax.eval_shape(pool("max", geometry), IMAGE).shape


NUMBER = jnp.float32(3)
CLOSURES: dict[str, Callable[[Any, Any], Any]] = {
    "a window's function": lambda x, f: lax.reduce_window(x, np.float32(0), lambda a, b: f(a) + b, (2,), (1,), "VALID"),
    "an update's function": lambda x, f: x.at[np.array([1, 2])].apply(f),
    "a reduction's function": lambda x, f: lax.reduce(x, np.float32(0), lambda a, b: f(a) + b, (0,)),
}


@pytest.mark.parametrize("name", CLOSURES)
@pytest.mark.parametrize("run", [jax.jit, ipu.jit])
def test_jax_refuses_functions_that_close_over_arrays(run: Any, name: str) -> None:
    """No rule need handle constants of such a function, traced arrays or others."""
    fun = CLOSURES[name]
    x = IMAGE[0, 0, :, 0]
    with pytest.raises(NotImplementedError, match="can't close over Tracers"):
        run(lambda x, y: fun(x, lambda a: a * y))(x, x[0])
    errors = (TypeError, AssertionError)  # JAX traces a reduction, but then cannot compile it
    with pytest.raises(errors, match=r"not hashable|Array\(3"):
        run(lambda x: fun(x, lambda a: a * NUMBER))(x)


def with_grouped_channels(x: Any) -> Any:
    """Images of 32 channels, stored in groups of 16, the memory order of a product."""
    return jnp.einsum("nhwc,cd->nhwd", x, jnp.eye(2, 32, dtype=x.dtype))


@pytest.mark.parametrize("geometry", ["overlap", "channels"])
def test_reduce_window_of_grouped_channels(geometry: str) -> None:
    check(lambda x: pool("max", geometry)(with_grouped_channels(x)), IMAGE, tiles=(7,))
    check(
        jax.grad(lambda x: (pool("max", geometry)(with_grouped_channels(x)) ** 2).sum()),
        IMAGE,
        tiles=(7,),
        rtol=1e-5,
        atol=1e-5,
    )


def test_pooling_keeps_channels_in_groups() -> None:
    def pooled(x: Any) -> Any:
        small, vjp = jax.vjp(pool("max", "overlap"), with_grouped_channels(x))
        return small, *vjp(small)

    graph = lowered(pooled, (np.zeros((2, 8, 6, 2), np.float32),), small_target(16)).graph
    images = [
        variable
        for variable in graph.mappings
        if variable.dtype == np.float32 and variable.size in (2 * 8 * 6 * 32, 2 * 4 * 6 * 32)
    ]
    assert len(images) >= 3 and all(variable.shape[-1] == 16 for variable in images), images
