"""Estimate of the program of one IPU, without lowering it: its cycles, and the bytes that it needs at once.

Input: a jaxpr after the pass `partition`. Multiply-adds cost their cycles at peak, other equations the words that they
store, collectives their rounds on the IPU-Links, arguments and results the rate of the host. The estimate ranks
shardings of one program; it is a lower bound of neither cycles nor bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ipujax.lowering.gcl import Groups, estimated_cycles
from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    closed,
    jaxprs_in_params,
    shape_of,
)
from ipujax.lowering.partition.resharding import itemsize
from ipujax.lowering.primitives import record_of
from ipujax.runtime.target import Target


class _Collective(NamedTuple):
    """Data of a collective.

    Args:
        operands: number of ranks → bytes of the value that is cut into chunks, one a rank, as multiples of the operand.
        reduces_all: True if every rank gets the reduced value: chunks go round twice.
    """

    operands: Callable[[int], int]
    reduces_all: bool = False


_COLLECTIVES: Mapping[str, _Collective] = {
    "psum": _Collective(lambda ranks: 1, reduces_all=True),
    "pmax": _Collective(lambda ranks: 1, reduces_all=True),
    "pmin": _Collective(lambda ranks: 1, reduces_all=True),
    "reduce_scatter": _Collective(lambda ranks: 1),
    "all_gather": _Collective(lambda ranks: ranks),
    "all_to_all": _Collective(lambda ranks: 1),
    # One round, as that of two ranks.
    "ppermute": _Collective(lambda ranks: 2),
}
_PEAK_SHARE = 0.5  # assumed: of the peak rate of multiply-adds, for products as large as a layer's
_OVERHEAD_CYCLES = 1000  # assumed: start-up, exchange and sync of an equation that computes


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated cost of one call.

    Args:
        cycles: cycles of one IPU.
        num_bytes: bytes of the values that one IPU has at once.
    """

    cycles: float
    num_bytes: int


def estimate(jaxpr: ClosedJaxpr, target: Target) -> Estimate:
    """Estimated cycles and bytes of a program after the pass `partition`, by which ways to shard it are ranked.

    The pass makes a program one `shard_map`, of the jaxpr of one IPU; one that it has not changed is costed as it is.
    """
    body = jaxpr.jaxpr
    sizes: Mapping[str, int] = {}  # of the axes of the mesh
    if len(body.eqns) == 1 and body.eqns[0].primitive.name == "shard_map":
        sizes = dict(body.eqns[0].params["mesh"].shape)
        body = closed(body.eqns[0].params["jaxpr"]).jaxpr
    host_bytes = sum(map(_bytes_of, (*body.invars, *body.outvars)))
    sharing = min(prod(sizes.values()), target.ipus_per_gateway)  # IPUs of a machine, which has one link to the host
    host_cycles = target.clock_hz * sharing * host_bytes / target.host_bytes_per_second
    return Estimate(_jaxpr_cycles(body, sizes, target) + host_cycles, _peak_bytes(body))


def _jaxpr_cycles(jaxpr: Jaxpr, sizes: Mapping[str, int], target: Target) -> float:
    return sum(_equation_cycles(eqn, sizes, target) for eqn in jaxpr.eqns)


def _equation_cycles(eqn: JaxprEqn, sizes: Mapping[str, int], target: Target) -> float:
    """Rough cycles of an equation on one IPU: products at a share of the peak, others by bytes stored.

    A tested loop counts as one iteration, because its trip count is not known.
    """
    name = eqn.primitive.name
    params = eqn.params
    if name == "scan":
        return float(params["length"] * _jaxpr_cycles(params["jaxpr"].jaxpr, sizes, target))
    if name == "cond":
        return max(_jaxpr_cycles(branch.jaxpr, sizes, target) for branch in params["branches"])
    if name in _COLLECTIVES:
        return _collective_cycles(eqn, sizes, target)
    record = record_of(eqn)
    macs = record.macs(eqn)
    tiles = target.tiles_per_ipu
    if macs:
        return macs / (tiles * target.fp32_amp_macs_per_cycle * _PEAK_SHARE) + _OVERHEAD_CYCLES
    if record.cost == "view":
        return 0.0
    inner = [closed(jaxpr).jaxpr for jaxpr in jaxprs_in_params(params)]
    if inner:
        return sum(_jaxpr_cycles(body, sizes, target) for body in inner)
    return sum(map(_bytes_of, eqn.outvars)) / (tiles * target.store_bytes_per_cycle) + _OVERHEAD_CYCLES


def _collective_cycles(eqn: JaxprEqn, sizes: Mapping[str, int], target: Target) -> float:
    """Cycles of a collective over the axes that are split, by the rounds of its chunks; `sizes` of the mesh's axes."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    names = axes if isinstance(axes, tuple | list) else (axes,)
    split = [name for name in names if sizes.get(name, 1) > 1]
    ranks = prod(sizes[name] for name in split)
    if ranks == 1:
        return 0.0
    collective = _COLLECTIVES[eqn.primitive.name]
    # Bytes that go around: those of the operands, or of all ranks' together, see `_COLLECTIVES`.
    num_bytes = collective.operands(ranks) * sum(map(_bytes_of, eqn.invars))
    # A permute is one round, which costs as one of two ranks, see `_COLLECTIVES`.
    groups = ((0, 1),) if eqn.primitive.name == "ppermute" else _groups_of_ranks(split, sizes)
    return float(estimated_cycles(target, groups, num_bytes, collective.reduces_all))


def _groups_of_ranks(names: Sequence[str], sizes: Mapping[str, int]) -> Groups:
    """Groups of ranks that meet in a collective over some axes of a mesh: those that differ in these axes alone."""
    ranks = np.arange(prod(sizes.values())).reshape(tuple(sizes.values()))
    dims = [list(sizes).index(name) for name in names]
    with_groups_last = np.moveaxis(ranks, dims, range(-len(dims), 0))
    group_size = prod(sizes[name] for name in names)
    return tuple(tuple(group) for group in with_groups_last.reshape(-1, group_size).tolist())


def _bytes_of(atom: Any) -> int:
    if isinstance(atom, Literal | DropVar):
        return 0
    return prod(shape_of(atom)) * itemsize(atom.aval.dtype)


def _peak_bytes(jaxpr: Jaxpr) -> int:
    """Largest sum of bytes of the values that are live at an equation; views have the memory of their operand.

    Arguments and results are live from where they are defined to the end. An estimate: bytes of a view go with its last
    reader, also if its operand is read later.
    """
    last_use = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if isinstance(v, Var)}
    live_through = {v for v in (*jaxpr.invars, *jaxpr.outvars) if isinstance(v, Var)}
    live = sum(map(_bytes_of, jaxpr.invars))
    peak = live
    for n, eqn in enumerate(jaxpr.eqns):
        is_view = record_of(eqn).cost == "view"
        live += 0 if is_view else sum(map(_bytes_of, eqn.outvars))
        peak = max(peak, live)
        ended = {v for v in eqn.invars if isinstance(v, Var) and last_use[v] == n and v not in live_through}
        live -= 0 if is_view else sum(map(_bytes_of, ended))
    return peak
