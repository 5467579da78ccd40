"""Arguments that are no arrays, shapes among them: each error names the argument, whatever runs the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.errors import ArgumentOverflowError, ArgumentTypeError

DEVICE = ipu.IPUModel(tiles_per_ipu=8)
X = jnp.ones((2, 3))
SHAPE = jax.ShapeDtypeStruct(X.shape, X.dtype)
NO_ARRAYS: dict[str, tuple[Any, str, str]] = {
    "a shape": (
        SHAPE,
        "is the shape of an array",
        r"ShapeDtypeStruct\(shape=\(2, 3\)(.|\n)*try: an array, as jnp.zeros",
    ),
    "an abstract value": (jax.core.ShapedArray((2, 3), X.dtype), "is the shape of an array", "ShapedArray"),
    "a string": ("abc", "is not an array", "str 'abc'"),
    "an object": (object(), "is not an array", "object <object"),
    "a function": (jnp.sin, "is not an array", "got: "),
    "a masked array": (np.ma.masked_array([[1.0, 2.0]], [[0, 1]]), "is not an array", "MaskedArray of float64"),
    "an array of objects": (np.array([None]), "is not an array", "ndarray of object"),
}


def added(params: Any, y: Any) -> Any:
    return params["w"][0] + y


def runs(**settings: Any) -> dict[str, Callable[..., Any]]:
    """The ways to run a function on arguments."""
    fun = ipu.jit(added, **{"device": DEVICE, **settings})
    traced = fun.trace({"w": [X]}, y=X)
    compiled = traced.lower().compile()
    return {"call": fun, "traced": traced, "compiled": compiled, "profile_call": compiled.profile_call}


@pytest.mark.parametrize("name", NO_ARRAYS)
@pytest.mark.parametrize("settings", [{}, {"device": ipu.IPUModel(num_ipus=2, tiles_per_ipu=8), "replicas": 2}])
def test_names_a_non_array(name: str, settings: dict[str, Any]) -> None:
    value, label, got = NO_ARRAYS[name]
    for way, run in runs(**settings).items():
        expected = "an? .*array" if way == "call" else r"float32\[2,3\]"
        for place, args in ((r"params\['w'\]\[0\]", ({"w": [value]}, X)), ("y", ({"w": [X]}, value))):
            text = rf"argument {place} of added {label}(.|\n)*at: test_no_arrays(.|\n)*expected: {expected}(.|\n)*{got}"
            with pytest.raises(ArgumentTypeError, match=text):
                run(args[0], y=args[1])


def test_names_a_non_array_on_the_cpu() -> None:
    with pytest.raises(ArgumentTypeError, match="argument y of added is the shape of an array"):
        ipu.jit(added, device=ipu.CPU())({"w": [X]}, SHAPE)


def test_shapes_are_not_blamed_where_they_will_do() -> None:
    fun = ipu.jit(lambda x, y: x + None, device=DEVICE)
    for shape in (SHAPE, jax.core.ShapedArray((2, 3), X.dtype)):
        with pytest.raises(TypeError, match="NoneType"):
            fun.lower(shape, shape)
    with pytest.raises(ArgumentTypeError, match="argument y of <lambda> is not an array"):
        fun.lower(SHAPE, "abc")


def test_numbers_too_large_for_any_dtype() -> None:
    fun = ipu.jit(lambda x: x, device=DEVICE)
    for way in (fun, fun.lower, fun.eval_shape):
        with pytest.raises(
            ArgumentOverflowError, match=r"argument x\[0\] of <lambda> is too large(.|\n)*at: test_no_arr"
        ):
            way([2**40])


def test_numbers_too_large_for_the_compiled_dtype() -> None:
    compiled = ipu.jit(lambda x: x + 1, device=DEVICE).lower(1).compile()
    with pytest.raises(ArgumentOverflowError, match=r"argument x of <lambda> is too large(.|\n)*expected: int32"):
        compiled(2**70)
    with pytest.raises(OverflowError):
        compiled.profile_call(2**70)
