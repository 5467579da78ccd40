"""Cuts stacks along their first axis, and all that is computed of them row by row, into shards.

Input: a jaxpr, and at which rows some of its values are cut. Output: a jaxpr of the same numbers in which they come in
shards, inputs and results too:

    h, ys = scan[length=24] h p            h0, y0 = scan[length=6] h p0;  h1, y1 = scan[length=6] h0 p1;  …
    h, gs = scan[length=24 reverse] h ys   h3, g3 = scan[length=6 reverse] h y3;  …;  h0, g0 = scan[…] h1 y0
    m = mul 0.9 gs                         m0 = mul 0.9 g0;  …;  m3 = mul 0.9 g3

`spread` finds what goes with a stack: whatever row_rules says has the same rows. Before an equation that mixes rows the
shards are concatenated, behind it results are sliced where needed; both are views once they are lowered.

Limits: a reduction over rows is reassociated: that of each shard, then of all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jax import lax

from ipujax.lowering.gcl import MONOIDS
from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    new_jaxpr_eqn,
    with_rows,
)
from ipujax.lowering.passes import all_reduce_p
from ipujax.lowering.pipelining.row_rules import COMBINES, Rows, params_for, rows_of

Bounds = tuple[int, ...]  # 0 = first row, …, number of rows


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of an equation in a cut jaxpr.

    Args:
        number: the equation of the whole.
        first: its first row; 0 of one that is not cut.
        rows: how many rows it does; 0 of one that is not cut.
    """

    number: int
    first: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class CutJaxpr:
    """A jaxpr whose inputs and results may come in shards, one after the other.

    Args:
        jaxpr: the jaxpr, with an input for each shard.
        inputs: for each input of the whole where it is cut, None where it is not.
        outputs: the same for results.
        sources: the origin of each of its equations; None for concatenations and slices of shards.
    """

    jaxpr: ClosedJaxpr
    inputs: tuple[Bounds | None, ...]
    outputs: tuple[Bounds | None, ...]
    sources: tuple[Source | None, ...]


@dataclass(frozen=True, slots=True)
class Replacement:
    """An equation that takes the place of another, with operands and results in shards.

    Args:
        inputs: for each operand of the other where it is cut.
        outputs: for each result.
        params: its parameters.
    """

    inputs: tuple[Bounds | None, ...]
    outputs: tuple[Bounds | None, ...]
    params: Mapping[str, Any]


def uncut(jaxpr: ClosedJaxpr) -> CutJaxpr:
    """A jaxpr without cuts."""
    sources = tuple(map(Source, range(len(jaxpr.jaxpr.eqns))))
    return CutJaxpr(jaxpr, (None,) * len(jaxpr.in_avals), (None,) * len(jaxpr.out_avals), sources)


def num_shards(bounds: Bounds | None) -> int:
    """Number of row shards."""
    return 1 if bounds is None else len(bounds) - 1


def spread(jaxpr: Jaxpr, seeds: Mapping[Var, Bounds]) -> dict[Var, Bounds]:
    """Bounds of all values with the same rows as some that are cut; of several bounds the first found.

    Args:
        jaxpr: what computes them.
        seeds: where some of its values are cut.
    """
    links: dict[Var, list[list[Var]]] = {}
    for eqn in jaxpr.eqns:
        for together in _together(eqn):
            for var in together:
                links.setdefault(var, []).append(together)
    found, waiting = dict(seeds), list(seeds)
    while waiting:
        var = waiting.pop()
        for together in links.get(var, ()):
            for other in together:
                if other not in found:
                    found[other] = found[var]
                    waiting.append(other)
    return found


def _together(eqn: JaxprEqn) -> list[list[Var]]:
    """The variables of an equation that have the same rows."""
    rows = rows_of(eqn)
    if rows is None or rows.kind == "combine":
        return []
    given = [atom for atom, has in zip(eqn.invars, rows.operands, strict=True) if has]
    made = [var for var, has in zip(eqn.outvars, rows.results, strict=True) if has]
    if rows.kind == "sums":
        return [[x, y] for x, y in zip(given, made, strict=True) if not isinstance(x, Literal)]
    return [[atom for atom in (*given, *made) if not isinstance(atom, Literal)]]


def cut(
    jaxpr: ClosedJaxpr,
    bounds: Mapping[Var, Bounds],
    whole: Collection[Var] = (),
    replaced: Mapping[int, Replacement] | None = None,
) -> CutJaxpr:
    """Cuts values of a jaxpr into shards.

    Args:
        jaxpr: what computes them.
        bounds: where they are cut, as `spread` has it.
        whole: inputs and results that stay whole.
        replaced: equations that are replaced, by number.
    """
    return _Cutter(jaxpr, bounds, set(whole), replaced or {}).run()


class _Cutter:
    """Cuts one jaxpr; a value is known whole, in shards, or both."""

    def __init__(
        self, jaxpr: ClosedJaxpr, bounds: Mapping[Var, Bounds], whole: set[Var], replaced: Mapping[int, Replacement]
    ) -> None:
        self._jaxpr, self._bounds, self._keep, self._replaced = jaxpr, bounds, whole, replaced
        self._wholes: dict[Var, Var] = {var: var for var in jaxpr.jaxpr.constvars}
        self._shards: dict[tuple[Var, Bounds], list[Var]] = {}
        self._eqns: list[JaxprEqn] = []
        self._sources: list[Source | None] = []

    def run(self) -> CutJaxpr:
        body = self._jaxpr.jaxpr
        inputs = tuple(map(self._cut_at, body.invars))
        invars = [var for var, at in zip(body.invars, inputs, strict=True) for var in self._made(var, at)]
        for n, eqn in enumerate(body.eqns):
            if n in self._replaced:
                self._replace(eqn, self._replaced[n], n)
            else:
                self._equation(eqn, rows_of(eqn), n)
        outputs = tuple(map(self._cut_at, body.outvars))
        last = body.eqns[-1] if body.eqns else None
        outvars = [atom for each, at in zip(body.outvars, outputs, strict=True) for atom in self._read(each, at, last)]
        is_whole = all(at is None for at in (*inputs, *outputs))
        names = body.debug_info if is_whole else body.debug_info.with_unknown_names()
        done = body.replace(invars=invars, outvars=outvars, eqns=self._eqns, debug_info=names)
        return CutJaxpr(ClosedJaxpr(done, self._jaxpr.consts), inputs, outputs, tuple(self._sources))

    def _cut_at(self, atom: Atom) -> Bounds | None:
        """Where an input or a result is cut."""
        return None if isinstance(atom, Literal) or atom in self._keep else self._bounds.get(atom)

    # --- values ---

    def _made(self, var: Var, bounds: Bounds | None) -> list[Var]:
        """New variables for a value that is made in shards, or whole."""
        if bounds is None:
            self._wholes[var] = var
            return [var]
        made = self._shards[var, bounds] = shards_of(var, bounds)
        return made

    def _read(self, atom: Atom, bounds: Bounds | None, like: JaxprEqn | None) -> Sequence[Atom]:
        """A value in shards, or whole; what puts it together or takes it apart comes from where `like` does."""
        if isinstance(atom, Literal):
            return [atom]
        if bounds is None:
            return [self._whole(atom, like)]
        if (atom, bounds) not in self._shards:
            whole = self._whole(atom, like)
            parts = self._made(atom, bounds)
            for part, (a, b) in zip(parts, pairwise(bounds), strict=True):
                self._add(slice_of(whole, part, a, b, like), None)
        return self._shards[atom, bounds]

    def _whole(self, var: Var, like: JaxprEqn | None) -> Var:
        if var not in self._wholes:
            parts = next(parts for (known, _), parts in self._shards.items() if known is var)
            self._wholes[var] = Var(var.aval)
            self._add(join_of(parts, self._wholes[var], like), None)
        return self._wholes[var]

    # --- equations ---

    def _add(self, eqn: JaxprEqn, source: Source | None) -> None:
        self._eqns.append(eqn)
        self._sources.append(source)

    def _equation(self, eqn: JaxprEqn, rows: Rows | None, n: int) -> None:
        """Adds an equation, or one for each shard."""
        if rows is not None and rows.kind == "sums":
            self._sums(eqn, n)
            return
        bounds = None if rows is None else self._rows_cut_at(eqn, rows)
        if rows is None or bounds is None:
            invars = [atom for each in eqn.invars for atom in self._read(each, None, eqn)]
            self._wholes.update((var, var) for var in eqn.outvars)
            self._add(eqn.replace(invars=invars), Source(n))
            return
        {"each": self._each, "chain": self._chain, "combine": self._combine}[rows.kind](eqn, rows, bounds, n)

    def _rows_cut_at(self, eqn: JaxprEqn, rows: Rows) -> Bounds | None:
        atoms = [x for x, has in zip((*eqn.outvars, *eqn.invars), (*rows.results, *rows.operands), strict=True) if has]
        return next((self._bounds[x] for x in atoms if not isinstance(x, Literal) and x in self._bounds), None)

    def _operands(self, eqn: JaxprEqn, rows: Rows, bounds: Bounds) -> list[list[Atom]]:
        """The operands of each shard."""
        flags = zip(eqn.invars, rows.operands, strict=True)
        given = [self._read(atom, bounds if has else None, eqn) for atom, has in flags]
        return [[x[k] if len(x) > 1 else x[0] for x in given] for k in range(len(bounds) - 1)]

    def _each(self, eqn: JaxprEqn, rows: Rows, bounds: Bounds, n: int) -> None:
        operands = self._operands(eqn, rows, bounds)
        results = [self._made(var, bounds) for var in eqn.outvars]
        for k, (a, b) in enumerate(pairwise(bounds)):
            outvars = [parts[k] for parts in results]
            self._add(
                eqn.replace(invars=operands[k], outvars=outvars, params=params_for(eqn, b - a)), Source(n, a, b - a)
            )

    def _chain(self, eqn: JaxprEqn, rows: Rows, bounds: Bounds, n: int) -> None:
        operands = self._operands(eqn, rows, bounds)
        consts, carried = eqn.params["num_consts"], eqn.params["num_carry"]
        stacks = [self._made(var, bounds) for var in eqn.outvars[carried:]]
        state = operands[0][consts : consts + carried]
        spans = list(enumerate(pairwise(bounds)))
        for k, (a, b) in reversed(spans) if eqn.params["reverse"] else spans:
            invars = [*operands[k][:consts], *state, *operands[k][consts + carried :]]
            following = [Var(var.aval) for var in eqn.outvars[:carried]]
            outvars = [*following, *(parts[k] for parts in stacks)]
            self._add(eqn.replace(invars=invars, outvars=outvars, params=params_for(eqn, b - a)), Source(n, a, b - a))
            state = list(following)
        self._wholes.update(zip(eqn.outvars[:carried], state, strict=True))  # type: ignore[arg-type]

    def _combine(self, eqn: JaxprEqn, rows: Rows, bounds: Bounds, n: int) -> None:
        (out,) = eqn.outvars
        total: Var | None = None
        for operands, (a, b) in zip(self._operands(eqn, rows, bounds), pairwise(bounds), strict=True):
            part = Var(out.aval)
            self._add(eqn.replace(invars=operands, outvars=[part]), Source(n, a, b - a))
            if total is not None:
                both = total, part
                part = Var(out.aval)
                self._add(_new(both, [part], COMBINES[eqn.primitive.name], {}, eqn), None)
            total = part
        assert total is not None, "there is at least one shard"
        self._wholes[out] = total

    def _sums(self, eqn: JaxprEqn, n: int) -> None:
        at = [self._bounds.get(var) for var in eqn.outvars]
        invars = [x for atom, each in zip(eqn.invars, at, strict=True) for x in self._read(atom, each, eqn)]
        outvars = [x for var, each in zip(eqn.outvars, at, strict=True) for x in self._made(var, each)]
        if len(outvars) == len(eqn.outvars):
            self._add(eqn.replace(invars=invars, outvars=outvars), Source(n))
            return
        monoid = eqn.params.get("monoid") or MONOIDS[eqn.primitive.name]
        params = {"monoid": monoid, **{name: eqn.params[name] for name in ("axes", "axis_index_groups")}}
        self._add(new_jaxpr_eqn(invars, outvars, all_reduce_p, params, eqn.effects, eqn.source_info), Source(n))

    def _replace(self, eqn: JaxprEqn, new: Replacement, n: int) -> None:
        invars = [x for atom, at in zip(eqn.invars, new.inputs, strict=True) for x in self._read(atom, at, eqn)]
        outvars = [x for var, at in zip(eqn.outvars, new.outputs, strict=True) for x in self._made(var, at)]
        self._add(eqn.replace(invars=invars, outvars=outvars, params=dict(new.params)), Source(n))


def shards_of(atom: Any, bounds: Bounds) -> list[Var]:
    """New variables for the row shards of a value."""
    return [Var(with_rows(atom.aval, b - a)) for a, b in pairwise(bounds)]


def slice_of(whole: Atom, part: Var, first: int, last: int, like: JaxprEqn | None) -> JaxprEqn:
    """The equation that takes rows out of a stack."""
    shape = whole.aval.shape  # type: ignore[attr-defined]
    rest = (0,) * (len(shape) - 1)
    params = {"start_indices": (first, *rest), "limit_indices": (last, *shape[1:]), "strides": None}
    return _new([whole], [part], lax.slice_p, params, like)


def join_of(parts: Sequence[Atom], whole: Var, like: JaxprEqn | None) -> JaxprEqn:
    """The equation that puts shards of a stack together."""
    return _new(parts, [whole], lax.concatenate_p, {"dimension": 0}, like)


def _new(
    invars: Sequence[Atom],
    outvars: Sequence[Var],
    primitive: Primitive,
    params: dict[str, Any],
    like: JaxprEqn | None,
) -> JaxprEqn:
    info = () if like is None else (like.source_info,)
    return new_jaxpr_eqn(list(invars), list(outvars), primitive, params, frozenset(), *info)
