"""Pass `swap_products`: a product whose only reader transposes it is computed with its operands swapped.

JAX's gradient of `x @ w` for w is `(gᵀ @ x)ᵀ`; swapped it is `xᵀ @ g`, which has the memory order of w, so that an
update of w reads both row by row.

Input and output: jaxprs; those in loops, branches, functions and pipelines too.
Limits: the transpose must be the product's only reader, and exactly exchange the free dimensions of both operands.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var, shape_of
from ipujax.lowering.jaxpr import Rewrite, everywhere, variables, variables_read, with_inner
from ipujax.lowering.primitives import is_matrix_product, record_of


def swap_products(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr with swapped operands in place of transposed products."""
    return everywhere(_swapped)(jaxpr)


def _swapped(jaxpr: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
    """Swaps the operands of products that are only read transposed, and drops the transposes: (x·y)ᵀ = yᵀ·xᵀ.

    `rewrite` is for jaxprs inside of equations.
    """
    body = jaxpr.jaxpr
    reads = Counter(var for eqn in body.eqns for var in variables_read(eqn))
    reads.update(variables(body.outvars))
    # By value that a transpose reads and nothing else: the transpose.
    transposed = {
        eqn.invars[0]: eqn
        for eqn in body.eqns
        if record_of(eqn).view == "permuted" and isinstance(eqn.invars[0], Var) and reads[eqn.invars[0]] == 1
    }
    eqns: list[JaxprEqn] = []
    replaced: set[Var] = set()
    for eqn in body.eqns:
        reader = transposed.get(eqn.outvars[0]) if is_matrix_product(eqn) else None
        if reader is not None and tuple(reader.params["permutation"]) == _exchange_of_free_dims(eqn):
            eqns.append(_with_swapped_operands(eqn, reader))
            # The swapped product defines the transpose's result, so the transpose is dropped.
            replaced.add(reader.outvars[0])
        elif record_of(eqn).view != "permuted" or eqn.outvars[0] not in replaced:
            eqns.append(with_inner(eqn, rewrite))
    return ClosedJaxpr(body.replace(eqns=eqns), jaxpr.consts)


def _exchange_of_free_dims(eqn: JaxprEqn) -> tuple[int, ...] | None:
    """Permutation of the result of a `dot_general` that exchanges the free dimensions of its two operands.

    The result has batch dimensions, then those of the left operand that are not contracted, then those of the right.
    None for a product of a literal, or one with a sharding of its result, which would have to be permuted too.
    """
    if any(isinstance(atom, Literal) for atom in eqn.invars) or eqn.params.get("out_sharding") is not None:
        return None
    (lhs_contracted, _), (lhs_batch, _) = eqn.params["dimension_numbers"]
    batch = len(lhs_batch)
    rank = len(shape_of(eqn.outvars[0]))
    lhs_free = len(shape_of(eqn.invars[0])) - batch - len(lhs_contracted)
    split = batch + lhs_free
    return (*range(batch), *range(split, rank), *range(batch, split))


def _with_swapped_operands(eqn: JaxprEqn, reader: JaxprEqn) -> JaxprEqn:
    """The product of the operands in the other order, with the result of `reader`, its transpose."""
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    numbers = (rhs_contracted, lhs_contracted), (rhs_batch, lhs_batch)
    precision: Any = eqn.params["precision"]
    # A precision of its own for each operand.
    if isinstance(precision, tuple):
        precision = precision[::-1]
    params = {**eqn.params, "dimension_numbers": numbers, "precision": precision}
    return eqn.replace(invars=eqn.invars[::-1], outvars=reader.outvars, params=params)
