"""Records of primitives: equations computed in two parts along each of their factors have the numbers of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from ipujax.lowering.popops import OP_COSTS
from ipujax.lowering.primitives import RECORDS, Labels, record_of
from tests.ipujax.pipeline.pipeline_models import array

COMBINED: dict[str, Callable[[Any, Any], Any]] = {"add": np.add, "max": np.maximum, "min": np.minimum}
X = array(4, 6)
Y = array(4, 6, seed=1)
Z = array(2, 4, 4)
IMAGES = array(2, 4, 6, 6)
FLAGS = X > 0
CHANNELS = ("NCHW", "OIHW", "NCHW")
ROWS = np.array([[2], [0], [3], [2]])


def conv(x: Any, kernel: Any, **settings: Any) -> Any:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=CHANNELS, **settings)


# Name → function, operands, and the number of factors along which its last equation is computed in parts.
CASES: dict[str, tuple[Callable[..., Any], Sequence[Any], int]] = {
    "elementwise": (lax.mul, (X, Y), 2),
    "choice": (lambda c, x, y: lax.select(c, x, y), (FLAGS, X, Y), 2),
    "bits": (lambda x: lax.bitcast_convert_type(x, np.uint8), (X,), 2),
    "product": (lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ()))), (X, Y), 3),
    "batched product": (lambda x, y: lax.dot_general(x, y, (((1,), (2,)), ((0,), (0,)))), (Z, Z), 4),
    "convolution": (conv, (IMAGES, array(6, 4, 3, 3)), 3),
    "grouped convolution": (lambda x, k: conv(x, k, feature_group_count=2), (IMAGES, array(6, 2, 3, 3)), 2),
    "sum": (lambda x: jnp.sum(x, 1), (X,), 2),
    "maximum": (lambda x: jnp.max(x, (0, 1)), (X,), 2),
    "minimum": (lambda x: jnp.min(x, 0), (X,), 2),
    "all": (lambda x: jnp.all(x, 1), (FLAGS,), 2),
    "any": (lambda x: jnp.any(x, 0), (FLAGS,), 2),
    "position": (lambda x: lax.argmax(x, 1, np.int32), (X,), 1),
    "running sum": (lambda x: lax.cumsum(x, 0), (X,), 1),
    "sort": (lambda x: lax.sort(x, dimension=1), (X,), 1),
    "largest": (lambda x: lax.top_k(x, 2)[0], (X,), 1),
    "pooling": (lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 2), "VALID"), (X,), 1),
    "reshape": (lambda x: lax.reshape(x, (2, 2, 3, 2)), (X,), 4),
    "joining reshape": (lambda x: lax.reshape(x, (2, 16)), (Z,), 3),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), (Z,), 3),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (4, 2, 6), (0, 2)), (X,), 3),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (array(4, 1, 6),), 2),
    "reversal": (lambda x: lax.rev(x, (1,)), (X,), 1),
    "slice": (lambda x: lax.slice(x, (0, 1), (4, 5)), (X,), 1),
    "dynamic slice": (lambda x, n: lax.dynamic_slice(x, (0, n), (4, 2)), (X, np.int32(1)), 1),
    "dynamic update": (lambda x, y: lax.dynamic_update_slice(x, y, (0, 1)), (X, array(4, 2)), 1),
    "concatenation": (lambda x, y: lax.concatenate([x, y], 1), (X, Y), 1),
    "pad": (lambda x: lax.pad(x, np.float32(0), ((0, 0, 0), (1, 2, 0))), (X,), 1),
    "rows looked up": (lambda x: jnp.take(x, ROWS[:, 0], axis=0, mode="clip"), (X,), 2),
    "columns looked up": (lambda x: jnp.take_along_axis(x, ROWS, 1, mode="clip"), (X,), 1),
    "rows written": (lambda x, y: x.at[ROWS[:, 0]].set(y, mode="drop"), (X, Y), 1),
    "factorisation": (lambda x: lax.linalg.lu(x)[0], (Z,), 1),
    "Fourier transform": (lambda x: lax.fft(x, "RFFT", (4,)), (Z,), 2),
}


def half(value: Any, labels: Labels, factor: int, side: int) -> Any:
    """Half of a value along the dimension that begins with a factor."""
    for dim, factors in enumerate(labels):
        if factors[:1] == (factor,):
            return np.split(value, 2, dim)[side]
    return value


def in_parts(eqn: JaxprEqn, operands: Sequence[Any], factor: int) -> Any:
    """The first result of an equation, computed in two parts."""
    record = record_of(eqn)
    assert record.factors is not None
    factors = record.factors(eqn)
    (result, *_), (labels, *_) = eqn.outvars, factors.results
    parts = []
    for side in (0, 1):
        blocks = [half(x, dims, factor, side) for x, dims in zip(operands, factors.operands, strict=True)]
        shape = half(np.zeros(result.aval.shape, bool), labels, factor, side).shape  # type: ignore[attr-defined]
        changes = record.block_params(eqn, [np.shape(x) for x in blocks], [shape])
        params = eqn.primitive.get_bind_params({**eqn.params, **changes})
        computed = eqn.primitive.bind(*map(jnp.asarray, blocks), **params)
        parts.append(np.asarray(computed[0] if eqn.primitive.multiple_results else computed))
        assert factor in factors.reductions or parts[-1].shape == shape
    if factor in factors.reductions:
        return COMBINED[factors.reductions[factor]](*parts)
    return np.concatenate(parts, next(dim for dim, names in enumerate(labels) if factor in names))


def last_equation(fun: Callable[..., Any], args: Sequence[Any]) -> tuple[JaxprEqn, list[np.ndarray]]:
    """The last equation of a function, of a call the last one inside, and its operands."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    *before, last = jaxpr.eqns
    names = jaxpr.jaxpr.debug_info.with_unknown_names()
    body = jaxpr.jaxpr.replace(eqns=before, outvars=list(last.invars), debug_info=names)
    operands = list(map(np.asarray, jaxpr_as_fun(ClosedJaxpr(body, jaxpr.consts))(*args)))
    return last_equation(jaxpr_as_fun(last.params["jaxpr"]), operands) if "jaxpr" in last.params else (last, operands)


@pytest.mark.parametrize("name", CASES)
def test_parts_of_factors_are_those_of_the_whole(name: str) -> None:
    fun, args, count = CASES[name]
    eqn, operands = last_equation(fun, args)
    record = record_of(eqn)
    assert record.factors is not None
    factors = record.factors(eqn)
    whole = eqn.primitive.bind(*map(jnp.asarray, operands), **eqn.primitive.get_bind_params(eqn.params))
    expected = np.asarray(whole[0] if eqn.primitive.multiple_results else whole)
    dims = [names for labels in (*factors.operands, *factors.results) for names in labels]
    minor = {factor for names in dims for factor in names[1:]}
    split = [f for f, n in factors.sizes.items() if n > 1 and f not in factors.positions]
    assert len(split) == count
    for factor in split:
        if factor not in minor and factors.sizes[factor] % 2 == 0:
            np.testing.assert_allclose(in_parts(eqn, operands, factor), expected, 1e-5, 1e-6, err_msg=str(factor))


def test_kinds_of_cost_agree_with_views() -> None:
    for name, record in RECORDS.items():
        assert (record.view is not None) == (record.cost == "view"), name
        assert record.is_elementwise == (name in OP_COSTS), name
        assert not record.is_cheap or record.is_elementwise, name
        assert record.cost != "product" or record.macs is not RECORDS["copy"].macs, name
