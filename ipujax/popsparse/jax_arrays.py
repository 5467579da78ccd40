"""Products of JAX's sparse arrays, `BCOO` and `BCSR`, as block-sparse products where their pattern is constant.

A function that closes over the indices of a sparse matrix has them as constants of its jaxpr. Products by a dense
matrix, with their gradients, become calls of `static_matmul` and `static_sampled_matmul`, with the largest blocks
that the pattern is made of.

Input and output: jaxprs. Limits: matrices without batch or dense dimensions, of float32 or float16, each element
once; others, those in loops, and those whose indices are arguments are lowered as JAX computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var, shape_of
from ipujax.lowering.jaxpr import Rewrite, everywhere, primitive_names, with_inner
from ipujax.lowering.rules import take_rows
from ipujax.popsparse.block_pattern import BLOCK_SIZES, BlockPattern
from ipujax.popsparse.static_product import static_matmul, static_sampled_matmul
from ipujax.runtime.names_at_import import jax_jit

_PRODUCTS = {"bcoo_dot_general", "bcsr_dot_general"}
_SAMPLED = "bcoo_dot_general_sampled"
_DTYPES = {np.dtype(np.float32), np.dtype(np.float16)}
_NO_BATCH: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


def with_static_products(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr with block-sparse products in place of those of sparse arrays with constant indices."""
    names = {*primitive_names(jaxpr.jaxpr)}
    return everywhere(_rewritten)(jaxpr) if names & {*_PRODUCTS, _SAMPLED} else jaxpr


def _rewritten(jaxpr: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
    constants = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    eqns = [_product(eqn, constants) or with_inner(eqn, rewrite) for eqn in jaxpr.jaxpr.eqns]
    return ClosedJaxpr(jaxpr.jaxpr.replace(eqns=eqns), jaxpr.consts)


def _product(eqn: JaxprEqn, constants: dict[Var, Any]) -> JaxprEqn | None:
    """The block-sparse product in place of an equation; None for others."""
    name = eqn.primitive.name
    shape: tuple[int, ...]
    if name == _SAMPLED:
        left, right, *meta = eqn.invars
        operands = [left, right]
        shape = (*shape_of(left)[:1], *shape_of(right)[:1])
    elif name in _PRODUCTS:
        values, *meta, right = eqn.invars
        operands = [values, right]
        shape = eqn.params["lhs_spinfo"].shape
    else:
        return None
    dtypes = {_dtype(atom) for atom in (*operands, *eqn.outvars)}
    if len(shape) != 2 or len(shape_of(right)) != 2 or len(dtypes) > 1 or not dtypes <= _DTYPES:
        return None
    contracted, batch = eqn.params["dimension_numbers"]
    if batch != _NO_BATCH or any(isinstance(x, Literal) or x not in constants for x in meta):
        return None
    elements = _elements(name, [np.asarray(constants[x]) for x in meta], shape)  # type: ignore[index]
    if elements is None:
        return None
    pattern, order = elements
    fun: Callable[..., jax.Array]
    if name == _SAMPLED and contracted == ((1,), (1,)):
        fun = _sampled(pattern, order)
    elif name in _PRODUCTS and contracted in (((1,), (0,)), ((0,), (0,))):
        fun = _dense_product(pattern, order, transposed=contracted[0] == (0,))
    else:
        return None
    # A call, whose equations keep the line of this one when it is inlined.
    (call,) = jax.make_jaxpr(jax_jit(fun))(*(jax.ShapeDtypeStruct(shape_of(x), _dtype(x)) for x in operands)).eqns
    return call.replace(invars=operands, outvars=eqn.outvars, source_info=eqn.source_info)


def _dtype(atom: Any) -> np.dtype[Any]:
    return np.dtype(atom.aval.dtype)


def _dense_product(pattern: BlockPattern, order: np.ndarray, transposed: bool) -> Callable[..., jax.Array]:
    def bcoo_matmul(values: jax.Array, x: jax.Array) -> jax.Array:
        blocks = take_rows(values, order).reshape(-1, pattern.block, pattern.block)
        if transposed:
            return static_matmul(pattern.transposed(), blocks.swapaxes(1, 2), x)
        return static_matmul(pattern, blocks, x)

    return bcoo_matmul


def _sampled(pattern: BlockPattern, order: np.ndarray) -> Callable[..., jax.Array]:
    """Make the function in place of a sampled product: elements in the order of the sparse array."""

    def bcoo_sampled(left: jax.Array, right: jax.Array) -> jax.Array:
        return take_rows(static_sampled_matmul(pattern, left, right.T).ravel(), np.argsort(order))

    return bcoo_sampled


def _elements(name: str, meta: list[np.ndarray], shape: tuple[int, ...]) -> tuple[BlockPattern, np.ndarray] | None:
    """The pattern of elements, and the number of each element of its blocks; None if some are absent or twice."""
    if name == "bcsr_dot_general":
        columns, starts = meta
        if columns.ndim != 1:
            return None
        rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    else:
        if meta[0].ndim != 2 or meta[0].shape[1] != 2:
            return None
        rows, columns = meta[0].T
    flat = rows.astype(np.int64) * shape[1] + columns
    is_inside = (rows >= 0) & (rows < shape[0]) & (columns >= 0) & (columns < shape[1])
    if len(rows) != len(columns) or not len(rows) or not is_inside.all() or len(np.unique(flat)) < len(flat):
        return None
    for block in sorted(BLOCK_SIZES, reverse=True):
        if shape[0] % block or shape[1] % block or len(rows) % block**2:
            continue
        number = rows.astype(np.int64) // block * (shape[1] // block) + columns // block
        blocks = np.unique(number)
        if len(blocks) * block**2 == len(rows):
            order = np.lexsort((columns, rows, number))
            per_row = shape[1] // block
            pattern = BlockPattern(
                (shape[0], shape[1]), block, tuple((blocks // per_row).tolist()), tuple((blocks % per_row).tolist())
            )
            return pattern, order
    return None
