"""Gradients of whole numbers: arrays of dtype float0, which have no bytes, pass around the machine as in `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from tests.lowering.helpers import assert_rounded_alike

DEVICE = ipu.IPUModel(tiles_per_ipu=8)
X = np.arange(6, dtype=np.float32).reshape(2, 3)
TABLE = np.arange(3, dtype=np.float32)


def energy_of(tree: dict[str, Any], count: Any, mask: Any) -> Any:
    return jnp.where(mask, tree["w"] * tree["n"] + count, 0.0).sum()


STEPS = jnp.arange(15).reshape(3, 5)
FLOAT0: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "gradient": (jax.grad(lambda n, w: (w * n).sum(), allow_int=True), (np.arange(3), TABLE)),
    "both": (jax.value_and_grad(energy_of, (0, 1, 2), allow_int=True), ({"w": X, "n": 3}, np.int8(2), X > 2)),
    "only": (lambda z: z, (np.zeros((3,), jax.dtypes.float0),)),
    "passed through": (lambda z, x: {"x": x + 1, "z": z}, (np.zeros((2, 0), jax.dtypes.float0), X)),
    "dead in a loop of unknown length": (
        lambda n, x: lax.while_loop(
            lambda c: c[0] < n,
            lambda c: (
                c[0] + 1,
                c[1] + jax.grad(lambda x, i: (x * i.sum()).sum(), (0, 1), allow_int=True)(x, STEPS)[0],
            ),
            (0, x),
        ),
        (3, X),
    ),
    "stacked": (
        lambda n: lax.scan(lambda c, i: (c + 1, jax.grad(lambda i: (X * i).sum(), allow_int=True)(i)), 0.0, n),
        (np.arange(3),),
    ),
}


@pytest.mark.parametrize("name", FLOAT0)
def test_gradients_of_whole_numbers(name: str) -> None:
    """They have no bytes: they pass around the machine."""
    fun, args = FLOAT0[name]
    expected = jax.jit(fun)(*args)
    lowered = ipu.jit(fun, device=DEVICE).lower(*args)
    shape = lambda x: (type(x), x.shape, x.dtype)  # noqa: E731
    for call in (
        ipu.jit(fun, device=DEVICE),
        lowered.compile(),
        lambda *args: lowered.compile().profile_call(*args)[0],
    ):
        got = call(*args)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert shape(a) == shape(b)
            if b.dtype != jax.dtypes.float0:
                assert_rounded_alike(a, b)
    assert all(variable.dtype != jax.dtypes.float0 for variable in lowered.graph.variables)


def test_gradients_of_whole_numbers_beside_donated_arguments() -> None:
    fun = lambda z, x: (z, x + 1)  # noqa: E731
    zeros = np.zeros((3,), jax.dtypes.float0)
    inputs = jnp.array(X)
    got = ipu.jit(fun, device=DEVICE, donate_argnums=1)(zeros, inputs)
    text = ipu.jit(fun, device=DEVICE).lower(zeros, X).as_text()
    assert inputs.is_deleted() and got[0].dtype == jax.dtypes.float0 and '"x"' in text and '"z"' not in text
    np.testing.assert_array_equal(got[1], X + 1)


# --- replicas and pipelines ---

_WHOLE_GRADIENTS = jax.grad(lambda x, i: (x * i[:, None]).sum(), (0, 1), allow_int=True)


@pytest.mark.parametrize("device", [ipu.IPUModel(num_ipus=2), ipu.CPU()], ids=["model", "cpu"])
def test_replicas_take_and_give_float0(device: Any) -> None:
    x = jnp.ones((8, 3))
    i = jnp.arange(8)
    rows = jax.sharding.PartitionSpec("replica")
    step = ipu.jit(_WHOLE_GRADIENTS, device=device, replicas=2, in_specs=rows, out_specs=rows)
    of_x, of_i = step(x, i)
    np.testing.assert_array_equal(of_x, _WHOLE_GRADIENTS(x, i)[0])
    assert (of_i.shape, of_i.dtype) == ((8,), jax.dtypes.float0)
    double = ipu.jit(lambda x, nothing: 2 * x, device=device, replicas=2, in_specs=rows, out_specs=rows)
    np.testing.assert_array_equal(double(x, of_i), 2 * x)


@pytest.mark.parametrize(("reduce", "shape"), [("stack", (2, 4)), ("last", (4,)), ("sum", (4,))])
def test_pipelines_take_and_give_float0(reduce: str, shape: tuple[int, ...]) -> None:
    x = jnp.ones((8, 3))
    i = jnp.arange(8)
    pipelined = ipu.pipeline(_WHOLE_GRADIENTS, micro_batches=2, batch_argnums=(0, 1), reduce=reduce)
    (of_x, of_i) = ipu.jit(pipelined)(x, i)
    (expected, nothing) = jax.jit(pipelined)(x, i)
    np.testing.assert_array_equal(of_x, expected)
    assert of_i.shape == nothing.shape == shape and of_i.dtype == jax.dtypes.float0
    inputs = ipu.pipeline(lambda w, nothing, x: (w * x).sum(), micro_batches=2)
    assert float(ipu.jit(inputs)(jnp.ones(3), np.zeros(8, jax.dtypes.float0), x)) == 12.0
