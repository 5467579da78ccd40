"""Rows that loops read from the host's memory by their number.

A constant of which each iteration reads one row, at an index that only counts iterations, stays where it is:

    fori_loop(0, n, lambda i, c: f(c, x[i]), c)     row i of x moves in iteration i

An inner loop reads its rows by the numbers of both loops:

    scan over rows [outer, inner, …]              scan over numbers, with the table [outer · inner, …] as a constant
      scan over one [inner, …]              →       scan over numbers, with the table and the outer number
        … row …                                       row = remote_rows table (outer number · inner + inner number)

Input: a loop, and the table of each stack of it that inner loops read by rows. Output: its constants that are read by
rows alone, which `micro_batch_streams` may leave in the host's memory; an equal loop, in which no stack is on the tiles
for longer than an iteration of the innermost loop.
Limits: an index counts if it is computed from whole numbers that a loop adds constants to, or takes from a stack, and
from literals; one in a loop inside, or in a branch, does not. I/O tiles do not fetch rows of inner loops ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, new_equation, shape_of
from ipujax.lowering.jaxpr import Body, scan_body, substituted, variables, variables_read, with_scan_body
from ipujax.lowering.offload.primitives import remote_rows_p
from ipujax.lowering.offload.row_access import accesses_rows, in_place_of
from ipujax.lowering.offload.row_updates import is_reshape


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


_NUMBER = jax.core.ShapedArray((), np.dtype(np.int32))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a stack, or a row of one in a body.

    Args:
        table: table off chip, of which the stack or the row is a part.
        inside: rows of the table in one row of the stack, or in the row.
        number: number of this part of the table among all of its size, counted from 0: of a stack the iteration of the
            loops around its loop, of a row that of its loop too. None for a stack that is the whole table.
    """

    table: Var
    inside: int
    number: Var | None = None


def read_by_number(loop: JaxprEqn, rows: Mapping[int, Rows]) -> list[JaxprEqn]:
    """Return an equal loop that reads rows of some stacks by their number, after the iota that it counts by.

    Args:
        loop: a `scan`.
        rows: rows of each of these stacks, by the number of the operand. `Rows.number` says which part of its table off
            chip the stack is, None for all of it.
    """
    params = loop.params
    length = params["length"]
    first_carry = scan_body(params).operands.constants.stop  # new constants go before it
    numbers = Var(_NUMBER.update(shape=(length,)))
    count = new_equation(
        lax.iota_p, [], [numbers], {"dtype": _NUMBER.dtype, "shape": (length,), "dimension": 0, "sharding": None}, loop
    )
    # In place of the stacks the loop has their tables as constants, and the numbers of their parts of these tables.
    constants = list(dict.fromkeys(x for each in rows.values() for x in (each.table, each.number) if x is not None))
    other_operands = [x for n, x in enumerate(loop.invars) if n not in rows]
    invars = [*other_operands[:first_carry], *constants, *other_operands[first_carry:], numbers]
    body = _body_with_row_loads(loop, rows, constants)
    return [count, loop.replace(invars=invars, params=with_scan_body(params, body, len(constants)))]


def _body_with_row_loads(loop: JaxprEqn, rows: Mapping[int, Rows], constants: list[Var]) -> ClosedJaxpr:
    """The loop's body, which loads its rows from tables off chip.

    Args:
        loop: a `scan`.
        rows: rows of each stack that the body loads itself, by the number of the operand.
        constants: tables and numbers of them, new constants of the body. Its last input is the number of the iteration.
    """
    scan = scan_body(loop.params)
    body = scan.jaxpr.jaxpr
    first_carry = scan.operands.constants.stop
    inner_of: dict[Var, Var] = {x: Var(x.aval) for x in constants}
    iteration = Var(_NUMBER)
    eqns: list[JaxprEqn] = []
    inner_rows: dict[Var, Rows] = {}
    for n, each in rows.items():
        number = iteration
        if each.number is not None:  # the stack is a part of the table: outer number · length + iteration
            number = Var(_NUMBER)
            eqns += _traced_equations(
                _number_in(loop.params["length"]), [inner_of[each.number], iteration], number, loop
            )
        inner_rows[body.invars[n]] = Rows(inner_of[each.table], each.inside, number)
    other_inputs = [x for n, x in enumerate(body.invars) if n not in rows]
    invars = [*other_inputs[:first_carry], *inner_of.values(), *other_inputs[first_carry:], iteration]
    loading, results = _with_row_loads(body, inner_rows, loop)
    eqns += loading
    names = body.debug_info.with_unknown_names()
    return ClosedJaxpr(body.replace(invars=invars, eqns=eqns, outvars=results, debug_info=names), scan.jaxpr.consts)


def _with_row_loads(body: Jaxpr, rows: dict[Var, Rows], loop: JaxprEqn) -> tuple[list[JaxprEqn], list[Atom]]:
    """Equations and results of a body, with loads of the rows of an iteration where they are first read.

    Args:
        body: body of a loop.
        rows: rows of an iteration, by the variable of each in the body; updated: their reshapes are added.
        loop: the loop, for the source of loads.
    """
    eqns: list[JaxprEqn] = []
    loaded: dict[Var, Var] = {}
    for eqn in body.eqns:
        read = [x for x in variables_read(eqn) if x in rows]
        if read and is_reshape(eqn):
            rows[eqn.outvars[0]] = rows[read[0]]
            continue
        stacks = _stacks_of(eqn, rows)
        if stacks:  # a loop inside loads the rows of its iterations itself
            eqns += read_by_number(eqn, stacks)
            continue
        eqns += _row_loads([x for x in read if x not in loaded], rows, loaded, loop)
        eqns.append(eqn.replace(invars=[substituted(x, loaded) for x in eqn.invars]))
    returned = [x for x in variables(body.outvars) if x in rows and x not in loaded]
    eqns += _row_loads(list(dict.fromkeys(returned)), rows, loaded, loop)
    return eqns, [substituted(x, loaded) for x in body.outvars]


def _row_loads(
    values: Sequence[Var], rows: Mapping[Var, Rows], loaded: dict[Var, Var], loop: JaxprEqn
) -> list[JaxprEqn]:
    """Equations that load rows of tables off chip for one iteration; updates `loaded`, the loaded value of each row."""
    eqns: list[JaxprEqn] = []
    for x in values:
        number = rows[x].number
        assert number is not None, "rows of a body have a number"
        loaded[x] = Var(x.aval)
        eqns += _traced_equations(_row_of(shape_of(x)), [rows[x].table, number], loaded[x], loop)
    return eqns


def _stacks_of(eqn: JaxprEqn, rows: Mapping[Var, Rows]) -> dict[int, Rows]:
    """Stacks of an inner loop that are parts of tables off chip, by the number of the operand; none if it is no loop.

    `rows` are values of this iteration that such parts are; one of a single row is loaded, as it has no rows inside.
    """
    if eqn.primitive.name != "scan":
        return {}
    are_stacks = scan_body(eqn.params).operands.are_stacks()
    operands = enumerate(zip(eqn.invars, are_stacks, strict=True))
    stacks = {n: rows[x] for n, (x, is_stack) in operands if is_stack and isinstance(x, Var) and x in rows}
    length = eqn.params["length"]
    return {n: replace(x, inside=x.inside // length) for n, x in stacks.items() if x.inside > 1}


def _traced_equations(fun: Callable[..., Any], operands: list[Var], result: Var, like: JaxprEqn) -> list[JaxprEqn]:
    return in_place_of(new_equation(remote_rows_p, operands, [result], {}, like), fun)


def _number_in(length: int) -> Callable[..., Any]:
    """The number of an inner iteration among those of all outer ones."""
    return lambda outer, inner: outer * np.int32(length) + inner


def _row_of(shape: tuple[int, ...]) -> Callable[..., Any]:
    """Function that loads the row of a number from a table off chip, and gives it a shape."""

    def load(table: Any, number: Any) -> Any:
        (rows,) = remote_rows_p.bind(table, lax.reshape(number, (1,)))
        return lax.reshape(rows, shape)

    return load
