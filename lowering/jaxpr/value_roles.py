"""Roles of the values of a jaxpr: weights, optimiser state, gradients, activations, inputs.

Input: the jaxpr that is lowered, whose equations JAX has named `jvp(…)` and `transpose(…)` where they belong to a
gradient. Output: `ValueRoles`, a role of `runtime.tensor.roles` for values of which one is known.

    weights           arguments that come back changed by a gradient, have one themselves, and are read by what is
                      differentiated; or those whose gradient comes back
    optimiser state   arguments that come back changed by a gradient, or change weights, and are not read there
    other state       other arguments that come back changed, as statistics of a normalisation, or random keys
    inputs            the other arguments; `arguments` where there is no gradient, for then nothing tells
    gradients         what the backward pass makes in the shape of weights and the rest of the program reads, and sums
                      of these in loops and pipelines
    activations       what the backward pass reads and a forward pass made, or a checkpoint computes again
    results           what the function returns besides

An argument comes back in the result of its shape and dtype that is computed from it outside of the gradient, else in
one that is computed from it element by element; a result that may be of several is that of the one no other result is
computed from. Inside of loops, functions and branches,
operands and results have the roles of those outside.
Limits: without a gradient, weights cannot be told from inputs. Weights that stay as they are (frozen) are inputs, or
other state if they are returned. What is differentiated and updated by a hand-written backward pass is not found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ipujax.lowering.jax_compat import Atom, Jaxpr, JaxprEqn, Literal, Var, closed, shape_of
from ipujax.lowering.jaxpr.nested import variables, variables_read
from ipujax.lowering.jaxpr.op_counts import PRODUCTS
from ipujax.lowering.jaxpr.stage_names import PIPELINE, is_transposed, read_name
from ipujax.lowering.source_info import name_stack
from ipujax.runtime.cache import remembered_small
from ipujax.runtime.tensor.roles import (
    ARGUMENTS,
    GRADIENTS,
    INPUTS,
    KEPT,
    OPTIMISER_STATE,
    RECOMPUTED,
    RESULTS,
    STATE,
    WEIGHTS,
)

_HELD = frozenset((WEIGHTS, OPTIMISER_STATE, STATE, INPUTS, ARGUMENTS))  # roles that a moved or cast value keeps
_CASTS = ("convert_element_type", "reduce_precision", "copy", "copy_p", "device_put", "optimization_barrier")
_LOADS = ("remote_load", "remote_rows", "remote_fetch", "remote_take", "remote_hand", "remote_put", "host_put")
_MOVES = frozenset((*_CASTS, *_LOADS))
_STORES = {"remote_store": 1, "remote_update": 2}  # the operand that they store in the place of their first
_SUMS = frozenset(("psum", "all_reduce", "psum_invariant", "reduce_scatter"))  # of gradients over replicas

# The arguments that a value is computed from outside of gradients, as bits; whether it is computed from a gradient; and
# the arguments of its shape that it is computed from element by element, as bits, also inside of gradients.
Facts = tuple[int, bool, int]
_NOTHING: Facts = (0, False, 0)

_HOLDERS = frozenset(("scan", "while", "cond", "function_call", PIPELINE))


@dataclass(frozen=True, slots=True)
class Inside:
    """A jaxpr inside an equation.

    Args:
        jaxpr: the jaxpr.
        operands: what the equation reads for each of its operands.
        results: what the equation makes of each of its results.
        first_carry: the first of its operands that a loop carries.
        carried: how many of them, from there on; its first results are their next values.
    """

    jaxpr: Jaxpr
    operands: Sequence[Atom]
    results: Sequence[Var]
    first_carry: int = 0
    carried: int = 0


@remembered_small
def part_of_step(stack: str) -> str:
    """The part of a training step that a name stack says: "forward", "backward", "recomputed", or "" for neither."""
    if is_transposed(stack):
        return "backward"
    if read_name(stack).is_recomputed:
        return "recomputed"
    return "forward" if "jvp(" in stack else ""


class ValueRoles:
    """Roles of values, found as their equations are lowered.

    Args:
        jaxpr: the whole function, None for one of which nothing is known.
        donated: for each of its arguments whether a result takes its place; none when empty.
    """

    def __init__(self, jaxpr: Jaxpr | None = None, donated: Sequence[bool] = ()) -> None:
        self._roles: dict[Var, str] = {}
        self._weight_shapes: set[tuple[int, ...]] = set()
        self._sums: set[Var] = set()  # of gradients, made by loops, pipelines and collectives
        self._results: set[Var] = set()
        if jaxpr is not None:
            self._results.update(variables(jaxpr.outvars))
            self._find_arguments(jaxpr, donated)

    def get(self, var: Atom) -> str:
        """The role of a value, "" when unknown."""
        return "" if isinstance(var, Literal) else self._roles.get(var, "")

    def read(self, eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> None:
        """Finds the roles of what equations make.

        Args:
            eqns: all equations of a body, in order.
            results: what is read after them.
        """
        parts = [part_of_step(name_stack(eqn)) for eqn in eqns]
        by_gradient, by_rest = set[Var](), set(variables(results))
        for eqn, part in zip(eqns, parts, strict=True):
            (by_gradient if part in ("backward", "recomputed") else by_rest).update(variables_read(eqn))
        self._find_stored(eqns)
        roles = self._roles
        for eqn, part in zip(eqns, parts, strict=True):
            moved = self.get(eqn.invars[0]) if _is_move(eqn) else ""
            for var in eqn.outvars:
                if var not in roles:
                    role = moved if moved in _HELD else self._role(var, part, var in by_gradient, var in by_rest)
                    if role:
                        roles[var] = role
            for inner in inner_jaxprs(eqn):
                self._hand_on(inner.operands, inner.jaxpr.invars)
                self._hand_on(inner.results, inner.jaxpr.outvars)

    def _find_stored(self, eqns: Sequence[JaxprEqn]) -> None:
        """Gives what goes back to streaming memory the role of what lay there."""
        for eqn in eqns:
            if (stored := _STORES.get(eqn.primitive.name)) is not None:
                self._hand_on(eqn.invars[:1], eqn.invars[stored : stored + 1])

    def _role(self, var: Var, part: str, is_read_by_gradient: bool, is_read_by_rest: bool) -> str:
        if part == "backward":
            return GRADIENTS if is_read_by_rest and shape_of(var) in self._weight_shapes else ""
        if var in self._sums and is_read_by_rest and shape_of(var) in self._weight_shapes:
            return GRADIENTS
        if is_read_by_gradient:
            return RECOMPUTED if part == "recomputed" else KEPT
        return RESULTS if var in self._results else ""

    def _hand_on(self, outer: Sequence[Atom], inner: Sequence[Atom]) -> None:
        """Gives values of a jaxpr inside the roles of those outside, where both are known to be the same ones."""
        for one, other in zip(outer, inner, strict=True):
            role = self.get(one)
            if role and isinstance(other, Var):
                self._roles.setdefault(other, role)

    # --- arguments ---

    def _find_arguments(self, jaxpr: Jaxpr, donated: Sequence[bool]) -> None:
        flow = _Flow()
        env = {var: (1 << n, False, 1 << n) for n, var in enumerate(jaxpr.invars)}
        results = flow.through(jaxpr, env)
        self._sums = flow.sums
        roles, arguments = self._roles, list(jaxpr.invars)
        if not flow.gradient_shapes:
            places = donated or [False] * len(arguments)
            roles.update((var, STATE if place else ARGUMENTS) for var, place in zip(arguments, places, strict=True))
            return
        following = _following(arguments, jaxpr.outvars, results)
        differentiated = {n for n in range(len(arguments)) if flow.differentiated >> n & 1}
        weights = {
            n
            for n, result in following.items()
            if n in differentiated and results[result][1] and shape_of(arguments[n]) in flow.gradient_shapes
        }
        into_weights = 0
        for n in weights:
            into_weights |= results[following[n]][0]
        for n, var in enumerate(arguments):
            is_changed = n in following
            is_of_gradient = is_changed and (results[following[n]][1] or bool(into_weights >> n & 1))
            if n in weights:
                roles[var] = WEIGHTS
            elif is_changed:
                roles[var] = OPTIMISER_STATE if is_of_gradient and n not in differentiated else STATE
            else:
                roles[var] = INPUTS
        self._find_returned_gradients(arguments, jaxpr.outvars, results, differentiated - set(following))
        self._weight_shapes |= {shape_of(arguments[n]) for n in weights}
        for n, result in following.items():
            if isinstance(out := jaxpr.outvars[result], Var):
                roles.setdefault(out, roles[arguments[n]])

    def _find_returned_gradients(
        self, arguments: Sequence[Var], outs: Sequence[Atom], results: Sequence[Facts], left: set[int]
    ) -> None:
        """Weights are also those arguments whose gradient comes back, in the order of both."""
        for out, facts in zip(outs, results, strict=True):
            if _is_gradient_alone(facts) and isinstance(out, Var):
                match = next((n for n in sorted(left) if _kind(arguments[n]) == _kind(out)), None)
                if match is not None:
                    left.remove(match)
                    self._roles[arguments[match]] = WEIGHTS
                    self._weight_shapes.add(shape_of(out))
                    self._roles.setdefault(out, GRADIENTS)


class _Flow:
    """What the values of a jaxpr are computed from, with those inside of loops, branches and functions.

    Attributes:
        differentiated: the arguments that equations of a gradient read, as bits.
        gradient_shapes: shapes of what the backward pass makes and the rest reads.
        sums: results of loops, pipelines and collectives that are computed from gradients alone.
    """

    def __init__(self) -> None:
        self.differentiated = 0
        self.gradient_shapes: set[tuple[int, ...]] = set()
        self.sums: set[Var] = set()
        self._backward: set[Var] = set()
        self._branches: dict[Var, Facts] = {}  # of results of equations, joined over their jaxprs

    def through(self, jaxpr: Jaxpr, env: dict[Var, Facts]) -> list[Facts]:
        """The facts of the results of a jaxpr.

        Args:
            jaxpr: what is walked.
            env: the facts of its operands; those of all values are added.
        """
        for eqn in jaxpr.eqns:
            part = part_of_step(name_stack(eqn))
            mask, is_behind = 0, False
            own: dict[tuple[int, ...], int] = {}
            for var in variables_read(eqn):
                from_arguments, from_gradient, alike = env.get(var, _NOTHING)
                mask |= from_arguments
                is_behind |= from_gradient
                if alike and eqn.primitive.name not in PRODUCTS:
                    own[shape_of(var)] = own.get(shape_of(var), 0) | alike
            if part:
                self.differentiated |= mask
                made = (0, is_behind or part == "backward")
                env.update((var, (*made, own.get(shape_of(var), 0) if own else 0)) for var in eqn.outvars)
                if part == "backward":
                    self._backward.update(eqn.outvars)
                continue
            self._note_gradients(variables_read(eqn))
            env.update((var, (mask, is_behind, own.get(shape_of(var), 0) if own else 0)) for var in eqn.outvars)
            is_sum = eqn.primitive.name in _SUMS
            for inner in inner_jaxprs(eqn):
                is_sum = True
                self._through_inner(inner, env)
            if is_sum:
                self.sums.update(var for var in eqn.outvars if _is_gradient_alone(env[var]))
        self._note_gradients(variables(jaxpr.outvars))
        return [_NOTHING if isinstance(atom, Literal) else env.get(atom, _NOTHING) for atom in jaxpr.outvars]

    def _note_gradients(self, read: Sequence[Var]) -> None:
        self.gradient_shapes.update(shape_of(var) for var in read if var in self._backward)

    def _through_inner(self, inner: Inside, env: dict[Var, Facts]) -> None:
        """Adds the facts of the results of an equation from those of a jaxpr in it; loops go around twice."""
        given = [_NOTHING if isinstance(atom, Literal) else env.get(atom, _NOTHING) for atom in inner.operands]
        results = self.through(inner.jaxpr, dict(zip(inner.jaxpr.invars, given, strict=True)))
        again = [*given]
        for n in range(inner.carried):
            place = inner.first_carry + n
            again[place] = _joined(given[place], results[n])
        if again != given:
            read_at_first = self.differentiated  # all that changes weights is read by the next iteration
            results = self.through(inner.jaxpr, dict(zip(inner.jaxpr.invars, again, strict=True)))
            self.differentiated = read_at_first
        for var, facts in zip(inner.results, results, strict=True):
            env[var] = _joined(self._branches.get(var, _NOTHING), facts)
            self._branches[var] = env[var]


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Inside]:
    """The jaxprs inside an equation whose operands and results are those of the equation."""
    name, params = eqn.primitive.name, eqn.params
    if name not in _HOLDERS:
        return
    if name == "scan":
        yield Inside(params["jaxpr"].jaxpr, eqn.invars, eqn.outvars, params["num_consts"], params["num_carry"])
    elif name == "while":
        operands = eqn.invars[params["cond_nconsts"] :]
        yield Inside(params["body_jaxpr"].jaxpr, operands, eqn.outvars, params["body_nconsts"], len(eqn.outvars))
    elif name == "cond":
        for branch in params["branches"]:
            yield Inside(branch.jaxpr, eqn.invars[1:], eqn.outvars)
    else:
        yield Inside(closed(params["loop" if name == PIPELINE else "jaxpr"]).jaxpr, eqn.invars, eqn.outvars)


def _joined(one: Facts, other: Facts) -> Facts:
    return one[0] | other[0], one[1] or other[1], one[2] | other[2]


def _is_gradient_alone(facts: Facts) -> bool:
    return facts[1] and not facts[0]


def _is_move(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _MOVES and bool(eqn.invars) and isinstance(eqn.invars[0], Var)


def _kind(var: Var) -> tuple[Any, ...]:
    aval: Any = var.aval
    return aval.shape, aval.dtype


def _following(arguments: Sequence[Var], outs: Sequence[Atom], results: Sequence[Facts]) -> dict[int, int]:
    """For each argument that comes back changed the number of the result; those that may be of fewest come first."""
    kinds: dict[tuple[Any, ...], int] = {}
    for n, var in enumerate(arguments):
        kinds[_kind(var)] = kinds.get(_kind(var), 0) | 1 << n
    following: dict[int, int] = {}
    taken, matched = 0, set[int]()
    for way in (0, 2):  # outside of gradients, then element by element
        rows = [
            (candidates.bit_count(), number, candidates)
            for number, (out, facts) in enumerate(zip(outs, results, strict=True))
            if isinstance(out, Var) and (candidates := int(facts[way]) & kinds.get(_kind(out), 0))
        ]
        for _, number, candidates in sorted(rows):
            left = candidates & ~taken
            if left and number not in matched:
                argument = (left & -left).bit_length() - 1
                taken |= 1 << argument
                following[argument] = number
                matched.add(number)
    return following
