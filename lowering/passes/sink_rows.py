"""Pass `sink_rows`: rows of a stack that a loop reads are computed in the loop, which streams the rows they come from.

    x = cast images; y = div x 255.0             scan over rows of images: x = cast row; y = div x 255.0; …
    scan over rows of y: …

A stack that is computed before the loop, row by row, has all of its rows on the tiles at once; arguments have not if
loops stream. Each element is computed by the same equations.
Input: a jaxpr without calls, after `count_loops`. Output: an equal one, where the stacks that loops read are arguments,
or computed otherwise than by rows; one that several loops read is computed in each, which takes fewer cycles than the
transfer of its rows.
Limits: elementwise equations, views and parts, of which loops alone read the results; programs without phases. Stacks
stay that would be computed from as many bytes on the tiles, and constants that a loop reads at its counter more than
once; what is computed of a loop's results stays behind it. XLA may round otherwise in the fusions of the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import eq
from typing import Any

from jax import lax

from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    is_on_host,
    new_equation,
    shape_of,
)
from ipujax.lowering.jaxpr import (
    has_phases,
    primitive_names,
    scan_body,
    stage_name,
    substituted,
    value_bytes,
    variables,
    with_equations,
    with_inner,
    with_scan_body,
)
from ipujax.lowering.passes.dce import dce
from ipujax.lowering.passes.stacked_rows import with_stacked_rows
from ipujax.lowering.primitives import Labels, record_of
from ipujax.lowering.source_info import name_stack
from ipujax.runtime.tensor import REMATERIALISED, is_key_dtype

_CALLS = frozenset(("replicated", "shard_map"))  # those that `inline` leaves
_COSTS = frozenset(("view", "part", "joined", "elementwise", "none"))
_READ_WHOLE = 0  # row count of readers other than loops


def sink_rows(jaxpr: ClosedJaxpr, *, of_loops: bool = False) -> ClosedJaxpr:
    """Returns an equal jaxpr whose loops compute rows of their stacks from rows of arguments.

    Args:
        jaxpr: the jaxpr, without calls.
        of_loops: whether loops stream rows of arguments; else nothing changes.
    """
    if not of_loops or "scan" not in primitive_names(jaxpr.jaxpr) or has_phases(jaxpr.jaxpr):
        return jaxpr
    sunk = _sunk(jaxpr, [True] * len(jaxpr.in_avals))
    return jaxpr if sunk is jaxpr else dce(sunk)


def _sunk(jaxpr: ClosedJaxpr, are_streamed: Sequence[bool]) -> ClosedJaxpr:
    """The jaxpr with loops that compute rows of their stacks; what they computed before is still there.

    Args:
        jaxpr: the jaxpr.
        are_streamed: for each input whether loops may read rows of it from off the chip.
    """
    movable = {var for eqn in jaxpr.eqns if _may_move(eqn) for var in eqn.outvars}
    stacked = with_equations(jaxpr, [each for eqn in jaxpr.eqns for each in _reading_stacks(eqn, movable)])
    # Loops that read stacks need their constants no more.
    jaxpr = jaxpr if stacked is jaxpr else dce(stacked)
    streamed = set(compress(jaxpr.jaxpr.invars, are_streamed))
    makers = _equations_by_row(jaxpr.jaxpr)
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "scan":
            *views, loop = _with_rows_inside(eqn, makers, streamed)
            eqns += [*views, with_inner(loop, partial(_sunk, are_streamed=scan_body(loop.params).inputs.are_stacks()))]
        elif name in _CALLS:
            are_operands_streamed = [isinstance(atom, Var) and atom in streamed for atom in eqn.invars]
            eqns.append(with_inner(eqn, partial(_sunk, are_streamed=are_operands_streamed)))
        else:
            eqns.append(eqn)
    return with_equations(jaxpr, eqns)


def _reading_stacks(eqn: JaxprEqn, movable: set[Var]) -> list[JaxprEqn]:
    """A loop that reads rows of stacks where it read all rows of a constant at its counter, and views of these before.

    Only if `movable` has such a constant, which could be computed by rows; other equations stay as they are.
    """
    if eqn.primitive.name != "scan" or movable.isdisjoint(_constants(eqn)):
        return [eqn]
    *views, loop = with_stacked_rows(eqn)
    keep_rows = all(_operands_with_rows(view, eqn.params["length"]) for view in views)
    return [*views, loop] if keep_rows else [eqn]


def _constants(loop: JaxprEqn) -> list[Var]:
    return variables(loop.invars[scan_body(loop.params).operands.constants])


@dataclass(frozen=True, slots=True)
class _ByRow:
    """An equation that loops may compute for one of their rows.

    Args:
        eqn: the equation, of one result.
        count: number of rows in which loops read its result, along its first dimension of several elements.
        have_rows: for each operand whether it has these rows; others are read whole.
    """

    eqn: JaxprEqn
    count: int
    have_rows: tuple[bool, ...]

    @property
    def stacks(self) -> list[Var]:
        """Operands with rows."""
        return [x for x, has in zip(self.eqn.invars, self.have_rows, strict=True) if has and isinstance(x, Var)]

    @property
    def constants(self) -> list[Var]:
        """Operands that are read whole."""
        return [x for x, has in zip(self.eqn.invars, self.have_rows, strict=True) if not has and isinstance(x, Var)]

    def of_one_row(self, operands: Sequence[Atom], result: Var) -> JaxprEqn:
        """The equation for one row."""
        params = record_of(self.eqn).block_params(self.eqn, [shape_of(x) for x in operands], [shape_of(result)])
        return self.eqn.replace(invars=list(operands), outvars=[result], params={**self.eqn.params, **params})


def _equations_by_row(body: Jaxpr) -> dict[Var, _ByRow]:
    """The equations whose results loops alone read, in equally many rows that are computed alone; the last first."""
    # For each value the numbers of rows in which its readers split it.
    counts: dict[Var, set[int]] = {var: {_READ_WHOLE} for var in variables(body.outvars)}
    makers: dict[Var, _ByRow] = {}
    for eqn in reversed(body.eqns):
        counts_of_operands = [_READ_WHOLE] * len(eqn.invars)
        if eqn.primitive.name == "scan":
            are_stacks = scan_body(eqn.params).operands.are_stacks()
            counts_of_operands = [eqn.params["length"] if is_stack else _READ_WHOLE for is_stack in are_stacks]
        elif not eqn.effects and counts.keys().isdisjoint(eqn.outvars):
            continue  # nothing reads it
        elif len(eqn.outvars) == 1 and len(numbers := counts.get(eqn.outvars[0], set())) == 1 and _may_move(eqn):
            (count,) = numbers
            have_rows = _operands_with_rows(eqn, count) if count > 1 else None
            if have_rows is not None:
                makers[eqn.outvars[0]] = _ByRow(eqn, count, have_rows)
                counts_of_operands = [count if has else _READ_WHOLE for has in have_rows]
        for atom, count in zip(eqn.invars, counts_of_operands, strict=True):
            if isinstance(atom, Var):
                counts.setdefault(atom, set()).add(count)
    return makers


def _may_move(eqn: JaxprEqn) -> bool:
    """True for an elementwise equation or a view, on the chip: of no stage, not of keys, and no recomputed one."""
    record = record_of(eqn)
    if record.cost not in _COSTS or record.factors is None or eqn.effects or eqn.params.get("sharding") is not None:
        return False
    avals: list[Any] = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    is_bound = stage_name(eqn).stage is not None or REMATERIALISED in name_stack(eqn)
    return not is_bound and not any(is_on_host(aval) or is_key_dtype(aval.dtype) for aval in avals)


def _operands_with_rows(eqn: JaxprEqn, count: int) -> tuple[bool, ...] | None:
    """For each operand whether it has rows of which a row of the result is computed; None if rows are not alone."""
    record = record_of(eqn)
    assert record.factors is not None
    factors = record.factors(eqn)
    row = _row_factor(eqn.outvars[0], factors.results[0], factors.sizes)
    if row is None or factors.sizes[row] % count or row in factors.positions:
        return None
    operands = zip(eqn.invars, factors.operands, strict=True)
    have_rows = tuple(_row_factor(atom, labels, factors.sizes) == row for atom, labels in operands)
    # A factor may be the first of one dimension of each operand, and nothing else.
    reads = [sum(labels.count(row) for labels in operand) for operand in factors.operands]
    return have_rows if all(map(eq, reads, have_rows)) else None


def _row_dim(value: Atom) -> int:
    """The dimension along which a value has rows: the first of several elements."""
    return next((dim for dim, size in enumerate(shape_of(value)) if size > 1), 0)


def _row_factor(value: Atom, labels: Labels, sizes: Mapping[int, int]) -> int | None:
    """The major factor of the dimension of rows; None if that is computed whole, or there is none."""
    of_rows = labels[_row_dim(value)] if labels else ()
    return next((factor for factor in of_rows if sizes[factor] > 1), None)


def _with_rows_inside(loop: JaxprEqn, makers: dict[Var, _ByRow], streamed: Collection[Var]) -> list[JaxprEqn]:
    """A loop that computes rows of stacks itself, where that spares bytes on the tiles, behind views that it reads.

    Args:
        loop: a `scan`.
        makers: equations of stacks that may be computed by rows, the last first.
        streamed: values of which a loop may read rows from off the chip.
    """
    inside = scan_body(loop.params)
    pairs = zip(inside.jaxpr.jaxpr.invars[inside.inputs.stacks], loop.invars[inside.operands.stacks], strict=True)
    stacks = {row: stack for row, stack in pairs if isinstance(stack, Var) and stack in makers}
    chains = {stack: _values_behind(stack, makers) for stack in stacks.values()}
    sunk = {row: stack for row, stack in stacks.items() if _spares_bytes(chains[stack], makers, streamed)}
    computed = {var for stack in sunk.values() for var in chains[stack]}
    chain = [makers[var] for var in reversed(makers) if var in computed]
    return _computing_rows(loop, sunk, chain) if sunk else [loop]


def _values_behind(stack: Var, makers: Mapping[Var, _ByRow]) -> list[Var]:
    """A stack, and the values by whose rows its rows are computed."""
    values = [stack]
    for var in values:  # which grows
        values += [x for x in makers[var].stacks if x in makers and x not in values]
    return values


def _spares_bytes(values: Sequence[Var], makers: Mapping[Var, _ByRow], streamed: Collection[Var]) -> bool:
    """True if a stack, the first of `values`, takes more bytes than what it is computed from takes on the tiles."""
    sources = {x for var in values for x in makers[var].stacks if x not in makers and x not in streamed}
    return sum(value_bytes(x.aval) for x in sources) < value_bytes(values[0].aval)


def _computing_rows(loop: JaxprEqn, sunk: Mapping[Var, Var], chain: Sequence[_ByRow]) -> list[JaxprEqn]:
    """A loop that reads rows of other stacks, behind views of these, and computes its own rows by a chain of equations.

    Args:
        loop: a `scan`.
        sunk: the stack that it need not read any more, by the row in its body.
        chain: equations of these stacks, in order.
    """
    count = loop.params["length"]
    inside = scan_body(loop.params)
    body = inside.jaxpr.jaxpr
    pairs = zip(body.invars[inside.inputs.stacks], loop.invars[inside.operands.stacks], strict=True)
    stacks = {row: stack for row, stack in pairs if row not in sunk}
    row_of = {stack: row for row, stack in stacks.items()}
    before: list[JaxprEqn] = []
    eqns: list[JaxprEqn] = []
    # By value outside: what one iteration reads or computes of it, of those with rows and of those that are read whole.
    blocks: dict[Var, Var] = {}
    constants = {var: Var(var.aval) for var in dict.fromkeys(var for maker in chain for var in maker.constants)}
    computed = {maker.eqn.outvars[0] for maker in chain}
    for source in dict.fromkeys(var for maker in chain for var in maker.stacks if var not in computed):
        block_shape = _block_shape(source, count)
        # A block of one row is a row of the stack; others are rows of a view.
        stack = source if shape_of(source)[0] == count else _reshaped(source, (count, *block_shape), before, loop)
        row = row_of.get(stack) or Var(stack.aval.update(shape=shape_of(stack)[1:]))
        stacks[row] = stack
        blocks[source] = _reshaped(row, block_shape, eqns, loop)
    for maker in chain:
        (result,) = maker.eqn.outvars
        tables = [blocks if has_rows else constants for has_rows in maker.have_rows]
        operands = [substituted(atom, table) for atom, table in zip(maker.eqn.invars, tables, strict=True)]
        blocks[result] = Var(result.aval.update(shape=_block_shape(result, count)))
        eqns.append(maker.of_one_row(operands, blocks[result]))
    eqns += [_reshape(blocks[stack], row, loop) for row, stack in sunk.items()]
    places = inside.inputs
    inputs = [*body.invars[places.constants], *constants.values(), *body.invars[places.carries], *stacks]
    operands = [*loop.invars[places.constants], *constants, *loop.invars[places.carries], *stacks.values()]
    names = body.debug_info.with_unknown_names()
    jaxpr = body.replace(invars=inputs, eqns=[*eqns, *body.eqns], debug_info=names)
    params = with_scan_body(loop.params, ClosedJaxpr(jaxpr, inside.jaxpr.consts), len(constants))
    return [*before, loop.replace(invars=operands, params=params)]


def _block_shape(value: Var, count: int) -> tuple[int, ...]:
    """Shape of one of `count` blocks along the dimension of rows."""
    dim = _row_dim(value)
    return tuple(size // count if d == dim else size for d, size in enumerate(shape_of(value)))


def _reshaped(value: Var, shape: tuple[int, ...], eqns: list[JaxprEqn], like: JaxprEqn) -> Var:
    """A value in another shape, whose equation is added to `eqns`; itself if it has that shape."""
    if shape_of(value) == shape:
        return value
    view = Var(value.aval.update(shape=shape))
    eqns.append(_reshape(value, view, like))
    return view


def _reshape(value: Var, view: Var, like: JaxprEqn) -> JaxprEqn:
    """The equation of a view in another shape, at the source of `like`."""
    params = {"new_sizes": shape_of(view), "dimensions": None, "sharding": None}
    return new_equation(lax.reshape_p, [value], [view], params, like)
