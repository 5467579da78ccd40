"""Pass `hoist_products`: products in a loop that do not depend on its carries are computed before it, or behind it.

    scan: h' = tanh(x[t] @ w + h @ u)          y = x @ w
                                               scan: h' = tanh(y[t] + h @ u)

A product of a row of a stack with a constant of the loop is computed for all rows at once, as the input product of a
recurrent layer is in cuDNN and popnn; one of constants once. Equations whose results such a product reads move with
it, and elementwise ones that read it, as the sum with a bias: where the loop read rows of x it reads rows of y.
Input and output: jaxprs; those in loops, branches, replicas too. Products stay that `jax.checkpoint` computes again,
those of a stage, and those whose results for all iterations cost more bytes than the supersteps that they save.
Products whose sum alone a loop returns, as gradients of weights, are computed behind it: see `sunk_products`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from math import inf
from typing import Any

import jax

from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    is_on_host,
    jaxpr_as_fun,
    part_of,
    trace,
)
from ipujax.lowering.jaxpr import (
    HOLDERS,
    Rewrite,
    elements_of,
    everywhere,
    primitive_names,
    scan_body,
    spliced,
    stage_name,
    substituted,
    value_bytes,
    variables,
    variables_read,
    with_equations,
    with_inner,
    with_scan_body,
)
from ipujax.lowering.passes.stacked_rows import with_stacked_rows
from ipujax.lowering.passes.sunk_products import WIDE_BYTES, sunk
from ipujax.lowering.primitives import is_matrix_product, record_of
from ipujax.lowering.source_info import name_stack, with_caller
from ipujax.runtime.graph import BYTE_COST_CYCLES
from ipujax.runtime.target import PRESETS
from ipujax.runtime.tensor import REMATERIALISED

NUM_TILES = PRESETS["mk2"].tiles_per_ipu  # of programs that know no machine
_SUPERSTEP_CYCLES = 350  # of an LSTM's smallest supersteps: sync 126, exchange 118, start of vertices 107; simulated
VIEWS = frozenset(("view", "part"))
_BEFORE_A_PRODUCT = VIEWS | {"joined", "elementwise", "product"}


def hoist_products(
    jaxpr: ClosedJaxpr,
    byte_cost: float = BYTE_COST_CYCLES,
    *,
    num_tiles: int = NUM_TILES,
    keeps_loops: bool = False,
) -> ClosedJaxpr:
    """Returns an equal jaxpr, with products in loops computed as large ones before or behind them, as memory allows.

    Args:
        jaxpr: the jaxpr, without calls.
        byte_cost: cost per byte on the fullest tile, in cycles.
        num_tiles: tiles over which results are spread.
        keeps_loops: whether all loops stay as they are: where they may read rows of arguments in streaming memory, or
            memory is short.
    """
    if keeps_loops or "scan" not in primitive_names(jaxpr.jaxpr):
        return jaxpr
    most_bytes = most_kept_bytes(byte_cost, num_tiles)

    def rewritten(body: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
        """A jaxpr whose loops have no such products or sums; `rewrite` does the same to the jaxprs of its equations."""
        eqns = list[JaxprEqn]()
        zeros = {var for eqn in body.jaxpr.eqns if _is_zero(eqn) for var in eqn.outvars}
        for eqn in body.jaxpr.eqns:
            inner = with_inner(eqn, rewrite) if eqn.primitive.name in HOLDERS else eqn
            if inner.primitive.name == "scan":
                # Rows that the body reads at its counter become inputs of the loop, so that their products are seen.
                *stacking, loop = with_stacked_rows(inner)
                # Sums of products, of carries that begin with zeros, move behind the loop, which may become two; other
                # products then move before it. The other way round a loop that adds these products would stay.
                loops, behind = sunk(loop, most_bytes, zeros)
                moved = (*stacking, *(each for loop in loops for each in _hoisted(loop, most_bytes)), *behind)
                eqns += [_in_scopes_of(inner, eqn) for eqn in moved]
            else:
                eqns.append(inner)
        return with_equations(body, eqns)

    return everywhere(rewritten)(jaxpr)


def _in_scopes_of(loop: JaxprEqn, eqn: JaxprEqn) -> JaxprEqn:
    """An equation that moves out of a loop, with the loop's scopes around its own; one made of the loop has them."""
    is_loop = eqn.source_info is loop.source_info
    return eqn if is_loop else with_caller(eqn, loop, keep_line=True)


def _is_zero(eqn: JaxprEqn) -> bool:
    """True for an equation that makes an array of zeros."""
    return eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal) and eqn.invars[0].val == 0


def most_kept_bytes(byte_cost: float, num_tiles: int) -> float:
    """Bytes of a result, on all tiles, that cost as much while they are kept as the supersteps that compute it."""
    return _SUPERSTEP_CYCLES * num_tiles / byte_cost if byte_cost else inf


@dataclass(slots=True)
class _Movable:
    """Values of a body that can be computed before the loop.

    Args:
        once: those that are equal in all iterations, constants of the loop among them.
        by_row: those of a row of stacks, and maybe of values in `once`.
        makers: equation of each value that is no input.
        concatenations: equation of each concatenation that cannot be computed before.
    """

    once: set[Var]
    by_row: set[Var]
    makers: dict[Var, JaxprEqn] = field(default_factory=dict)
    concatenations: dict[Var, JaxprEqn] = field(default_factory=dict)

    def add(self, eqn: JaxprEqn) -> None:
        """Adds the results of an equation of movable operands."""
        read = variables_read(eqn)
        results = self.once if self.once.issuperset(read) else self.by_row
        results.update(eqn.outvars)
        self.makers.update(dict.fromkeys(eqn.outvars, eqn))

    def holds(self, atoms: Iterable[Atom]) -> bool:
        """True if all variables among the operands are movable."""
        return all(var in self.once or var in self.by_row for var in variables(atoms))


def _hoisted(scan: JaxprEqn, most_bytes: float) -> list[JaxprEqn]:
    """The equations that a loop does not have to compute itself, and behind them the loop without them.

    Args:
        scan: the loop.
        most_bytes: upper bound of the bytes, on all tiles, of a hoisted equation's result in one iteration.
    """
    inside = scan_body(scan.params)
    body = inside.jaxpr.jaxpr
    constants, stacks = inside.inputs.constants, inside.inputs.stacks  # slices of the body's inputs
    movable = _Movable(once=set(body.invars[constants]), by_row=set(body.invars[stacks]))
    eqns = list[JaxprEqn]()
    for original in body.eqns:
        for eqn in _with_split_product(original, movable, most_bytes):
            eqns.append(eqn)
            if may_move(eqn) and movable.holds(eqn.invars) and is_cheap_to_keep(eqn, most_bytes):
                movable.add(eqn)
            elif eqn.primitive.name == "concatenate":  # a product of it with a constant may be split, see above
                movable.concatenations[eqn.outvars[0]] = eqn
    hoisted = _hoisted_equations(eqns, movable)
    if not hoisted or scan.params["length"] < 2:
        return [scan]
    jaxpr = ClosedJaxpr(body.replace(eqns=eqns), inside.jaxpr.consts)
    scan = scan.replace(params=with_scan_body(scan.params, jaxpr, 0))
    before = _Before(scan, movable, dict(zip(body.invars, scan.invars, strict=True)))
    return before.split(hoisted)


def _with_split_product(eqn: JaxprEqn, movable: _Movable, most_bytes: float) -> list[JaxprEqn]:
    """A product of [x, h] with a constant as the sum of those of x and of h, where one may move; else itself."""
    lhs = eqn.invars[0] if is_matrix_product(eqn) else None
    joining = movable.concatenations.get(lhs) if isinstance(lhs, Var) else None
    if joining is None or not (may_move(eqn) and is_cheap_to_keep(eqn, most_bytes)):
        return [eqn]
    ((contracted, rhs_contracted), _) = eqn.params["dimension_numbers"]
    dim = joining.params["dimension"]
    rhs = eqn.invars[1]
    aval: Any = eqn.outvars[0].aval
    is_movable = movable.holds([rhs]) and any(movable.holds([part]) for part in joining.invars)
    # A sum of halves would be rounded once more.
    if dim not in contracted or not is_movable or aval.dtype.itemsize < WIDE_BYTES:
        return [eqn]
    rhs_dim = rhs_contracted[contracted.index(dim)]

    def sum_of_products(rhs: jax.Array, *lhs_parts: jax.Array) -> jax.Array:
        starts = accumulate((lhs.shape[dim] for lhs in lhs_parts), initial=0)
        rhs_parts = [
            jax.lax.slice_in_dim(rhs, start, start + lhs.shape[dim], axis=rhs_dim)
            for lhs, start in zip(lhs_parts, starts, strict=False)
        ]
        return reduce(
            jax.lax.add, (eqn.primitive.bind(*pair, **eqn.params) for pair in zip(lhs_parts, rhs_parts, strict=True))
        )

    operands = [rhs, *joining.invars]
    jaxpr = trace(sum_of_products, [atom.aval for atom in operands], {}, ()).jaxpr.jaxpr
    table = {**dict(zip(jaxpr.invars, operands, strict=True)), jaxpr.outvars[0]: eqn.outvars[0]}
    return [part.replace(source_info=eqn.source_info) for part in spliced(jaxpr, table)[0]]


def may_move(eqn: JaxprEqn) -> bool:
    """True for views, elementwise equations and products on the chip: of no stage, and not of a `jax.checkpoint`."""
    is_on_chip = not any(is_on_host(var.aval) for var in (*eqn.invars, *eqn.outvars))
    is_movable = record_of(eqn).cost in _BEFORE_A_PRODUCT and not eqn.effects and bool(variables_read(eqn))
    is_bound = stage_name(eqn).stage is not None or REMATERIALISED in name_stack(eqn)
    return is_on_chip and is_movable and not is_bound


def is_cheap_to_keep(eqn: JaxprEqn, most_bytes: float) -> bool:
    """True if the results of an equation have at most so many bytes, on all tiles."""
    return sum(value_bytes(var.aval) for var in eqn.outvars) <= most_bytes


def _hoisted_equations(eqns: Sequence[JaxprEqn], movable: _Movable) -> list[JaxprEqn]:
    """Movable products, what they read, and elementwise equations that read them, in order.

    Others stay in the loop: only a product gains by having the rows of all iterations at once. An elementwise equation
    behind one is hoisted if its result has as many elements, since that is kept instead.
    """
    hoisted_ids = set[int]()

    def move(eqn: JaxprEqn) -> None:
        """Adds an equation to the hoisted ones, and all that its operands are computed by."""
        if id(eqn) not in hoisted_ids:
            hoisted_ids.add(id(eqn))
            for maker in makers_of(eqn):
                move(maker)

    def makers_of(eqn: JaxprEqn) -> list[JaxprEqn]:
        return [movable.makers[var] for var in variables_read(eqn) if var in movable.makers]

    for eqn in eqns:
        if eqn.outvars[:1] and eqn.outvars[0] in movable.makers:  # it has results, and is movable
            reads_product = any(id(maker) in hoisted_ids and _is_as_large(maker, eqn) for maker in makers_of(eqn))
            if record_of(eqn).cost == "product" or (record_of(eqn).is_elementwise and reads_product):
                move(eqn)
    return [eqn for eqn in eqns if id(eqn) in hoisted_ids]


def _is_as_large(maker: JaxprEqn, reader: JaxprEqn) -> bool:
    """True if the result of an equation has as many elements as that of its reader, and is not only a view."""
    sizes = [elements_of(eqn.outvars[0]) for eqn in (maker, reader)]
    return sizes[0] == sizes[1] and record_of(maker).cost not in VIEWS


@dataclass(frozen=True, slots=True)
class _Before:
    """Part of a loop that is computed before it.

    Args:
        scan: the loop.
        movable: values that can be computed before it.
        operands: what each input of its body comes from: constants, initial carries and stacks.
    """

    scan: JaxprEqn
    movable: _Movable
    operands: Mapping[Var, Atom]

    def split(self, hoisted: Sequence[JaxprEqn]) -> list[JaxprEqn]:
        """The hoisted equations, for all rows, and the loop of the others.

        What is equal in all iterations is computed once, and a constant of the new loop. What is computed of rows of
        stacks is computed for all rows at once (`vmap`), and a stack that the new loop reads.
        """
        inside = scan_body(self.scan.params)
        body = inside.jaxpr.jaxpr
        ids = set(map(id, hoisted))
        remaining = [eqn for eqn in body.eqns if id(eqn) not in ids]
        # Variables that the new loop reads.
        read = {var for eqn in remaining for var in variables_read(eqn)}.union(variables(body.outvars))
        results = [var for eqn in hoisted for var in eqn.outvars if var in read]
        made_once = [eqn for eqn in hoisted if eqn.outvars[0] in self.movable.once]
        by_row = [eqn for eqn in hoisted if eqn.outvars[0] in self.movable.by_row]
        table = dict(self.operands)  # variables of the body → what they are outside of the loop
        eqns, _ = spliced(body.replace(eqns=made_once, outvars=[]), table)
        for old, new in zip(made_once, eqns, strict=True):
            table.update(zip(old.outvars, new.outvars, strict=True))
        rows = [var for var in results if var in self.movable.by_row]
        stacking, stacks = self._for_all_rows(body, by_row, rows, table)
        table.update(zip(rows, stacks, strict=True))
        read_stacks = [var for var in body.invars[inside.inputs.stacks] if var in read]
        made_constants = [var for var in results if var in self.movable.once]
        constants = [*body.invars[inside.inputs.constants], *made_constants]
        inputs = [*constants, *body.invars[inside.inputs.carries], *read_stacks, *rows]
        names = body.debug_info.with_unknown_names()
        jaxpr = ClosedJaxpr(body.replace(invars=inputs, eqns=remaining, debug_info=names), inside.jaxpr.consts)
        params = with_scan_body(self.scan.params, jaxpr, len(made_constants))
        loop = self.scan.replace(params=params, invars=[substituted(var, table) for var in inputs])
        return [*eqns, *stacking, loop]

    def _for_all_rows(
        self, body: Jaxpr, eqns: list[JaxprEqn], results: Sequence[Var], table: Mapping[Var, Atom]
    ) -> tuple[list[JaxprEqn], list[Atom]]:
        """Equations that compute rows, mapped over all rows; and the stacks of their results.

        Args:
            body: body of the loop.
            eqns: equations of the body, for one row.
            results: variables of the body whose stacks are needed.
            table: what replaces stacks, constants and values that are equal in all iterations, outside of the loop.
        """
        computed = {var for eqn in eqns for var in eqn.outvars}
        inputs = list(dict.fromkeys(var for eqn in eqns for var in variables_read(eqn) if var not in computed))
        axes = [0 if var in self.movable.by_row else None for var in inputs]  # rows are dimension 0 of a stack
        one_row = jaxpr_as_fun(part_of(body, inputs, results, eqns))
        every_row = jax.vmap(one_row, in_axes=axes, axis_size=self.scan.params["length"])
        operands = [substituted(var, table) for var in inputs]
        stacked = trace(every_row, [atom.aval for atom in operands], {}, ()).jaxpr
        return spliced(stacked.jaxpr, dict(zip(stacked.jaxpr.invars, operands, strict=True)))
