"""Pass `merge_collectives`: sums over replicas that can go together become one equation `all_reduce`.

Every round of a collective costs a sync of all replicas, however little it moves, and `jax.lax.pmean` of a tree is one
`psum` for each leaf. So equations that need the result of a sum are put off until no other can go on; then all sums
that wait go at once, by operation and groups. What has effects keeps its order.

The merged equation stands at the source line that sums most bytes; its name says the other lines.

A sum of a literal, which is the same everywhere, is that literal times the replicas: no communication at all.
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
from ipujax.lowering.jaxpr import Rewrite, once, with_inner
from ipujax.lowering.source_info import at_source_of, source_line
from ipujax.runtime.tensor import MERGED_WITH

MOST_BYTES = 16 << 20  # assumed: 11 KiB of each tile of an Mk2, and rounds that last far longer than their sync
_NAMED = 4  # lines that a merged equation names
_REDUCE = {"add": lax.psum, "max": lax.pmax, "min": lax.pmin}


def _compute(*operands: jax.Array, monoid: str, axes: Any, axis_index_groups: Any) -> list[jax.Array]:
    return [_REDUCE[monoid](x, axes, axis_index_groups=axis_index_groups) for x in operands]


def _shapes(*operands: Any, **params: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]


def _batched(operands: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> Any:
    return all_reduce_p.bind(*operands, **params), list(dims)


all_reduce_p = make_primitive("all_reduce", _compute, _shapes, _batched)


def merge_collectives(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr with fewer collectives, which are inside of `replicated` equations."""
    eqns = [_merged_replicas(eqn) for eqn in jaxpr.jaxpr.eqns]
    return ClosedJaxpr(jaxpr.jaxpr.replace(eqns=eqns), jaxpr.consts)


def _merged_replicas(eqn: JaxprEqn) -> JaxprEqn:
    """The equation with fewer collectives in what each replica computes, if it is that of several replicas."""
    if eqn.primitive.name != "replicated":
        return eqn
    replicas = eqn.params["replicas"]

    @once
    def rewrite(inner: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(_merged(inner.jaxpr, replicas, rewrite), inner.consts)

    return with_inner(eqn, rewrite)


def _merged(jaxpr: Jaxpr, replicas: int, rewrite: Rewrite) -> Jaxpr:
    eqns = [with_inner(eqn, rewrite) for eqn in jaxpr.eqns]
    if not any(map(_is_sum, eqns)):
        return jaxpr.replace(eqns=eqns)
    known: dict[Var, Atom] = {}
    eqns = [eqn for eqn in eqns if not _is_known(eqn, replicas, known)]
    eqns = [eqn.replace(invars=[_known(atom, known) for atom in eqn.invars]) for eqn in eqns]
    done: list[JaxprEqn] = []
    while eqns:
        sums, eqns = _until_all_wait(eqns, done)
        done += [together for group in _groups(sums) for together in _joined(group)]
    return jaxpr.replace(eqns=done, outvars=[_known(atom, known) for atom in jaxpr.outvars])


def _is_sum(eqn: JaxprEqn) -> bool:
    """Whether an equation is a sum, or the like, over replicas and nothing else."""
    return eqn.primitive.name in MONOIDS and all(isinstance(axis, str) for axis in eqn.params["axes"])


def _is_known(eqn: JaxprEqn, replicas: int, known: dict[Var, Atom]) -> bool:
    """Whether an equation is the sum of a literal; adds its result to `known`."""
    (literal,), (out,) = (eqn.invars, eqn.outvars) if _is_sum(eqn) else ((None,), (None,))
    if not isinstance(literal, Literal) or out is None:
        return False
    times, *others = {len(group) for group in whole(eqn.params["axis_index_groups"], replicas)}
    if eqn.primitive.name != "psum":
        times = 1
    elif others:
        return False
    aval: Any = out.aval
    known[out] = Literal(np.asarray(literal.val * times, aval.dtype)[()], aval)
    return True


def _known(atom: Atom, known: dict[Var, Atom]) -> Atom:
    return known.get(atom, atom) if isinstance(atom, Var) else atom


def _until_all_wait(eqns: Sequence[JaxprEqn], done: list[JaxprEqn]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Does what does not need a sum that waits; returns the sums that wait, and what waits for them."""
    sums: list[JaxprEqn] = []
    later: list[JaxprEqn] = []
    waiting: set[Var] = set()
    effects_wait = False
    for eqn in eqns:
        needs = any(isinstance(atom, Var) and atom in waiting for atom in eqn.invars)
        if needs or (effects_wait and eqn.effects):
            later.append(eqn)
            effects_wait |= bool(eqn.effects)
        elif _is_sum(eqn):
            sums.append(eqn)
        else:
            done.append(eqn)
            continue
        waiting.update(v for v in eqn.outvars if not isinstance(v, DropVar))
    return sums, later


def _groups(sums: Sequence[JaxprEqn]) -> list[list[JaxprEqn]]:
    """The sums that may go together, in their order."""
    found: dict[Any, list[JaxprEqn]] = {}
    for eqn in sums:
        key = eqn.primitive.name, eqn.params["axes"], eqn.params["axis_index_groups"]
        found.setdefault(key, []).append(eqn)
    return list(found.values())


def _joined(sums: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """One equation for sums of up to a number of bytes, the next for those after them."""
    parts: list[list[JaxprEqn]] = [[]]
    held = 0
    for eqn in sums:
        held += _num_bytes(eqn)
        if parts[-1] and held > MOST_BYTES:
            parts.append([])
            held = _num_bytes(eqn)
        parts[-1].append(eqn)
    return [part[0] if len(part) == 1 else _together(part) for part in parts]


def _together(sums: Sequence[JaxprEqn]) -> JaxprEqn:
    first = sums[0]
    params = {
        "monoid": MONOIDS[first.primitive.name],
        "axes": first.params["axes"],
        "axis_index_groups": first.params["axis_index_groups"],
    }
    operands = [eqn.invars[0] for eqn in sums]
    results = [eqn.outvars[0] for eqn in sums]
    together = new_jaxpr_eqn(operands, results, all_reduce_p, params, first.effects, first.source_info)
    return _at_line_with_most_bytes(together, sums)


def _at_line_with_most_bytes(together: JaxprEqn, sums: Sequence[JaxprEqn]) -> JaxprEqn:
    """The equation at the source line that sums most; the other lines are in its name."""
    by_line: dict[str, list[JaxprEqn]] = {}
    for eqn in sums:
        by_line.setdefault(source_line(eqn), []).append(eqn)
    lines = sorted(by_line, key=lambda line: -sum(map(_num_bytes, by_line[line])))
    others = (
        f"{MERGED_WITH}{', '.join([*lines[1:_NAMED], *(['…'] if len(lines) > _NAMED else [])])}"
        if len(lines) > 1
        else ""
    )
    return at_source_of(together, by_line[lines[0]][0], sums, others)


def _num_bytes(eqn: JaxprEqn) -> int:
    aval: Any = eqn.invars[0].aval
    return int(aval.size * aval.dtype.itemsize)
