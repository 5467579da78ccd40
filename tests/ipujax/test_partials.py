"""`ipu.Options(partials=…)`: half partials reach every product of half precision, its numbers and its cost."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.lower import LoweredProgram
from tests.lowering.helpers import run_engine, run_tiles

DEVICE = ipu.IPUModel(tiles_per_ipu=16)
RNG = np.random.default_rng(7)


def half(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float16)


A = half(4, 400)
B = half(400, 4)
IMAGES = half(2, 8, 6, 6)
KERNELS = half(2, 8, 3, 3)
HALF = ipu.Options(partials="float16")


def lowered(fun: Callable[..., Any], *args: Any, options: ipu.Options | None = None, device: Any = DEVICE) -> Any:
    return ipu.jit(fun, device=device, options=options).lower(*args)


def dtypes_of(
    fun: Callable[..., Any], *args: Any, options: ipu.Options | None = None, device: Any = DEVICE
) -> set[str]:
    """The dtypes of variables that hold partial sums of products."""
    graph = lowered(fun, *args, options=options, device=device).graph
    products = [
        group for groups in graph.groups.values() for group in groups if group.codelet.name.startswith("poplin")
    ]
    written = {v for group in products for v in group.accesses[-1].tensor.variables()}
    return {str(v.dtype) for v in written if v.monoid}


def dot(a: Any, b: Any) -> Any:
    return a @ b


def convolve(x: Any, w: Any) -> Any:
    return jax.lax.conv(x, w, (1, 1), "SAME")


def gradients(x: Any, w: Any) -> Any:
    return jax.grad(lambda x, w: convolve(x, w).astype(np.float32).sum(), (0, 1))(x, w)


def looped(a: Any, b: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, x: (x @ b) @ b.T, a)


def staged(a: Any, b: Any) -> Any:
    def loss(a: Any, b: Any) -> Any:
        with ipu.stage(0):
            h = a @ b
        with ipu.stage(1):
            return (h @ b.T).astype(np.float32).sum()

    return ipu.pipeline(jax.grad(loss, 1), micro_batches=2, batch_argnums=0)(a, b)


@pytest.mark.parametrize(
    ("fun", "args"),
    [(dot, (A, B)), (convolve, (IMAGES, KERNELS)), (gradients, (IMAGES, KERNELS)), (looped, (A, B))],
    ids=["dot", "convolve", "gradients", "loop"],
)
def test_they_reach_every_product(fun: Callable[..., Any], args: Any) -> None:
    assert dtypes_of(fun, *args, options=HALF) == {"float16"}
    for options in (None, ipu.Options(), ipu.Options(partials="float32")):
        assert dtypes_of(fun, *args, options=options) == {"float32"}


def test_they_reach_pipelines() -> None:
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=16)
    a = half(16, 800)
    b = half(800, 4)
    assert dtypes_of(staged, a, b, options=HALF, device=device) == {"float16"}
    assert dtypes_of(staged, a, b, device=device) == {"float32"}


@pytest.mark.parametrize(
    ("fun", "dtype"),
    [
        (dot, "float32"),
        (dot, "bfloat16"),
        (lambda a, b: jax.lax.dot(a, b, preferred_element_type=np.float32), "float16"),
    ],
    ids=["float32", "bfloat16", "wide result"],
)
def test_products_of_other_precision_keep_theirs(fun: Callable[..., Any], dtype: str) -> None:
    assert dtypes_of(fun, *(x.astype(jnp.dtype(dtype)) for x in (A, B)), options=HALF) == {"float32"}


def rounded_apart(options: ipu.Options | None) -> tuple[LoweredProgram, np.ndarray, np.ndarray, int]:
    """A product whose blocks sum to 2049 and -2048 in turn, with the number of the former: half has no 2049."""
    program: LoweredProgram = lowered(dot, A, B, options=options).planned.lowered
    groups = [group for groups in program.graph.groups.values() for group in groups]
    (product,) = [group for group in groups if group.codelet.name.startswith("poplin")]
    starts = product.axes[2].cuts[:-1]
    starts = starts[: len(starts) // 2 * 2]
    a = np.zeros_like(A)
    b = np.ones_like(B)
    a[:, starts[0::2]] = 2048
    a[:, starts[0::2] + 1] = 1
    a[:, starts[1::2]] = -2048
    assert len(starts) >= 4
    return program, a, b, len(starts) // 2


def test_half_partials_round_as_half_precision() -> None:
    program, a, b, pairs = rounded_apart(HALF)
    assert (run_engine(program, (a, b), exact_splits=True)[0] == 0).all()
    assert (run_tiles(program, (a, b))[0] == 0).all()
    assert (run_engine(program, (a, b))[0] == pairs).all()  # in one go, as `jax.jit`
    exact = ipu.Options(partials="float16", exact_splits=True)
    for options, expected in ((HALF, pairs), (exact, 0)):
        got = ipu.jit(dot, device=DEVICE, options=options)(a, b)
        assert got.dtype == np.float16 and (got == expected).all()


def test_float_partials_do_not() -> None:
    program, a, b, pairs = rounded_apart(None)
    assert (run_engine(program, (a, b), exact_splits=True)[0] == pairs).all()
    assert (run_tiles(program, (a, b))[0] == pairs).all()


def test_they_save_cycles() -> None:
    shapes = [jax.ShapeDtypeStruct((64, 4096), np.float16), jax.ShapeDtypeStruct((4096, 64), np.float16)]
    device = ipu.IPUModel(tiles_per_ipu=64)
    wide, narrow = (lowered(dot, *shapes, options=options, device=device).compile().profile for options in (None, HALF))
    assert narrow.cycles < wide.cycles


def test_machine_without_half_precision() -> None:
    device = ipu.IPUModel(tiles_per_ipu=16, native_dtypes={"float32", "int32", "bool"})
    line = inspect.getsourcelines(dot)[1] + 1
    with pytest.raises(ipu.GraphError, match=r"no codelet(.|\n)*expected: float32(.|\n)*got: float16") as raised:
        lowered(dot, A, B, options=HALF, device=device)
    assert f"test_partials.py:{line} " in str(raised.value)
    assert dtypes_of(dot, A, B, device=device) == {"float32"}
