"""Pass `cse`: common subexpressions are computed once.

    a = pow(b, t); x = a * p            a = pow(b, t); x = a * p
    c = pow(b, t); y = c * q                           y = a * q

An equation that is equal to an earlier one of its body is dropped, and its readers read the earlier results. Loops,
branches and replicas are rewritten inside, each body by itself. Separate stay

    stages, phases    each computes for itself: a value of another would be sent or loaded; in a program with stages
                      also what depends on no argument, as masks, because its first reader decides on its IPU
    recomputation     what a `jax.checkpoint` computes again, from all else
    long lives        a value whose longer life raises the peak of the live bytes of its body, if these cost more than
                      computing it again (`longer_lives`, `_repeated_cycles`), at the planners' cost of a byte

Passes behind it compute again on purpose: `narrow` and `fuse` for memory, `recompute` as the user asks.
Input and output: jaxprs. Limits: a micro-batch whose stages are open stays unchanged, as its cuts are not known; of
one with stages, the forward and the backward part stay separate, as values of one would be stashed for the other.

Equal equations are found by value numbering: those that compute equal values from equal operands have one number. Only
pure equations are equal to others: no effects, no barriers, and primitives that the tables of records and costs know,
so no calls of foreign code, of Python or of the user's codelets. Loops and branches are pure if all inside is. Random
bits are pure functions of their keys. Equality is by structure alone, so that x² and x·x differ.
Source: Briggs, Cooper, Simpson, Value Numbering, 1997; operands of commutative operations in either order, as in XLA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, shape_of
from ipujax.lowering.jaxpr import (
    CONTROL_FLOW,
    HOLDERS,
    EquationNumbers,
    Rewrite,
    equations_inside,
    everywhere,
    has_stages,
    phase_of,
    stage_name,
    substituted,
    variables_read,
    with_inner,
    work_of_equation,
)
from ipujax.lowering.layer_notes import step_part, with_part
from ipujax.lowering.passes.longer_lives import LiveBytes
from ipujax.lowering.primitives import RECORDS, Problem, record_of
from ipujax.lowering.source_info import name_stack
from ipujax.runtime.graph import BYTE_COST_CYCLES
from ipujax.runtime.tensor import MIN_BYTES_PER_TILE, REMATERIALISED

_FIRST_ELEMENTS = 16  # by which most constants of one shape differ
_ELEMENTS_PER_CYCLE = 2  # floats that a vector instruction reads or writes: Target.vector_bytes, as in `chain_steps`


def cse(
    jaxpr: ClosedJaxpr,
    byte_cost: float = BYTE_COST_CYCLES,
    *,
    is_micro_batch: bool = False,
    kept_apart: list[JaxprEqn] | None = None,
) -> ClosedJaxpr:
    """Common subexpression elimination: returns an equal jaxpr in which equal equations of a body are one.

    Args:
        jaxpr: the jaxpr, without calls.
        byte_cost: cost per byte on the fullest tile, in cycles.
        is_micro_batch: whether it is the micro-batch of a pipeline, which is cut into stages.
        kept_apart: list to which equations are appended that are repeated, as the earlier results would live too long.
    """
    is_staged = has_stages(jaxpr.jaxpr)
    # Stages that are searched cut the equations later: joined ones could be read by two stages, which sends their
    # value.
    if is_micro_batch and not is_staged:
        return jaxpr

    def rewritten(body: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
        """Joins the equal equations of one body, after `rewrite` has done so inside of them."""
        eqns = [with_inner(eqn, rewrite) if eqn.primitive.name in HOLDERS else eqn for eqn in body.jaxpr.eqns]
        # Equations of different parts (stages, phases, checkpoints) are not joined.
        parts = _Parts(body.jaxpr, eqns, is_staged=is_staged, is_micro_batch=is_micro_batch)
        earlier = earlier_equals(eqns, constants_of(body), parts.part_of)
        if not earlier and all(a is b for a, b in zip(eqns, body.jaxpr.eqns, strict=True)):
            return body
        joined_body, apart = _join_equals(body.jaxpr.replace(eqns=eqns), earlier, byte_cost)
        if kept_apart is not None:
            kept_apart.extend(apart)
        return ClosedJaxpr(joined_body, body.consts)

    return everywhere(rewritten)(jaxpr)


def constants_of(jaxpr: ClosedJaxpr) -> dict[Var, Hashable]:
    """Identity of each constant: one for equal arrays, as of a callee that is inlined twice."""
    # Most constants differ in their first elements: all are compared only of those that do not.
    pairs = list(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    begins = {var: (var.aval, _bytes_of(value, _FIRST_ELEMENTS) or id(value)) for var, value in pairs}
    alike = Counter(begins.values())
    return {var: (begins[var], _bytes_of(value) if alike[begins[var]] > 1 else None) for var, value in pairs}


def _bytes_of(value: Any, most_elements: int | None = None) -> bytes | None:
    """The first elements of an array of numbers on this machine; None for other values."""
    is_array = isinstance(value, np.ndarray | jax.Array) and not jnp.issubdtype(value.dtype, jax.dtypes.extended)
    if not is_array or (isinstance(value, jax.Array) and not value.is_fully_addressable):
        return None
    return np.asarray(value).reshape(-1)[:most_elements].tobytes()


class _Parts:
    """Parts of a body: equations of different parts stay separate."""

    def __init__(self, body: Jaxpr, eqns: Sequence[JaxprEqn], *, is_staged: bool, is_micro_batch: bool) -> None:
        self._eqns = eqns
        self._checkpoints = checkpoints(eqns)
        self._is_micro_batch = is_micro_batch
        self._has_ipu = self._with_ipu(body) if is_staged else None

    def part_of(self, number: int) -> Hashable | None:
        """Part of an equation; None for one that is joined with no other."""
        eqn = self._eqns[number]
        name = stage_name(eqn)
        if self._has_ipu is not None and not self._has_ipu[number]:  # its first reader decides on its IPU
            return None
        return name.stage, phase_of(eqn), self._checkpoints[number], self._is_micro_batch and name.is_backward

    def _with_ipu(self, body: Jaxpr) -> list[bool]:
        """For each equation whether its stage, or its operands, decide on its IPU."""
        placed: set[Var] = set(body.invars)
        flags = list[bool]()
        for eqn in self._eqns:
            flags.append(stage_name(eqn).stage is not None or not placed.isdisjoint(variables_read(eqn)))
            placed.update(eqn.outvars if flags[-1] else ())
        return flags


def checkpoints(eqns: Sequence[JaxprEqn]) -> list[tuple[int, int]]:
    """Checkpoint that computes an equation again: how many are around it, and the run of such equations in order."""
    depths = [name_stack(eqn).count(REMATERIALISED) for eqn in eqns]
    runs = accumulate((before != after for before, after in pairwise(depths)), initial=0)
    return [(depth, run if depth else 0) for depth, run in zip(depths, runs, strict=False)]


def _join_equals(body: Jaxpr, earlier: Mapping[int, int], byte_cost: float) -> tuple[Jaxpr, list[JaxprEqn]]:
    """Drops equations that are equal to earlier ones, and lets their readers read the earlier results.

    Args:
        body: the body.
        earlier: number of the earlier equation, by number of the equation that is equal to it.
        byte_cost: cost per byte on the fullest tile, in cycles.

    Returns:
        The body, and the equations that were kept: to repeat them costs less than a longer life of the earlier result.
    """
    apart = list[JaxprEqn]()
    eqns = list(body.eqns)
    lives = LiveBytes(body)
    replaced: dict[Var, Var] = {}  # result of a dropped equation → earlier result
    dropped: set[int] = set()
    shared: set[int] = set()  # equations that others were equal to
    # Readers first: a value that only dropped equations read is not kept for them.
    for number in sorted(earlier, reverse=True):
        first = earlier[number]
        growth = lives.growth(number, first)  # of the peak of live bytes
        if growth > MIN_BYTES_PER_TILE and byte_cost * growth > _repeated_cycles(eqns[number]):
            apart.append(eqns[number])
            continue
        lives.replace(number, first)
        dropped.add(number)
        shared.add(first)
        eqns[first] = _merged(eqns[first], eqns[number], replaced)
    # The replacement of a value may be replaced itself: the earliest first, each then has its final one.
    for var in reversed(replaced):
        replaced[var] = replaced.get(replaced[var], replaced[var])
    for number, eqn in enumerate(eqns):
        if not replaced.keys().isdisjoint(variables_read(eqn)):
            eqns[number] = eqn.replace(invars=[substituted(atom, replaced) for atom in eqn.invars])
    # A shared equation may move to an earlier place, right behind the equation with that number.
    places = _earlier_places(eqns, sorted(shared - dropped), lives)
    remaining = sorted(set(range(len(eqns))) - dropped, key=lambda number: (places.get(number, number), number))
    outvars = [substituted(atom, replaced) for atom in body.outvars]
    return body.replace(eqns=[eqns[number] for number in remaining], outvars=outvars), apart


def _merged(first: JaxprEqn, later: JaxprEqn, replaced: dict[Var, Var]) -> JaxprEqn:
    """The first of two equal equations, as it is once the later one is dropped.

    `replaced` gets the results of the later one, each with the result of the first in its place.
    """
    results = list(first.outvars)
    for place, (result, var) in enumerate(zip(results, later.outvars, strict=True)):
        if isinstance(result, DropVar):  # nothing reads it yet: it becomes the variable that is read
            results[place] = var
        elif not isinstance(var, DropVar):
            replaced[var] = result
    merged = first.replace(outvars=results)
    # A loss beside its gradient is of no part by itself, but the forward part of the gradient reads it now.
    return merged if step_part(merged) else with_part(merged, step_part(later))


def _earlier_places(eqns: Sequence[JaxprEqn], shared: Sequence[int], lives: LiveBytes) -> dict[int, int]:
    """Moves shared equations directly behind the last equation that they depend on.

    Else the first of equal layers would compute what all share among its own equations, and `outline` would not find
    that layers are repeated runs. Recomputed ones stay where they are, and those whose results would raise the peak.

    Args:
        eqns: equations of a body.
        shared: numbers of the equations whose results replace those of equal ones, rising.
        lives: live bytes, updated by the moves.

    Returns:
        For each equation that moves the number of the equation that it comes behind, −1 for the start.
    """
    places: dict[int, int] = {}
    definition = {var: n for n, eqn in enumerate(eqns) for var in eqn.outvars}
    for number in shared:
        operands = [definition[var] for var in variables_read(eqns[number]) if var in definition]
        place = max((places.get(operand, operand) for operand in operands), default=-1)
        is_recomputed = REMATERIALISED in name_stack(eqns[number])
        if not is_recomputed and lives.begin_earlier(number, place + 1, MIN_BYTES_PER_TILE):
            places[number] = place
    return places


def _repeated_cycles(eqn: JaxprEqn) -> float:
    """Cycles of computing an equation again, summed over tiles, as the bytes of its results are."""
    record = record_of(eqn)
    # Functions, sorts and factorisations take tens of instructions an element, many times the cost of its bytes.
    if (record.cost == "elementwise" and not record.is_cheap) or record.problem != Problem():
        return inf
    return work_of_equation(eqn).elements / _ELEMENTS_PER_CYCLE


_PURE_COSTS = frozenset(("view", "part", "joined", "look-up", "elementwise", "product"))
_PURE_NAMES = frozenset(("iota", "name", "stop_gradient"))  # of those that cost nothing, without barriers
_NOT_JOINED = frozenset(("copy", "copy_p"))  # a copy is a value of its own
_SAME_OPERATION = {"add_any": "add"}  # of gradients


def is_pure(eqn: JaxprEqn) -> bool:
    """Return True if equal operands always give equal results, and nothing else happens."""
    name = eqn.primitive.name
    if eqn.effects or name in _NOT_JOINED or record_of(eqn).has_state:
        return False
    if name in CONTROL_FLOW:
        return all(is_pure(inner) for inner in equations_inside(eqn))
    cost = record_of(eqn).cost
    return cost in _PURE_COSTS or name in _PURE_NAMES or (cost == "other" and name in RECORDS)


def earlier_equals(
    eqns: Sequence[JaxprEqn],
    constants: Mapping[Var, Hashable],
    separation: Callable[[int], Hashable],
) -> dict[int, int]:
    """Finds the equations that compute what an earlier one has computed, by value numbering.

    Args:
        eqns: equations of a body, in order.
        constants: key of each constant of the body: constants of one key have equal values.
        separation: function from the number of an equation to what else must be equal, as its stage; None for an
            equation that may be equal to no other.

    Returns:
        Number of the last equal earlier equation, by number of the equation.
    """
    return _ValueNumbers(constants).earlier(eqns, separation)


class _ValueNumbers:
    """Numbers of values and equations, given in order; equal values have one number."""

    def __init__(self, constants: Mapping[Var, Hashable]) -> None:
        self._numbers: dict[Hashable, int] = {}  # by what tells a value from others
        self._of_var: dict[Var, int] = {var: self._number_of(key) for var, key in constants.items()}
        self._scalars: dict[int, int] = {}  # number of a value → that of the scalar that all of its elements are
        self._parameters = EquationNumbers()

    def earlier(self, eqns: Sequence[JaxprEqn], separation: Callable[[int], Hashable]) -> dict[int, int]:
        """Return for each equation that is equal to an earlier one the number of the last such.

        `separation` maps the number of an equation to what else must be equal; None for one that is equal to no other.
        """
        earlier: dict[int, int] = {}
        # Equations are alike if they have one operation, equal operands and one separation, and equal if parameters are
        # equal too: these are compared only of alike ones, as most equations are alike with no other.
        first_alike: dict[Hashable, int] = {}  # by operation, operands and separation
        last_equal: dict[Hashable, int] = {}  # by these and parameters
        for number, eqn in enumerate(eqns):
            self._find_repeated_scalar(eqn)
            part = separation(number) if is_pure(eqn) else None
            if part is None:
                continue
            alike = (*self._operation(eqn), part)
            first = first_alike.setdefault(alike, number)
            if first == number:
                continue
            last_equal.setdefault((alike, self._parameters.of_parameters(eqns[first])), first)
            equal = alike, self._parameters.of_parameters(eqn)
            if equal in last_equal:
                earlier[number] = last_equal[equal]
                # Equal results have one number, so that their readers can be equal too.
                results = zip(eqn.outvars, eqns[last_equal[equal]].outvars, strict=True)
                self._of_var.update({var: self._number_of_value(earlier_var) for var, earlier_var in results})
            last_equal[equal] = number
        return earlier

    def _find_repeated_scalar(self, eqn: JaxprEqn) -> None:
        """Numbers a view of one repeated scalar by that and its type: all such are equal, as gradients of a sum are."""
        if record_of(eqn).cost not in ("view", "part") or len(eqn.invars) != 1:
            return
        operand = self._number_of_value(eqn.invars[0])
        scalar = self._scalars.get(operand) if shape_of(eqn.invars[0]) else operand
        if scalar is not None:
            for var in eqn.outvars:
                self._of_var[var] = self._number_of(("repeated", scalar, var.aval))
                self._scalars[self._of_var[var]] = scalar

    def _operation(self, eqn: JaxprEqn) -> tuple[str, tuple[int, ...]]:
        """Name of an equation's operation, and the numbers of its operands; sorted where their order is nothing."""
        operands = [self._number_of_value(atom) for atom in eqn.invars]
        if record_of(eqn).is_commutative:
            operands.sort()
        name = eqn.primitive.name
        return _SAME_OPERATION.get(name, name), tuple(operands)

    def _number_of_value(self, atom: Atom) -> int:
        """The number of a variable's value, a new one if none is known, or of a literal."""
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            aval: Any = atom.aval
            # The type of a result shows whether that of the literal is weak.
            return self._number_of((aval.shape, aval.dtype, value.dtype.name, value.tobytes()))
        if atom not in self._of_var:
            self._of_var[atom] = self._number_of(atom)
        return self._of_var[atom]

    def _number_of(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))
