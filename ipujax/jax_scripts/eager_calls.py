"""Loops, and transformations of jitted functions, that a script calls outside of `jax.jit`: counted as functions.

JAX compiles the whole of a `jax.lax.scan` that nothing else traces, and the parts of `jax.grad(jitted)(x)`. Each is
recorded by a trace of `jax.jit` around it, whose inner traces JAX caches: Python code runs once. The call itself is
JAX's own.

Input: the public function. Output: a function of the same name and results.
Limits: `jax.grad(f)` of a Python function that calls jitted ones has a row for each of these, of its forward alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.arguments import function_name, has_tracer
from ipujax.jax_scripts.hidden_frames import hiding_frames
from ipujax.jax_scripts.profiled_function import ProfiledFunction
from ipujax.jax_scripts.recorder import Recorder

LOOPS = ("scan", "while_loop", "fori_loop", "map")  # of jax.lax
TRANSFORMATIONS = ("grad", "value_and_grad", "vmap")  # of jax


def recorded_transformation(
    original: Callable[..., Any], jit: Callable[..., Any], recorder: Recorder, is_own: Callable[[], bool]
) -> Callable[..., Any]:
    """Return a transformation whose results, of jitted functions, are counted.

    Args:
        original: the transformation of JAX.
        jit: `jax.jit`.
        recorder: recorder of calls.
        is_own: returns whether code of JAX makes the call.
    """

    @hiding_frames
    @functools.wraps(original)
    def transformation(*args: Any, **settings: Any) -> Any:
        result = original(*args, **settings)
        fun = args[0] if args else settings.get("fun")
        if type(fun) is not ProfiledFunction or is_own():
            return result
        counted = _counted(result, f"{original.__name__}({function_name(fun)})", jit, recorder)

        @hiding_frames
        @functools.wraps(result)
        def transformed(*args: Any, **kwargs: Any) -> Any:
            if not recorder.counts_now:
                return result(*args, **kwargs)
            with recorder.counting_no_parts():
                counted.count(args, kwargs)
                return result(*args, **kwargs)

        return transformed

    return transformation


def recorded_loop(
    original: Callable[..., Any], jit: Callable[..., Any], recorder: Recorder, is_own: Callable[[], bool]
) -> Callable[..., Any]:
    """Return a loop of `jax.lax` whose calls outside of other functions are counted; arguments as above."""

    @hiding_frames
    @functools.wraps(original)
    def loop(*args: Any, **settings: Any) -> Any:
        if not recorder.counts_now or is_own():
            return original(*args, **settings)
        with recorder.counting_no_parts():
            leaves, tree = jax.tree.flatten((args, settings))
            is_operand = [_is_operand(x) for x in leaves]
            if not has_tracer(leaves):

                def run(*operands: Any) -> Any:
                    values = iter(operands)
                    filled = [next(values) if flag else x for x, flag in zip(leaves, is_operand, strict=True)]
                    args, settings = jax.tree.unflatten(tree, filled)
                    return original(*args, **settings)

                functions = [function_name(x) for x in leaves if callable(x)]
                operands = [x for x, flag in zip(leaves, is_operand, strict=True) if flag]
                _counted(run, f"{original.__name__}({functions[-1] if functions else ''})", jit, recorder).count(
                    tuple(operands), {}
                )
            return original(*args, **settings)

    return loop


def _counted(fun: Callable[..., Any], name: str, jit: Callable[..., Any], recorder: Recorder) -> ProfiledFunction:
    """Return a function, jitted under a name, to be traced alone."""

    @functools.wraps(fun)
    def named(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    named.__name__ = name
    return ProfiledFunction(jit(named), recorder)


def _is_operand(x: Any) -> bool:
    """Return whether a leaf is traced: numbers stay as they are, for they may be bounds of a loop."""
    if not isinstance(x, jax.Array | np.ndarray):
        return False
    return x.ndim > 0 or not jnp.issubdtype(x.dtype, jnp.integer)
