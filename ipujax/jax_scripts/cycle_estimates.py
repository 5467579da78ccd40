"""Estimated cycles of a function, from shapes alone: which functions of a script are worth compiling, and their order.

Whatever takes time counts: products, arithmetic on whole numbers and floats, moves, gathers, sorts, transfers, also
those of calls of the host.

Input: a jaxpr, a target. Output: an `Estimate` of one call.
Limits: no layouts, so an operation costs its bytes at the rate of all tiles and one superstep; a compiled function
differs by a factor of about two. Of a loop whose trip count is data one iteration counts, of several branches the
cheapest: the least that a call may take. `most_cycles` is what it takes with the dearest branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log2, prod
from typing import Any

from ipujax.jax_scripts.running_again import HOST_CALLS
from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params
from ipujax.lowering.jaxpr import elements_of, primitive_names
from ipujax.runtime.target import Target

_FREE = ("view", "part", "none", "statement")
_CALLS_OF_ELEMENTS = ("reduce", "scatter", "sort", "custom_linear_solve")  # whose jaxprs are for single elements
_SUPERSTEPS_OF_PRODUCT = 4  # operands are sent and rearranged, products computed, partial sums added
_INSTRUCTIONS = 6  # an element of an operation that runs on one tile: load, compute, store, by a worker; assumed


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated cycles of one call.

    Args:
        transfers: cycles of the transfers of arguments and results from and to the host.
        device: cycles on the device.
        most_device: those with the dearest of several branches; infinite where a trip count is data.
    """

    transfers: float = 0.0
    device: float = 0.0
    most_device: float = 0.0

    @property
    def cycles(self) -> float:
        """Cycles of both."""
        return self.transfers + self.device

    @property
    def most_cycles(self) -> float:
        """Most cycles of both."""
        return self.transfers + self.most_device


def estimate_of(jaxpr: ClosedJaxpr, target: Target) -> Estimate:
    """Return the estimated cycles of one call."""
    transfers = _cycles_of_transfers(jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars, target)
    lowest = highest = _cycles(jaxpr.jaxpr, target, is_most=False)
    if "while" in primitive_names(jaxpr.jaxpr):
        highest = inf
    elif "cond" in primitive_names(jaxpr.jaxpr):
        highest = _cycles(jaxpr.jaxpr, target, is_most=True)
    return Estimate(transfers, lowest, highest)


def _cycles_of_transfers(sent: Sequence[Any], received: Sequence[Any], target: Target) -> float:
    """Return the cycles of one exchange with the host each way, of the values that there are."""
    seconds = sum(map(_bytes_of, (*sent, *received))) / target.host_bytes_per_second
    seconds += (bool(sent) + bool(received)) * target.host_latency_seconds
    return seconds * target.clock_hz


def _cycles(jaxpr: Jaxpr, target: Target, is_most: bool) -> float:
    """Return the cycles of a jaxpr with the cheapest of several branches, or the dearest."""
    return sum(_cycles_of_equation(eqn, target, is_most) for eqn in jaxpr.eqns)


def _cycles_of_equation(eqn: JaxprEqn, target: Target, is_most: bool) -> float:
    """Return the estimated cycles of an equation, work and bytes shared equally by all tiles; from shapes alone."""
    from ipujax.lowering.primitives import record_of  # a script without functions needs no compiler

    name = eqn.primitive.name
    if name in HOST_CALLS:
        return _cycles_of_transfers(eqn.invars, eqn.outvars, target)
    inner = _inner_cycles(eqn, target, is_most)
    if inner is not None and not name.startswith(_CALLS_OF_ELEMENTS):
        return inner
    record = record_of(eqn)
    if record.cost in _FREE:
        return 0.0
    superstep = _superstep_cycles(target)
    read = list(map(_bytes_of, eqn.invars))
    moved_bytes = sum(read[1:] if record.cost == "look-up" else read) + sum(map(_bytes_of, eqn.outvars))
    rate = min(target.exchange_bytes_per_cycle, target.vector_width_bytes)
    if record.cost == "product":
        is_half = all(x.dtype.itemsize <= 2 for x in _avals(eqn))
        macs = target.fp16_amp_macs_per_cycle if is_half else target.fp32_amp_macs_per_cycle
        return _SUPERSTEPS_OF_PRODUCT * superstep + (record.macs(eqn) / macs + moved_bytes / rate) / target.num_tiles
    if name == "sort":
        return superstep + _cycles_of_sort(eqn, target)
    if record.problem.work is not None and eqn.invars:
        return superstep + _cycles_of_problems(record.problem, eqn, target)
    return superstep + moved_bytes / rate / target.num_tiles


def _inner_cycles(eqn: JaxprEqn, target: Target, is_most: bool) -> float | None:
    """Return the cycles of the jaxprs inside of an equation; None without any."""
    if eqn.primitive.name == "call_exported":
        from ipujax.lowering.stablehlo.exported_calls import exported_callee

        callee = exported_callee(eqn)
        return None if callee is None else _cycles(callee.jaxpr, target, is_most)
    inner = [_cycles(getattr(nested, "jaxpr", nested), target, is_most) for nested in jaxprs_in_params(eqn.params)]
    if not inner:
        return None
    if eqn.primitive.name == "cond":
        return (max if is_most else min)(inner)
    if eqn.primitive.name == "scan":
        return float(eqn.params["length"]) * (sum(inner) + _superstep_cycles(target))
    return sum(inner)


def _superstep_cycles(target: Target) -> float:
    work = target.supervisor_overhead_cycles + _INSTRUCTIONS * target.worker_contexts
    return target.internal_sync_cycles + target.exchange_startup_cycles + work


def _cycles_of_sort(eqn: JaxprEqn, target: Target) -> float:
    """Return the cycles of sorted rows, each on one tile."""
    shape: Sequence[int] = _avals(eqn)[0].shape
    length = max(shape[eqn.params["dimension"]], 1)
    rounds = -(-(prod(shape) // length) // target.num_tiles)
    return rounds * _INSTRUCTIONS * len(eqn.invars) * length * log2(length + 1)


def _cycles_of_problems(problem: Any, eqn: JaxprEqn, target: Target) -> float:
    """Return the cycles of independent problems, each on one tile."""
    shape: Sequence[int] = _avals(eqn)[0].shape
    rank = len(shape) if problem.rank is None else problem.rank(eqn.params)
    count = prod(shape[: len(shape) - rank])
    size = prod(shape) if eqn.primitive.name == "fft" else min(shape[len(shape) - rank :], default=1)
    elements = max(map(elements_of, (*eqn.invars, *eqn.outvars))) / max(count, 1)
    rounds = -(-max(count, 1) // target.num_tiles)
    return rounds * _INSTRUCTIONS * problem.work(size) * elements


def _avals(eqn: JaxprEqn) -> list[Any]:
    return [atom.aval for atom in eqn.invars]


def _bytes_of(atom: Any) -> int:
    dtype = getattr(atom.aval, "dtype", None)
    return 0 if dtype is None else elements_of(atom) * dtype.itemsize
