"""Reductions of tensors over some dimensions, and predicates of all elements.

Source: popops `Reduce.hpp`, `AllTrue.hpp`, `NaN.hpp`. Numbers are those of the JAX reductions of the same kind: sums of
halves are taken in float and rounded once, as `accumType` does by default.
Limits: `reduce_many` runs its reductions one after the other; PopLibs shares compute sets between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.poplar.library import add, check_tensors, look_up
from ipujax.poplar.types import element_type
from ipujax.popops.elementwise import check_scales
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor, dtype_name

Scale = float | Tensor

Reduction = Literal["add", "mul", "max", "min", "logical_and", "logical_or", "square_add", "log_add"]
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "add": jnp.sum,
    "mul": jnp.prod,
    "max": jnp.max,
    "min": jnp.min,
    "logical_and": jnp.all,
    "logical_or": jnp.any,
    "square_add": lambda x, axis: jnp.sum(jax.lax.square(x), axis),
    "log_add": jax.nn.logsumexp,
}
_SUMS = ("add", "square_add")  # the ones that scale and update (popops: "only valid with ADD or SQUARE_ADD")
_TRUTHS = ("logical_and", "logical_or")  # JAX would convert numbers; popops refuses them


def reduce(
    graph: Graph,
    x: Tensor,
    dims: Sequence[int],
    operation: Reduction,
    prog: Program,
    name: str = "reduce",
    *,
    scale: Scale | None = None,
    update: Tensor | None = None,
    out_type: Any = None,
) -> Tensor:
    """Reduce a tensor over some dimensions.

    Args:
        graph: graph to add to.
        x: the tensor.
        dims: dimensions to reduce.
        operation: "add", "square_add", "log_add", "mul", "max", "min", "logical_and" or "logical_or".
        prog: program to add to.
        name: debug name.
        scale: factor of a sum, a number or a tensor of one element.
        update: tensor of the result's shape that a sum is added to, in place.
        out_type: type of the result; that of `update`, or of `x`, when None.

    Returns:
        A tensor of the shape of `x` without `dims`: new, or `update`.

    Raises:
        GraphError: an unknown operation, a dimension out of range, or a scale or update without a sum.

    Source: popops::reduce with ReduceParams(op, update, scale).
    """
    # A type of the result wins; else an update must stay of its type, and other results are of that of `x`.
    _check(name, x, dims, operation, summing=scale is not None or update is not None)
    dtype = x.dtype if update is None else update.dtype
    dtype = dtype if out_type is None else element_type(out_type, name)
    check_scales(name, dtype, scale)
    # A scale that is a number becomes an immediate; only tensors are operands.
    operands = [x, *([scale] if isinstance(scale, Tensor) else []), *([] if update is None else [update])]

    def reduce_and_update(a: jax.Array, *scale_and_update: jax.Array) -> jax.Array:
        factor = scale_and_update[0] if isinstance(scale, Tensor) else scale
        result = _reduce_array(a, dims, operation, factor, dtype)
        return result if update is None else scale_and_update[-1] + result

    return add(graph, reduce_and_update, operands, prog, name, [] if update is None else [update])


def reduce_with_output(
    graph: Graph,
    x: Tensor,
    out: Tensor,
    dims: Sequence[int],
    operation: Reduction,
    prog: Program,
    name: str = "reduce",
    *,
    scale: Scale | None = None,
    update: bool = False,
) -> None:
    """Write a reduction to `out`, or add it with `update`; arguments as of `reduce`, the type is that of `out`.

    Raises:
        GraphError: as `reduce`, or an output of another shape.

    Source: popops::reduceWithOutput.
    """
    if update:
        reduce(graph, x, dims, operation, prog, name, scale=scale, update=out)
        return
    _check(name, x, dims, operation, summing=scale is not None)
    check_scales(name, out.dtype, scale)

    def reduce_scaled(a: jax.Array, *factor: jax.Array) -> jax.Array:
        return _reduce_array(a, dims, operation, factor[0] if factor else scale, out.dtype)

    add(graph, reduce_scaled, [x, *([scale] if isinstance(scale, Tensor) else [])], prog, name, [out])


def _reduce_array(a: jax.Array, dims: Sequence[int], operation: Reduction, scale: Any, dtype: Any) -> jax.Array:
    """Reduce an array in the widest type that is needed, scale it, and round it once to `dtype`."""
    # A result of a type that holds all operands is reduced in it: not rounded to half on the way, and squares do not
    # wrap. Sums of halves, and floats of integers, are in float until they are scaled: they may be out of the range of
    # half, or of the integers, where the result is not.
    is_float = np.dtype(dtype).kind == "f"
    in_float = (operation in _SUMS and a.dtype == np.float16) or (is_float and a.dtype.kind in "iu")
    wide = a.astype(np.float32) if in_float else a.astype(dtype) if np.can_cast(a.dtype, dtype) else a
    result = _REDUCTIONS[operation](wide, axis=tuple(dims))
    if scale is None:
        return result.astype(dtype)
    scaled = result if is_float and result.dtype == np.float32 else result.astype(dtype)
    return (scaled * jnp.asarray(scale).reshape(()).astype(scaled.dtype)).astype(dtype)


@dataclass(frozen=True, slots=True)
class SingleReduceOp:
    """Reduction of `reduce_many`; fields as the arguments of `reduce`.

    Args:
        x: the tensor.
        dims: dimensions to reduce.
        operation: see `reduce`.
        scale: factor of a sum.
        update: add a sum to its output.
        out_type: type of a new result.
        name: debug name.
    """

    x: Tensor
    dims: Sequence[int]
    operation: Reduction
    scale: Scale | None = None
    update: bool = False
    out_type: Any = None
    name: str = ""


def reduce_many(
    graph: Graph,
    reductions: Sequence[SingleReduceOp],
    prog: Program,
    name: str = "reduce_many",
    *,
    outputs: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Reduce several tensors.

    Args:
        graph: graph to add to.
        reductions: tensors, dimensions and operations.
        prog: program to add to.
        name: debug name.
        outputs: tensors to write, one for each reduction; new tensors when empty.

    Returns:
        The results, in order.

    Raises:
        GraphError: as `reduce`; another number of outputs; an update without an output.

    Source: popops::reduceMany.
    """
    if outputs and len(outputs) != len(reductions):
        raise GraphError(f"{name}: each reduction must have one output", expected=len(reductions), got=len(outputs))
    if not outputs and any(r.update for r in reductions):
        raise GraphError(f"{name}: an update needs an output", hint="outputs=")
    names = [f"{name}/{r.name or number}" for number, r in enumerate(reductions)]
    if not outputs:
        return [
            reduce(graph, r.x, r.dims, r.operation, prog, full_name, scale=r.scale, out_type=r.out_type)
            for r, full_name in zip(reductions, names, strict=True)
        ]
    for r, full_name, out in zip(reductions, names, outputs, strict=True):
        reduce_with_output(graph, r.x, out, r.dims, r.operation, prog, full_name, scale=r.scale, update=r.update)
    return list(outputs)


def _check(name: str, x: Tensor, dims: Sequence[int], operation: Reduction, *, summing: bool) -> None:
    """Refuse dimensions that a tensor lacks, and an operation that is unknown or unfit for its type or use."""
    check_tensors(name, x)
    look_up(operation, _REDUCTIONS, f"operation of {name}")
    if summing and operation not in _SUMS:
        expected = " or ".join(_SUMS)
        raise GraphError(f"{name}: only sums scale and update", expected=expected, got=operation)
    if len(set(dims)) != len(dims) or not all(0 <= d < x.ndim for d in dims):
        expected = f"different numbers from 0 to {x.ndim - 1}"
        raise GraphError(f"{name}: dims must be dimensions of the tensor", expected=expected, got=list(dims))
    if operation in _TRUTHS and x.dtype != np.bool_:
        raise GraphError(f"{name}: {operation} takes BOOL operands", expected="bool", got=dtype_name(x.dtype))


def all_true(graph: Graph, x: Tensor, prog: Program, name: str = "all_true") -> Tensor:
    """Return a BOOL scalar: true if all elements of a BOOL tensor are.

    Source: popops::allTrue.
    """
    return reduce(graph, x, range(x.ndim), "logical_and", prog, name)


def has_nan(graph: Graph, x: Tensor, prog: Program, name: str = "has_nan") -> Tensor:
    """Return a BOOL scalar: true if any element is NaN.

    Source: popops::hasNaN.
    """
    return add(graph, lambda a: jnp.any(jnp.isnan(a)), [x], prog, name)


def has_nan_or_inf(graph: Graph, x: Tensor, prog: Program, name: str = "has_nan_or_inf") -> Tensor:
    """Return a BOOL scalar: true if any element is NaN or infinite.

    Source: popops::hasNaNOrInf.
    """
    return add(graph, lambda a: jnp.any(~jax.lax.is_finite(a)), [x], prog, name)
