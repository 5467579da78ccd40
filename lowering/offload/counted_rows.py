"""Constants of a loop of which each iteration reads one row, at an index that only counts iterations.

    fori_loop(0, n, lambda i, c: f(c, x[i]), c)     x stays where it is, and row i moves in iteration i

Input: a loop. Output: its operands of this kind, which `micro_batch_streams` may leave in the host's memory.
Limits: an index counts if it is computed from whole numbers that a loop adds constants to, or takes from a stack, and
from literals; one in a loop inside, or in a branch, does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp

from ipujax.lowering.jax_compat import Atom, JaxprEqn, Literal, Var, shape_of
from ipujax.lowering.jaxpr import Body, scan_body, variables_read
from ipujax.lowering.offload.row_access import accesses_rows


def rows_by_counter(loop: JaxprEqn) -> list[int]:
    """Return the constants of a `scan` that its body reads by rows alone, one an iteration, by operand number."""
    scan = scan_body(loop.params)
    body = scan.jaxpr.jaxpr
    constants = body.invars[scan.inputs.constants]
    definitions = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    counters = _counters_of_iterations(scan, definitions)
    readers: dict[Var, list[JaxprEqn]] = {var: [] for var in constants}
    for eqn in body.eqns:
        for var in variables_read(eqn):
            if var in readers:
                readers[var].append(eqn)

    def reads_by_counter(eqn: JaxprEqn, table: Var) -> bool:
        """True if an equation slices one row of a table, at a row number that counts iterations."""
        if not reads_row(eqn, {table}):
            return False
        row_number = eqn.invars[1]  # operands of a dynamic slice: the table, then the start in each dimension
        return _is_computed_from_counters(row_number, definitions, counters)

    return [
        n
        for n, var in enumerate(constants)
        if readers[var] and var not in body.outvars and all(reads_by_counter(eqn, var) for eqn in readers[var])
    ]


def reads_row(eqn: JaxprEqn, tables: Collection[Var]) -> bool:
    """True if an equation slices one row of a table, and reads no table otherwise."""
    table, *starts = eqn.invars
    is_slice = eqn.primitive.name == "dynamic_slice" and isinstance(table, Var) and table in tables
    if not is_slice or not accesses_rows(eqn):
        return False
    return shape_of(eqn.outvars[0])[0] == 1 and not any(isinstance(x, Var) and x in tables for x in starts)


def _counters_of_iterations(scan: Body, definitions: Mapping[Var, JaxprEqn]) -> set[Var]:
    """Whole numbers of a body that count its iterations: states with a constant added, and rows of stacks of them."""
    body = scan.jaxpr.jaxpr
    rows = [var for var in body.invars[scan.inputs.stacks] if _is_whole_number(var)]
    states = zip(body.invars[scan.inputs.carries], body.outvars[scan.results.carries], strict=True)
    return {*rows, *(var for var, after in states if _is_whole_number(var) and _adds_constant(after, var, definitions))}


def _is_whole_number(var: Var) -> bool:
    aval: Any = var.aval
    return aval.shape == () and jnp.issubdtype(aval.dtype, jnp.integer)


def _adds_constant(atom: Atom, var: Var, definitions: Mapping[Var, JaxprEqn]) -> bool:
    eqn = definitions.get(atom) if isinstance(atom, Var) else None
    if eqn is None or eqn.primitive.name not in ("add", "sub"):
        return False
    return any(x is var for x in eqn.invars) and any(isinstance(x, Literal) for x in eqn.invars)


def _is_computed_from_counters(atom: Atom, definitions: Mapping[Var, JaxprEqn], counters: Collection[Var]) -> bool:
    """True if a value is computed from counters and literals alone, by equations without effects."""
    pending = [atom]
    while pending:
        value = pending.pop()
        if isinstance(value, Literal) or value in counters:
            continue
        eqn = definitions.get(value)
        if eqn is None or eqn.effects:
            return False
        pending += eqn.invars
    return True
