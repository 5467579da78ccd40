"""Micro-batches of a step that knows none: its gradients, accumulated over parts of the batch.

    step(params, state, batch)  →  for each micro-batch: terms of sums, by `ipu.pipeline`
                                   then, once: the update, which reads the sums

Input: the jaxpr of a step, and which of its arguments are the batch. Output: a `SplitStep`: the jaxpr of a micro-batch
and that of the update. Micro-batches are data parallelism in time: the pass `partition` splits the batch along a mesh
axis of micro-batches, and its rules prove which values are sums over it. Each mean divides by the whole batch, as the
user wrote it, so numbers are those of the step up to the order of additions.

    zero     zeros, so the sum of no terms too
    same     computed from other arguments alone: in each part of the program that reads it
    term     differs between micro-batches
    sum      a sum of terms, which is taken after the last micro-batch
    after    computed from sums: the update

Limits: refused, by line, are a part of the batch that is read after a sum, as by a loss that divides by its number of
valid tokens, and collectives that are no sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal as LiteralAtom,
    Var,
    closed,
    eliminate_dead_code,
    part_of,
    used_inputs,
)
from ipujax.lowering.jaxpr import equations_inside, scan_body, substituted, variables, with_scan_body
from ipujax.lowering.partition import Shardings, partition
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.primitives import record_of
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.target import preset

Kind = Literal["zero", "same", "term", "sum", "after"]
_AXIS = "micro_batch"
_FREE = 1e18  # bytes a second
_NUMBER = "axis_index"
_SUM = "psum"
_COLLECTIVES = frozenset({_SUM, "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all", "ppermute"})
_ADDITIONS = frozenset({"add", "add_any"})


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A step as the work of one micro-batch, and the update after all of them.

    Args:
        micro_batch: jaxpr of the number of the micro-batch, int32[1], and the step's arguments, those of the batch with
            the rows of one micro-batch, to terms of sums and rows of results.
        update: jaxpr of the step's arguments and the micro-batches' results, added or joined, to the step's results.
        used: for each input of a micro-batch whether it is read.
        in_dims: for each argument the dimension that is split over micro-batches, None for one that each reads whole.
        out_dims: for each result of a micro-batch the dimension along which it is joined; None for a term of a sum.
    """

    micro_batch: ClosedJaxpr
    update: ClosedJaxpr
    used: tuple[bool, ...]
    in_dims: tuple[int | None, ...]
    out_dims: tuple[int | None, ...]

    @property
    def is_sum(self) -> tuple[bool, ...]:
        """For each result of a micro-batch whether it is a term of a sum, else rows."""
        return tuple(dim is None for dim in self.out_dims)


def split_step(jaxpr: ClosedJaxpr, is_batch: Sequence[bool], micro_batches: int) -> SplitStep:
    """Return a step as micro-batches and an update.

    Args:
        jaxpr: the step, without calls and constants.
        is_batch: for each argument whether its first axis is the batch.
        micro_batches: number of micro-batches; divides the batch.

    Raises:
        ArgumentError: the step is no sum over micro-batches followed by an update.
    """
    specs = [PartitionSpec(_AXIS) if flag else PartitionSpec() for flag in is_batch]
    split = split_along(jaxpr, specs, micro_batches)
    if any(split.out_dims):  # results of the batch have its rows first
        raise _refusal("a result of the step differs between micro-batches", "sums, means, or a row an example")
    return split


def along(dim: int) -> PartitionSpec:
    """Return the split of a dimension over parts, for `split_along`."""
    return PartitionSpec(*[None] * dim, _AXIS)


def split_along(jaxpr: ClosedJaxpr, specs: Sequence[PartitionSpec | None], parts: int) -> SplitStep:
    """Return a program as equal parts, computed one after the other, and what follows them.

    Args:
        jaxpr: the program, without calls and constants.
        specs: split of each argument, `along` a dimension or `PartitionSpec()` for none; None for that which suits the
            others.
        parts: number of parts.

    Raises:
        ArgumentError: the program is no sum over parts followed by an update.
    """
    body, in_dims, result_dims = _of_one_part(jaxpr, specs, parts)
    # The number stands for the index along the axis of micro-batches, as that of a device along a mesh axis.
    number, *inputs = body.invars
    kinds: dict[Var, Kind] = {v: "same" if dim is None else "term" for v, dim in zip(inputs, in_dims, strict=True)}
    walk = _Walk({**kinds, number: "term"}, {}, {})
    eqns = walk.equations(body)
    results = [substituted(atom, walk.equal) for atom in body.outvars]
    for atom, dim in zip(results, result_dims, strict=True):
        if walk.kind(atom) == "term" and dim is None:
            raise _refusal("a result of the step differs between micro-batches", "sums, means, or a row an example")
    # What the update reads of a micro-batch is accumulated or joined; all else of it is dropped after its run.
    of_update = [eqn for eqn in eqns if walk.place(eqn) == "update"]
    read = [atom for atoms in (*(eqn.invars for eqn in of_update), results) for atom in atoms]
    handed = [v for v in dict.fromkeys(atom for atom in read if isinstance(atom, Var)) if walk.kind(v) in _VARYING]
    if not handed:
        raise _refusal("nothing that the step returns depends on the batch", "batch_argnums of arguments that are read")
    # Equations that depend on no micro-batch are in both parts: dead code elimination keeps those that are read.
    of_micro_batch = [walk.of_terms(eqn) for eqn in eqns if walk.place(eqn) != "update"]
    handed_terms = [substituted(v, walk.terms) for v in handed]
    micro = _live(_with_converted_terms(part_of(body, body.invars, handed_terms, of_micro_batch)))
    update = part_of(body, [*inputs, *handed], results, [eqn for eqn in eqns if walk.place(eqn) != "micro-batch"])
    # The update reads sums alone: what differs between parts is handed to results.
    dims = {atom: dim for atom, dim in zip(results, result_dims, strict=True) if isinstance(atom, Var)}
    out_dims = tuple(None if walk.kind(v) == "sum" else dims[v] for v in handed)
    return SplitStep(micro, _live(update), used_inputs(micro.jaxpr), in_dims, out_dims)


def _live(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    return ClosedJaxpr(eliminate_dead_code(jaxpr.jaxpr), jaxpr.consts)


def _with_converted_terms(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Convert the terms of sums in place of sums that are converted to a wider type.

    The gradient of a table that embeds and predicts is a sum of two: stages of a pipeline then accumulate each their
    own, where otherwise one would send it to the other for each micro-batch.
    """
    body = jaxpr.jaxpr
    uses = Counter(v for atoms in (*(eqn.invars for eqn in body.eqns), body.outvars) for v in variables(atoms))
    sums = {eqn.outvars[0]: eqn for eqn in body.eqns if eqn.primitive.name in _ADDITIONS}

    def converted(eqn: JaxprEqn) -> list[JaxprEqn]:
        """Equations in the place of one, after those of terms."""
        addition = sums.get(eqn.invars[0]) if _is_widening(eqn) else None
        if addition is None or uses[addition.outvars[0]] > 1:
            return [eqn]
        wide = [Var(eqn.outvars[0].aval) for _ in addition.invars]
        rows = zip(addition.invars, wide, strict=True)
        terms = [each for atom, var in rows for each in converted(eqn.replace(invars=[atom], outvars=[var]))]
        return [*terms, addition.replace(invars=wide, outvars=eqn.outvars)]

    return ClosedJaxpr(body.replace(eqns=[each for eqn in body.eqns for each in converted(eqn)]), jaxpr.consts)


def _is_widening(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "convert_element_type" or not isinstance(eqn.invars[0], Var):
        return False
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype  # type: ignore[attr-defined]
    are_floats = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
    return are_floats and jnp.finfo(after).bits > jnp.finfo(before).bits


Dims = tuple[int | None, ...]


def _of_one_part(jaxpr: ClosedJaxpr, specs: Sequence[PartitionSpec | None], parts: int) -> tuple[Jaxpr, Dims, Dims]:
    """The jaxpr of one part, its number before the arguments; the dimension that is split of each argument, result."""
    mesh = AbstractMesh((parts,), (_AXIS,), (AxisType.Auto,))
    # Sums are taken once, so their bytes cost nothing: otherwise small operands would be gathered in their place.
    machine = preset("mk2", 1 << (parts - 1).bit_length()).replace(ipu_link_bytes_per_second=_FREE)
    shardings = tuple(None if spec is None else NamedSharding(mesh, spec) for spec in specs)
    after = partition(jaxpr, Shardings(shardings, (), machine))
    if after is jaxpr:
        raise _refusal("nothing that the step returns depends on the batch", "batch_argnums of arguments that are read")
    # `partition` binds the whole program as one `shard_map`.
    (eqn,) = after.eqns
    inner = inline(closed(eqn.params["jaxpr"])).jaxpr
    inputs = dict(zip(eqn.invars, inner.invars, strict=True))
    outvars = dict(zip(eqn.outvars, inner.outvars, strict=True))
    dims: dict[Atom, int | None] = {
        **dict(zip(eqn.invars, map(_split_dim, eqn.params["in_specs"]), strict=True)),
        **dict(zip(eqn.outvars, map(_split_dim, eqn.params["out_specs"]), strict=True)),
    }
    results = list(after.jaxpr.outvars)
    # A variable of the type of an index along a mesh axis.
    number = jax.make_jaxpr(jnp.int32)(0).jaxpr.invars[0]
    invars = [number, *(inputs[v] for v in after.jaxpr.invars)]
    eqns = [eqn for eqn in (_numbered(eqn, number) for eqn in inner.eqns) if eqn is not None]
    places = {eqn.outvars[0]: number for eqn in inner.eqns if eqn.primitive.name == _NUMBER}
    eqns = [eqn.replace(invars=[substituted(atom, places) for atom in eqn.invars]) for eqn in eqns]
    part = part_of(inner, invars, [substituted(outvars[v], places) for v in results], eqns).jaxpr
    in_dims = tuple(dims[v] for v in after.jaxpr.invars)
    return part, in_dims, tuple(dims[v] if isinstance(v, Var) else None for v in results)


def _split_dim(spec: PartitionSpec) -> int | None:
    return next((dim for dim, axes in enumerate(spec) if axes in (_AXIS, (_AXIS,))), None)


def _numbered(eqn: JaxprEqn, number: Var) -> JaxprEqn | None:
    """An equation that reads the micro-batch's number in the place of its index along the axis; None for the index."""
    if eqn.primitive.name == _NUMBER:
        return None
    if _NUMBER not in {inner.primitive.name for inner in equations_inside(eqn)}:
        return eqn
    if eqn.primitive.name != "scan":
        raise _refusal("a part of a value that is computed whole is read", "values of the batch", eqn)
    body = scan_body(eqn.params).jaxpr
    inner_number = jax.make_jaxpr(jnp.int32)(0).jaxpr.invars[0]
    places = {each.outvars[0]: inner_number for each in body.eqns if each.primitive.name == _NUMBER}
    numbered = [each for each in (_numbered(each, inner_number) for each in body.eqns) if each is not None]
    numbered = [each.replace(invars=[substituted(atom, places) for atom in each.invars]) for each in numbered]
    outvars = [substituted(atom, places) for atom in body.jaxpr.outvars]
    inner = part_of(body.jaxpr, [inner_number, *body.jaxpr.invars], outvars, numbered)
    return eqn.replace(
        invars=[number, *eqn.invars],
        params={**with_scan_body(eqn.params, inner, 1), "linear": (False, *eqn.params["linear"])}
        if "linear" in eqn.params
        else with_scan_body(eqn.params, inner, 1),
    )


@dataclass(frozen=True, slots=True)
class _Walk:
    """Kinds of the values of a jaxpr, one equation after the other.

    Args:
        kinds: kind of each value so far.
        terms: the term in the place of a sum, in a micro-batch.
        equal: another value that is equal.
    """

    kinds: dict[Var, Kind]
    terms: dict[Var, Atom]
    equal: dict[Var, Atom]

    def kind(self, atom: Atom) -> Kind:
        """Kind of a value."""
        if isinstance(atom, LiteralAtom):
            return "zero" if np.ndim(atom.val) == 0 and atom.val == 0 else "same"
        return self.kinds[atom]

    def place(self, eqn: JaxprEqn) -> str:
        """Part of the program that has an equation: "micro-batch", "update", or "both"."""
        kinds = {self.kinds[var] for var in eqn.outvars}
        return "micro-batch" if kinds & _VARYING else "update" if "after" in kinds else "both"

    def of_terms(self, eqn: JaxprEqn) -> JaxprEqn:
        """An equation that reads terms in the place of their sums."""
        return eqn.replace(invars=[substituted(atom, self.terms) for atom in eqn.invars])

    def equations(self, jaxpr: Jaxpr) -> list[JaxprEqn]:
        """Equations of a jaxpr without sums over micro-batches; finds the kinds of their results."""
        return [new for eqn in jaxpr.eqns if (new := self._equation(eqn)) is not None]

    def _equation(self, eqn: JaxprEqn) -> JaxprEqn | None:
        """Note the kinds of an equation's results; return the equation, None where a term or zeros replace it."""
        eqn = eqn.replace(invars=[substituted(atom, self.equal) for atom in eqn.invars])
        kinds = [self.kind(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if name == _SUM:
            if {"sum", "after"} & set(kinds):
                raise _mixed(eqn)
            self.terms.update(zip(eqn.outvars, eqn.invars, strict=True))
            self.kinds.update(dict.fromkeys(eqn.outvars, "sum"))
            return None
        # A loop over layers has the sums of their gradients inside.
        has_collectives = any(each.primitive.name in _COLLECTIVES for each in equations_inside(eqn))
        if name == "scan" and (has_collectives or "term" in kinds):
            return self._scan(eqn, kinds)
        if has_collectives or name in _COLLECTIVES:
            raise _refusal(f"micro-batches would exchange values, by {name}", "sums over examples alone", eqn)
        if name == "select_n" and set(kinds[1:]) == {"zero"} and isinstance(eqn.invars[1], Var):
            self.kinds[eqn.outvars[0]] = "zero"
            self.equal[eqn.outvars[0]] = eqn.invars[1]
            return None
        kind = _kind_of_results(eqn, kinds)
        if kind is None:
            raise _mixed(eqn)
        if kind == "term" and eqn.effects:
            raise _refusal(f"{name} would run once a micro-batch", "no effects", eqn)
        self.kinds.update(dict.fromkeys(eqn.outvars, kind))
        return eqn

    def _scan(self, eqn: JaxprEqn, kinds: Sequence[Kind]) -> JaxprEqn:
        """A loop whose sums are taken after it."""
        body = scan_body(eqn.params)
        jaxpr = body.jaxpr.jaxpr
        carries = list(kinds[body.operands.carries])
        kinds_beside = {*kinds[body.operands.constants], *kinds[body.operands.stacks]}
        if {"sum", "after"} & kinds_beside:
            raise _mixed(eqn)
        while True:
            of_inputs = [*kinds[body.operands.constants], *carries, *kinds[body.operands.stacks]]
            inner = _Walk(dict(zip(jaxpr.invars, of_inputs, strict=True)), {}, {})
            eqns = inner.equations(jaxpr)
            results = [substituted(atom, inner.equal) for atom in jaxpr.outvars]
            after = [inner.kind(atom) for atom in results]
            if "after" in after:
                raise _mixed(next(each for each in eqns if inner.place(each) == "update"))
            kinds_after = [_COMMON_KINDS.get(frozenset((a, b))) for a, b in zip(carries, after, strict=False)]
            if None in kinds_after:
                raise _mixed(eqn)
            if kinds_after == carries:
                break
            carries = [kind for kind in kinds_after if kind is not None]
        outvars = [substituted(atom, inner.terms) for atom in results]
        new_body = part_of(jaxpr, jaxpr.invars, outvars, [inner.of_terms(each) for each in eqns])
        # Results that do not vary are marked as if they did: the loop runs in each micro-batch.
        of_results: list[Kind] = ["sum" if kind == "sum" else "term" for kind in (*carries, *after[len(carries) :])]
        self.kinds.update(zip(eqn.outvars, of_results, strict=True))
        return eqn.replace(params={**eqn.params, "jaxpr": new_body})


_VARYING = frozenset({"sum", "term"})
# Kind of a carried value from those before and after an iteration; none for other pairs.
_COMMON_KINDS: dict[frozenset[Kind], Kind] = {
    **{frozenset((kind,)): kind for kind in ("zero", "same", "term", "sum")},
    **{frozenset(("zero", kind)): kind for kind in ("same", "term", "sum")},
    frozenset(("same", "term")): "term",
}


def _kind_of_results(eqn: JaxprEqn, kinds: Sequence[Kind]) -> Kind | None:
    """Kind of the results of an equation; None where a micro-batch would read a sum."""
    distinct = set(kinds)
    name = eqn.primitive.name
    if "term" in distinct:
        return None if {"sum", "after"} & distinct else "term"
    # The update reads one sum of several: one accumulator.
    keeps_sums = name in _ADDITIONS or record_of(eqn).keeps_sums
    if "sum" in distinct and distinct <= {"sum", "zero"} and keeps_sums:
        return "sum"
    if {"sum", "after"} & distinct:
        return "after"
    # Zeros that a sum begins with are a sum of terms too.
    is_zero = bool(kinds) and distinct == {"zero"} and (name == "broadcast_in_dim" or record_of(eqn).keeps_sums)
    return "zero" if is_zero else "same"


def _refusal(problem: str, expected: str, eqn: JaxprEqn | None = None) -> ArgumentError:
    where = None if eqn is None else source_line(eqn) or None
    hint = "ipu.pipeline in the step, which says how micro-batches are reduced"
    problem_text = f"a step without ipu.pipeline has no micro-batches: {problem}"
    return ArgumentError(problem_text, where=where, expected=expected, hint=hint)


def _mixed(eqn: JaxprEqn) -> ArgumentError:
    return _refusal(f"{eqn.primitive.name} reads the batch and a sum over it", "an update that reads sums alone", eqn)
