"""Pass `merge_collectives`: sums over replicas that can run together become one equation `all_reduce`.

Every round of a collective costs a sync of its IPUs, and `jax.lax.pmean` of a tree is one `psum` for each leaf. So
equations that need a sum wait until no other can run; then all waiting sums run at once, by operation, groups, stage
and phase. Equations with effects keep their order. The merged equation has the source line that sums most bytes; its
name lists the other lines. A sum of a literal is the literal times the number of replicas, without communication.
Limits: sums beyond `MOST_BYTES` together are several, so that a buffer stays small against a tile's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.gcl import MONOIDS, whole
from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    make_primitive,
    new_jaxpr_eqn,
)
from ipujax.lowering.jaxpr import Rewrite, once, phase_of, stage_name, substituted, with_inner
from ipujax.lowering.layer_notes import at_source_of
from ipujax.lowering.source_info import source_line
from ipujax.runtime.tensor import MERGED_WITH

MOST_BYTES = 16 << 20  # assumed: 11 KiB of each tile of an Mk2; a round takes far longer than its sync
_MOST_NAMED = 4  # lines that a merged equation names
_REDUCE = {"add": lax.psum, "max": lax.pmax, "min": lax.pmin}


def _compute(*operands: jax.Array, monoid: str, axes: Any, axis_index_groups: Any) -> list[jax.Array]:
    return [_REDUCE[monoid](x, axes, axis_index_groups=axis_index_groups) for x in operands]


def _shapes(*operands: Any, **params: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]


def _batched(operands: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> Any:
    return all_reduce_p.bind(*operands, **params), list(dims)


all_reduce_p = make_primitive("all_reduce", _compute, _shapes, _batched)


def merge_collectives(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr with fewer collectives inside of `replicated` equations."""
    eqns = [_merged_replicas(eqn) for eqn in jaxpr.jaxpr.eqns]
    return ClosedJaxpr(jaxpr.jaxpr.replace(eqns=eqns), jaxpr.consts)


def _merged_replicas(eqn: JaxprEqn) -> JaxprEqn:
    """Merges the sums over replicas in the jaxpr of a `replicated` equation, and in those inside of it.

    A jaxpr that several equations share is rewritten once. Other equations are returned as they are.
    """
    if eqn.primitive.name != "replicated":
        return eqn
    replicas = eqn.params["replicas"]

    @once
    def rewrite(inner: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(_merged(inner.jaxpr, replicas, rewrite), inner.consts)

    return with_inner(eqn, rewrite)


def _merged(jaxpr: Jaxpr, replicas: int, rewrite: Rewrite) -> Jaxpr:
    """Returns an equal jaxpr in which sums that do not depend on each other are one collective, as each has a latency.

    Sums are reductions over replicas, also maxima. Equations are reordered so that many sums are ready at once:
    first all that need no sum, then the sums that are ready, and so on. `rewrite` is for nested jaxprs.
    """
    eqns = [with_inner(eqn, rewrite) for eqn in jaxpr.eqns]
    if not any(map(_is_reduction, eqns)):
        return jaxpr.replace(eqns=eqns)
    literals: dict[Var, Atom] = {}
    # The sum of a literal over n replicas is a literal.
    eqns = [eqn for eqn in eqns if not _fold_to_literal(eqn, replicas, literals)]
    eqns = [eqn.replace(invars=[substituted(atom, literals) for atom in eqn.invars]) for eqn in eqns]
    merged: list[JaxprEqn] = []
    while eqns:
        sums, eqns = _until_all_wait(eqns, merged)
        merged += [equation for group in _mergeable(sums) for equation in _all_reduces(group)]
    return jaxpr.replace(eqns=merged, outvars=[substituted(atom, literals) for atom in jaxpr.outvars])


def _is_reduction(eqn: JaxprEqn) -> bool:
    """True if an equation is a sum, maximum or minimum over replicas only."""
    return eqn.primitive.name in MONOIDS and all(isinstance(axis, str) for axis in eqn.params["axes"])


def _fold_to_literal(eqn: JaxprEqn, replicas: int, literals: dict[Var, Atom]) -> bool:
    """Computes a reduction of a literal over replicas at compile time.

    Args:
        eqn: any equation.
        replicas: number of replicas.
        literals: gets the literal that replaces the result.

    Returns:
        Whether the equation was a reduction of a literal, and is needed no more.
    """
    if not _is_reduction(eqn):
        return False
    (literal,) = eqn.invars
    (out,) = eqn.outvars
    if not isinstance(literal, Literal):
        return False
    factor = 1  # of a maximum or minimum
    if eqn.primitive.name == "psum":
        sizes = {len(group) for group in whole(eqn.params["axis_index_groups"], replicas)}
        if len(sizes) > 1:  # the factor depends on the replica
            return False
        (factor,) = sizes
    aval: Any = out.aval
    literals[out] = Literal(np.asarray(literal.val * factor, aval.dtype)[()], aval)
    return True


def _until_all_wait(eqns: Sequence[JaxprEqn], ready: list[JaxprEqn]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Takes equations until all that remain wait for a sum over replicas, and appends those that need none to `ready`.

    Equations with effects keep their order: the later one waits for what the earlier one waits for.

    Returns:
        The sums that are ready, which need none of each other, and the equations that wait for one of them.
    """
    sums: list[JaxprEqn] = []
    blocked: list[JaxprEqn] = []
    waiting: set[Var] = set()  # results of sums and of blocked equations
    effects_wait = False
    for eqn in eqns:
        is_blocked = any(isinstance(atom, Var) and atom in waiting for atom in eqn.invars)
        if is_blocked or (effects_wait and eqn.effects):
            blocked.append(eqn)
            effects_wait |= bool(eqn.effects)
        elif _is_reduction(eqn):
            sums.append(eqn)
        else:
            ready.append(eqn)
            continue
        waiting.update(v for v in eqn.outvars if not isinstance(v, DropVar))
    return sums, blocked


def _mergeable(sums: Sequence[JaxprEqn]) -> list[list[JaxprEqn]]:
    """Groups of sums of one operation over the same replicas, stage and phase."""
    groups: dict[Any, list[JaxprEqn]] = {}
    for eqn in sums:
        # Joined with those of other stages, a sum would stop all of their IPUs, and wait for the last of them.
        place = stage_name(eqn).stage, phase_of(eqn)
        key = eqn.primitive.name, eqn.params["axes"], eqn.params["axis_index_groups"], place
        groups.setdefault(key, []).append(eqn)
    return list(groups.values())


def _all_reduces(sums: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """One collective for each batch of sums over the same replicas; batches, in order, have up to `MOST_BYTES`.

    A sum of more is a batch by itself.
    """
    batches: list[list[JaxprEqn]] = [[]]
    num_bytes = 0
    for eqn in sums:
        num_bytes += _num_bytes(eqn)
        if batches[-1] and num_bytes > MOST_BYTES:
            batches.append([])
            num_bytes = _num_bytes(eqn)
        batches[-1].append(eqn)
    return [batch[0] if len(batch) == 1 else _all_reduce(batch) for batch in batches]


def _all_reduce(sums: Sequence[JaxprEqn]) -> JaxprEqn:
    """One `all_reduce` equation for several sums by one monoid over the same replicas."""
    first = sums[0]
    params = {
        "monoid": MONOIDS[first.primitive.name],
        "axes": first.params["axes"],
        "axis_index_groups": first.params["axis_index_groups"],
    }
    operands = [eqn.invars[0] for eqn in sums]
    results = [eqn.outvars[0] for eqn in sums]
    merged = new_jaxpr_eqn(operands, results, all_reduce_p, params, first.effects, first.source_info)
    return _at_line_with_most_bytes(merged, sums)


def _at_line_with_most_bytes(merged: JaxprEqn, sums: Sequence[JaxprEqn]) -> JaxprEqn:
    """The equation with the source line that sums most bytes, and the other lines in its name."""
    by_line: dict[str, list[JaxprEqn]] = {}
    for eqn in sums:
        by_line.setdefault(source_line(eqn), []).append(eqn)
    lines = sorted(by_line, key=lambda line: -sum(map(_num_bytes, by_line[line])))
    other_lines = [*lines[1:_MOST_NAMED], *(["…"] if len(lines) > _MOST_NAMED else [])]
    suffix = MERGED_WITH + ", ".join(other_lines) if other_lines else ""
    return at_source_of(merged, by_line[lines[0]][0], sums, suffix)


def _num_bytes(eqn: JaxprEqn) -> int:
    aval: Any = eqn.invars[0].aval
    return int(aval.size * aval.dtype.itemsize)
