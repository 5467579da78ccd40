"""Shards: cuts stacks along their first axis, and all values computed from them row by row.

Input: a jaxpr, and bounds of rows at which some of its values are cut. Output: a jaxpr of the same numbers in which
these values, inputs and results included, come in shards:

    h, ys = scan[length=24] h p            h0, y0 = scan[length=6] h p0;  h1, y1 = scan[length=6] h0 p1;  …
    h, gs = scan[length=24 reverse] h ys   h3, g3 = scan[length=6 reverse] h y3;  …;  h0, g0 = scan[…] h1 y0
    m = mul 0.9 gs                         m0 = mul 0.9 g0;  …;  m3 = mul 0.9 g3

`spread` finds the values that have the same rows as a stack, by `rows_of`. An equation that mixes rows gets shards
concatenated, and its results are sliced where needed; both are views after lowering. Equations go row by row, along the
first axis of their operands and results, in one of these ways:

    each      row i of the result comes from row i of the operands: x * y, casts, transposes of the other axes
    chain     a `lax.scan`: rows are its iterations, and the carry goes from row to row
    combine   a reduction over rows, which combines those of groups of rows
    sums      a sum over replicas of several values: row i of each result comes from row i of its own operand

Limits: a reduction over rows is reassociated: over each shard, then over all. Equations whose factors are unknown mix
rows; so do loops and branches, except a scan of as many iterations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal as OneOf

from jax import lax

from ipujax.lowering.gcl import MONOIDS, is_collective, is_reduction
from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    new_jaxpr_eqn,
    shape_of,
    with_rows,
)
from ipujax.lowering.jaxpr import scan_body
from ipujax.lowering.passes import all_reduce_p
from ipujax.lowering.primitives import Factors, Labels, record_of

Kind = OneOf["each", "chain", "combine", "sums"]

COMBINES: dict[str, Primitive] = {
    "add": lax.add_p,
    "mul": lax.mul_p,
    "max": lax.max_p,
    "min": lax.min_p,
    "and": lax.and_p,
    "or": lax.or_p,
    "xor": lax.xor_p,
}
_OF_ROWS = frozenset(("remote_load", "remote_fetch", "remote_take", "remote_hand", "remote_store", "remote_wait"))


Bounds = tuple[int, ...]  # rows at which a stack is cut: 0, the first row of each other shard, the number of rows


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of an equation in a cut jaxpr."""

    number: int  # index of the equation in the uncut jaxpr
    first: int = 0  # its first row; 0 for an equation that is not cut
    rows: int = 0  # number of its rows; 0 for an equation that is not cut


@dataclass(frozen=True, slots=True)
class CutJaxpr:
    """A jaxpr whose inputs and results may come in shards, one after the other.

    Args:
        jaxpr: the jaxpr, with an input for each shard.
        inputs: bounds of each input of the uncut jaxpr, None for one that is not cut.
        outputs: bounds of each result.
        sources: origin of each equation; None for concatenations and slices of shards.
    """

    jaxpr: ClosedJaxpr
    inputs: tuple[Bounds | None, ...]
    outputs: tuple[Bounds | None, ...]
    sources: tuple[Source | None, ...]


@dataclass(frozen=True, slots=True)
class Replacement:
    """An equation that replaces another, with operands and results in shards."""

    inputs: tuple[Bounds | None, ...]  # bounds of each operand of the other
    outputs: tuple[Bounds | None, ...]  # bounds of each result
    params: Mapping[str, Any]


def uncut(jaxpr: ClosedJaxpr) -> CutJaxpr:
    """A jaxpr without cuts."""
    sources = tuple(map(Source, range(len(jaxpr.jaxpr.eqns))))
    return CutJaxpr(jaxpr, (None,) * len(jaxpr.in_avals), (None,) * len(jaxpr.out_avals), sources)


def num_shards(bounds: Bounds | None) -> int:
    """Number of shards; 1 for a value that is not cut."""
    return 1 if bounds is None else len(bounds) - 1


def spread(jaxpr: Jaxpr, seeds: Mapping[Var, Bounds]) -> dict[Var, Bounds]:
    """Bounds of all values that have the same rows as a seed: row i is computed from row i, or row i from it.

    A value that has the rows of seeds with different bounds gets those of one of them. Any will do, as `cut` reads
    values in shards of other bounds too, only at the cost of concatenating and slicing.
    """
    links: dict[Var, list[list[Var]]] = {}
    for eqn in jaxpr.eqns:
        for group in _row_groups(eqn):
            for var in group:
                links.setdefault(var, []).append(group)
    bounds = dict(seeds)
    pending = list(seeds)
    while pending:
        var = pending.pop()
        for group in links.get(var, ()):
            for other in group:
                if other not in bounds:
                    bounds[other] = bounds[var]
                    pending.append(other)
    return bounds


def _row_groups(eqn: JaxprEqn) -> list[list[Var]]:
    """Groups of variables of an equation whose rows it computes from each other; none if it mixes rows."""
    rows = rows_of(eqn)
    if rows is None or rows.kind == "combine":
        return []
    operands = [atom for atom, has_rows in zip(eqn.invars, rows.operands, strict=True) if has_rows]
    results = [var for var, has_rows in zip(eqn.outvars, rows.results, strict=True) if has_rows]
    if rows.kind == "sums":  # each result is the sum of its own operand
        return [[x, y] for x, y in zip(operands, results, strict=True) if not isinstance(x, Literal)]
    return [[atom for atom in (*operands, *results) if not isinstance(atom, Literal)]]


def cut(
    jaxpr: ClosedJaxpr,
    bounds: Mapping[Var, Bounds],
    unsplit: Collection[Var] = (),
    replaced: Mapping[int, Replacement] | None = None,
) -> CutJaxpr:
    """Cuts a jaxpr.

    Args:
        jaxpr: the uncut jaxpr.
        bounds: of the values to be cut.
        unsplit: inputs and results that are not.
        replaced: equations in place of others, by the index of these.
    """
    return _Cutter(jaxpr, bounds, set(unsplit), replaced or {}).run()


class _Cutter:
    """Cuts one jaxpr.

    A value is defined unsplit, in shards of its bounds, or, by a replaced equation, of other bounds. If it is read in
    another form, that is added once: concatenated shards (`_unsplit`), or slices of the unsplit value (`_shards`).
    """

    def __init__(
        self, jaxpr: ClosedJaxpr, bounds: Mapping[Var, Bounds], unsplit: set[Var], replaced: Mapping[int, Replacement]
    ) -> None:
        """Takes the arguments of `cut`; a `Var` is a value of the uncut jaxpr, or one that stands for it in the cut."""
        self._jaxpr = jaxpr
        self._bounds = bounds
        self._kept_unsplit = unsplit
        self._replaced = replaced
        # By variable of the uncut jaxpr those of the cut one: unsplit, and its shards at some bounds.
        self._unsplit: dict[Var, Var] = {var: var for var in jaxpr.jaxpr.constvars}
        self._shards: dict[tuple[Var, Bounds], list[Var]] = {}
        self._eqns: list[JaxprEqn] = []  # of the cut jaxpr
        self._sources: list[Source | None] = []  # of each of these, see `CutJaxpr`

    def run(self) -> CutJaxpr:
        """Cut the inputs, then the equations in order, then the results."""
        body = self._jaxpr.jaxpr
        inputs = tuple(map(self._bounds_of, body.invars))
        invars = self._define_all(body.invars, inputs)
        for n, eqn in enumerate(body.eqns):
            if n in self._replaced:
                self._add_replacement(eqn, self._replaced[n], n)
            else:
                self._add_in_shards(eqn, rows_of(eqn), n)
        outputs = tuple(map(self._bounds_of, body.outvars))
        last_eqn = body.eqns[-1] if body.eqns else None
        outvars = self._read_all(body.outvars, outputs, last_eqn)
        is_uncut = all(bounds is None for bounds in (*inputs, *outputs))
        # Names of inputs and results fit as long as there are as many.
        names = body.debug_info if is_uncut else body.debug_info.with_unknown_names()
        body_of_cut = body.replace(invars=invars, outvars=outvars, eqns=self._eqns, debug_info=names)
        return CutJaxpr(ClosedJaxpr(body_of_cut, self._jaxpr.consts), inputs, outputs, tuple(self._sources))

    def _bounds_of(self, atom: Atom) -> Bounds | None:
        """Bounds of an input or a result; None for one that is not cut."""
        return None if isinstance(atom, Literal) or atom in self._kept_unsplit else self._bounds.get(atom)

    def _define(self, var: Var, bounds: Bounds | None) -> list[Var]:
        """New variables for a value that is defined in shards, or unsplit."""
        if bounds is None:
            self._unsplit[var] = var
            return [var]
        shards = self._shards[var, bounds] = shards_of(var, bounds)
        return shards

    def _read(self, atom: Atom, bounds: Bounds | None, like: JaxprEqn | None) -> Sequence[Atom]:
        """A value in shards, or unsplit; concatenations and slices have the source line of `like`."""
        if isinstance(atom, Literal):
            return [atom]
        if bounds is None:
            return [self._read_unsplit(atom, like)]
        if (atom, bounds) not in self._shards:
            unsplit = self._read_unsplit(atom, like)
            shards = self._define(atom, bounds)
            for shard, (a, b) in zip(shards, pairwise(bounds), strict=True):
                self._add(slice_eqn(unsplit, shard, a, b, like), None)
        return self._shards[atom, bounds]

    def _define_all(self, variables: Sequence[Var], bounds: Sequence[Bounds | None]) -> list[Var]:
        return [x for var, var_bounds in zip(variables, bounds, strict=True) for x in self._define(var, var_bounds)]

    def _read_all(self, atoms: Sequence[Atom], bounds: Sequence[Bounds | None], like: JaxprEqn | None) -> list[Atom]:
        pairs = zip(atoms, bounds, strict=True)
        return [x for atom, atom_bounds in pairs for x in self._read(atom, atom_bounds, like)]

    def _read_unsplit(self, var: Var, like: JaxprEqn | None) -> Var:
        """A value unsplit, concatenated if it was defined in shards."""
        if var not in self._unsplit:
            shards = next(shards for (other, _), shards in self._shards.items() if other is var)
            self._unsplit[var] = Var(var.aval)
            self._add(concat_eqn(shards, self._unsplit[var], like), None)
        return self._unsplit[var]

    def _add(self, eqn: JaxprEqn, source: Source | None) -> None:
        self._eqns.append(eqn)
        self._sources.append(source)

    def _add_in_shards(self, eqn: JaxprEqn, rows: Rows | None, n: int) -> None:
        """Adds equation `n`, whose rows are `rows`: one for each shard, or one unsplit if no value with rows is cut."""
        if rows is not None and rows.kind == "sums":  # its operands may be cut at different bounds
            self._add_sums(eqn, n)
            return
        bounds = None if rows is None else self._bounds_of_rows(eqn, rows)
        if rows is None or bounds is None:
            invars = self._read_all(eqn.invars, [None] * len(eqn.invars), eqn)
            self._unsplit.update((var, var) for var in eqn.outvars)
            self._add(eqn.replace(invars=invars), Source(n))
            return
        add = {"each": self._add_rows, "chain": self._add_loops, "combine": self._add_reductions}[rows.kind]
        add(eqn, rows, bounds, n)

    def _bounds_of_rows(self, eqn: JaxprEqn, rows: Rows) -> Bounds | None:
        """Bounds at which the rows of an equation are cut: those of its first result, else operand, that is cut.

        None if no value with rows is cut.
        """
        atoms = [x for x, has in zip((*eqn.outvars, *eqn.invars), (*rows.results, *rows.operands), strict=True) if has]
        return next((self._bounds[x] for x in atoms if not isinstance(x, Literal) and x in self._bounds), None)

    def _operands_of_shards(self, eqn: JaxprEqn, rows: Rows, bounds: Bounds) -> list[list[Atom]]:
        """For each shard of an equation its operands: shards of those that have rows, the others unsplit."""
        pairs = zip(eqn.invars, rows.operands, strict=True)
        pieces = [self._read(atom, bounds if has else None, eqn) for atom, has in pairs]
        return [[x[k] if len(x) > 1 else x[0] for x in pieces] for k in range(len(bounds) - 1)]

    def _add_rows(self, eqn: JaxprEqn, rows: Rows, bounds: Bounds, n: int) -> None:
        """Adds an equation for each shard of its rows, which are computed alone."""
        operands = self._operands_of_shards(eqn, rows, bounds)
        results = [self._define(var, bounds) for var in eqn.outvars]
        for k, (a, b) in enumerate(pairwise(bounds)):
            outvars = [shards[k] for shards in results]
            self._add(
                eqn.replace(invars=operands[k], outvars=outvars, params=params_for(eqn, rows, b - a)),
                Source(n, a, b - a),
            )

    def _add_loops(self, eqn: JaxprEqn, rows: Rows, bounds: Bounds, n: int) -> None:
        """Adds a loop for each shard of a loop's rows, each with the carry of the one before."""
        operands = self._operands_of_shards(eqn, rows, bounds)
        body = scan_body(eqn.params)
        carried = eqn.outvars[body.results.carries]
        stacks = [self._define(var, bounds) for var in eqn.outvars[body.results.stacks]]
        state = operands[0][body.operands.carries]  # as of every shard: carries have no rows
        spans = list(enumerate(pairwise(bounds)))  # a reverse loop runs its last shard first
        for k, (a, b) in reversed(spans) if eqn.params["reverse"] else spans:
            invars = [*operands[k][body.operands.constants], *state, *operands[k][body.operands.stacks]]
            next_state = [Var(var.aval) for var in carried]
            outvars = [*next_state, *(shards[k] for shards in stacks)]
            self._add(
                eqn.replace(invars=invars, outvars=outvars, params=params_for(eqn, rows, b - a)), Source(n, a, b - a)
            )
            state = list(next_state)
        self._unsplit.update(zip(carried, state, strict=True))  # type: ignore[arg-type]

    def _add_reductions(self, eqn: JaxprEqn, rows: Rows, bounds: Bounds, n: int) -> None:
        """Adds a reduction for each shard of its rows, and combines their results to an unsplit one."""
        (out,) = eqn.outvars
        total: Var | None = None
        for operands, (a, b) in zip(self._operands_of_shards(eqn, rows, bounds), pairwise(bounds), strict=True):
            reduced = Var(out.aval)
            self._add(eqn.replace(invars=operands, outvars=[reduced]), Source(n, a, b - a))
            if total is None:
                total = reduced
                continue
            combined = Var(out.aval)
            self._add(_new_eqn([total, reduced], [combined], COMBINES[record_of(eqn).monoid or ""], {}, eqn), None)
            total = combined
        assert total is not None, "there is at least one shard"
        self._unsplit[out] = total

    def _add_sums(self, eqn: JaxprEqn, n: int) -> None:
        """Adds one sum over replicas of all shards of its operands: more shards need no more rounds."""
        bounds = [self._bounds.get(var) for var in eqn.outvars]
        invars = self._read_all(eqn.invars, bounds, eqn)
        outvars = self._define_all(eqn.outvars, bounds)
        if len(outvars) == len(eqn.outvars):
            self._add(eqn.replace(invars=invars, outvars=outvars), Source(n))
            return
        # `all_reduce_p` has any number of operands, which the user's primitive may not have.
        monoid = eqn.params.get("monoid") or MONOIDS[eqn.primitive.name]
        params = {"monoid": monoid, **{name: eqn.params[name] for name in ("axes", "axis_index_groups")}}
        self._add(new_jaxpr_eqn(invars, outvars, all_reduce_p, params, eqn.effects, eqn.source_info), Source(n))

    def _add_replacement(self, eqn: JaxprEqn, new: Replacement, n: int) -> None:
        """Adds in place of equation `n` one with other parameters that reads and defines shards."""
        invars = self._read_all(eqn.invars, new.inputs, eqn)
        outvars = self._define_all(eqn.outvars, new.outputs)
        self._add(eqn.replace(invars=invars, outvars=outvars, params=dict(new.params)), Source(n))


def shards_of(atom: Any, bounds: Bounds) -> list[Var]:
    """New variables for the shards of a value."""
    return [Var(with_rows(atom.aval, b - a)) for a, b in pairwise(bounds)]


def slice_eqn(stack: Atom, shard: Var, first: int, last: int, like: JaxprEqn | None) -> JaxprEqn:
    """The equation that slices rows out of a stack."""
    shape = stack.aval.shape  # type: ignore[attr-defined]
    zeros = (0,) * (len(shape) - 1)
    params = {"start_indices": (first, *zeros), "limit_indices": (last, *shape[1:]), "strides": None}
    return _new_eqn([stack], [shard], lax.slice_p, params, like)


def concat_eqn(shards: Sequence[Atom], stack: Var, like: JaxprEqn | None) -> JaxprEqn:
    """The equation that concatenates the shards of a stack."""
    return _new_eqn(shards, [stack], lax.concatenate_p, {"dimension": 0}, like)


def _new_eqn(
    invars: Sequence[Atom],
    outvars: Sequence[Var],
    primitive: Primitive,
    params: dict[str, Any],
    like: JaxprEqn | None,
) -> JaxprEqn:
    """A new equation without effects, with the source line of `like`."""
    info = () if like is None else (like.source_info,)
    return new_jaxpr_eqn(list(invars), list(outvars), primitive, params, frozenset(), *info)


@dataclass(frozen=True, slots=True)
class Rows:
    """The operands and results of an equation that have rows: slices of a stack along its first axis."""

    kind: Kind  # how rows of results come from rows of operands, see the module
    operands: tuple[bool, ...]  # for each operand whether it has rows
    results: tuple[bool, ...]  # for each result whether it has rows


def rows_of(eqn: JaxprEqn) -> Rows | None:
    """Which operands and results of an equation have rows, slices along their first axis that are computed one by one.

    None if it mixes rows. `Rows.kind` "each": a row of a result comes from that row of the operands; "sums": from that
    row of its own operand.
    """
    if eqn.primitive.name == "scan":
        return _rows_of_scan(eqn)
    if eqn.primitive.name in _OF_ROWS:
        return Rows("each", operands=(True,) * len(eqn.invars), results=(True,) * len(eqn.outvars))
    if is_reduction(eqn):  # over replicas, of each of several operands element by element; a scalar has no rows
        has_rows = tuple(bool(shape_of(atom)) for atom in eqn.invars)
        return Rows("sums", operands=has_rows, results=has_rows)
    record = record_of(eqn)
    has_sharding = eqn.params.get("sharding", eqn.params.get("out_sharding")) is not None
    has_effects = bool(eqn.effects) and not is_collective(eqn)  # that of a collective names its axis
    # A "statement" says where a value is, as a sharding does: that is of the whole value.
    if record.factors is None or record.cost == "statement" or has_sharding or has_effects:
        return None
    factors = record.factors(eqn)
    # `record.is_reduction`: it reduces dimensions of its operand, unlike `is_reduction` above.
    return _rows_computed_alone(factors) or (_rows_reduced(factors) if record.is_reduction else None)


def params_for(eqn: JaxprEqn, rows: Rows, count: int) -> dict[str, Any]:
    """The parameters of an equation that computes only `count` rows of another, whose rows are `rows`."""
    if rows.kind == "chain":
        return {**eqn.params, "length": count, "unroll": min(eqn.params["unroll"], count)}
    operands, results = (
        [(count, *shape_of(x)[1:]) if has else shape_of(x) for x, has in zip(atoms, flags, strict=True)]
        for atoms, flags in ((eqn.invars, rows.operands), (eqn.outvars, rows.results))
    )
    return {**eqn.params, **record_of(eqn).block_params(eqn, operands, results)}


def _rows_computed_alone(factors: Factors) -> Rows | None:
    """Rows of one factor that is the first dimension of all results, and part of no other dimension."""
    first = {_row_factor(labels) for labels in factors.results}
    factor = first.pop() if len(first) == 1 else None
    values = (*factors.operands, *factors.results)
    # Rows of a factor with positions are computed otherwise if they begin at another place.
    if factor is None or factor in factors.positions or any(_is_elsewhere(factor, labels) for labels in values):
        return None
    return Rows("each", operands=_have_rows(factor, factors.operands), results=_have_rows(factor, factors.results))


def _rows_reduced(factors: Factors) -> Rows | None:
    """Rows of a reduction over the first dimension, None of one over other dimensions only."""
    (labels,) = factors.operands
    combined = Rows("combine", operands=(True,), results=(False,))
    return combined if _row_factor(labels) in factors.reductions else None


def _row_factor(labels: Labels) -> int | None:
    """The factor of the first dimension, None if it has several or none."""
    return labels[0][0] if labels and len(labels[0]) == 1 else None


def _is_elsewhere(factor: int, labels: Labels) -> bool:
    """True if a factor runs over another dimension than the first, or over a part of the first."""
    return any(factor in factors and (dim or len(factors) > 1) for dim, factors in enumerate(labels))


def _have_rows(factor: int, values: tuple[Labels, ...]) -> tuple[bool, ...]:
    """For each value whether a factor is its first dimension."""
    return tuple(labels[:1] == ((factor,),) for labels in values)


def _rows_of_scan(eqn: JaxprEqn) -> Rows:
    body = scan_body(eqn.params)
    return Rows("chain", operands=body.operands.are_stacks(), results=body.results.are_stacks())
