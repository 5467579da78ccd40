"""Roles of the values of a jaxpr: weights, optimiser state, gradients, activations, inputs.

Input: the jaxpr that is lowered, with JAX's names `jvp(…)` and `transpose(…)` on the equations of gradients. Output:
`ValueRoles`, a role of `runtime.tensor.roles` for values whose role is known.

    weights           arguments that are updated by a gradient, have a gradient themselves, and are read by
                      differentiated equations; or those whose gradient is returned
    optimiser state   arguments that are updated by a gradient, or update weights, and are not read there
    other state       other updated arguments, such as statistics of a normalisation, or random keys
    inputs            the other arguments; `arguments` in a program without a gradient, which tells little of them
    gradients         results of the backward pass in the shape of weights that the rest of the program reads, and sums
                      of these in loops and pipelines
    activations       results of the forward pass, or of a recomputation, that the backward pass reads
    results           the other results of the function

An argument is updated if a result of its shape and dtype is computed from it outside of the gradient, or else element
by element; a result with several such arguments updates the one that no other result updates. Without a gradient only
the second counts, and only beside other arguments: a result may be the state after an input, or what became of the one
argument. Inside loops, functions
and branches, operands and results have the roles of those outside.
Limits: without a gradient, weights cannot be told from inputs. Frozen weights are inputs, or other state if they are
returned. Weights of a hand-written backward pass are not detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipujax.lowering.jax_compat import Atom, Jaxpr, JaxprEqn, Literal, Var, shape_of
from ipujax.lowering.jaxpr.control_bodies import Body, bodies
from ipujax.lowering.jaxpr.nested import variables, variables_read
from ipujax.lowering.primitives import record_of
from ipujax.lowering.source_info import name_stack
from ipujax.runtime.tensor import part_of_name
from ipujax.runtime.tensor.roles import (
    ARGUMENTS,
    GRADIENTS,
    INPUTS,
    OPTIMISER_STATE,
    RECOMPUTED,
    RESULTS,
    STATE,
    STORED,
    WEIGHTS,
)

_LASTING_ROLES = frozenset((WEIGHTS, OPTIMISER_STATE, STATE, INPUTS, ARGUMENTS))  # roles that moves and casts preserve
_CASTS = ("convert_element_type", "reduce_precision", "copy", "copy_p", "device_put", "optimization_barrier")
_LOADS = ("remote_load", "remote_rows", "remote_fetch", "remote_take", "remote_hand", "remote_put", "host_put")
_MOVES = frozenset((*_CASTS, *_LOADS))
_STORES = {"remote_store": 1, "remote_update": 2}  # number of the operand that is stored to the buffer, operand 0
_SUMS = frozenset(("psum", "all_reduce", "psum_invariant", "reduce_scatter"))  # of gradients over replicas

# Bits of the arguments that a value is computed from outside of gradients; true if it is computed from a gradient; and
# bits of the arguments of its shape that it is computed from element by element, also inside gradients.
Dependence = tuple[int, bool, int]
_NOTHING: Dependence = (0, False, 0)
_OUTSIDE_OF_GRADIENTS = 0  # numbers of fields of a dependence
_BY_ELEMENT = 2


class ValueRoles:
    """Roles of values, found as their equations are lowered.

    Args:
        jaxpr: the entire function, None if it is unknown.
        donated: True for each argument whose place a result takes; none when empty.
    """

    def __init__(self, jaxpr: Jaxpr | None = None, donated: Sequence[bool] = ()) -> None:
        self._roles: dict[Var, str] = {}
        self._weight_shapes: set[tuple[int, ...]] = set()
        self._sums: set[Var] = set()  # of gradients, results of loops, pipelines and collectives
        self._results: set[Var] = set()
        if jaxpr is not None:
            self._results.update(variables(jaxpr.outvars))
            self._find_arguments(jaxpr, donated)

    def get(self, var: Atom) -> str:
        """Return the role of a value, "" if unknown."""
        return "" if isinstance(var, Literal) else self._roles.get(var, "")

    def read(self, eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> None:
        """Find the roles of the results of equations.

        Args:
            eqns: all equations of a body, in order.
            results: results of the body.
        """
        parts = [part_of_name(name_stack(eqn)) for eqn in eqns]
        read_by_gradient = set[Var]()
        read_by_rest = set(variables(results))
        for eqn, part in zip(eqns, parts, strict=True):
            (read_by_gradient if part in ("backward", "recomputed") else read_by_rest).update(variables_read(eqn))
        self._find_stored(eqns)
        roles = self._roles
        for eqn, part in zip(eqns, parts, strict=True):
            source_role = self.get(eqn.invars[0]) if _is_move(eqn) else ""
            for var in eqn.outvars:
                if var not in roles:
                    role = (
                        source_role
                        if source_role in _LASTING_ROLES
                        else self._role(var, part, var in read_by_gradient, var in read_by_rest)
                    )
                    if role:
                        roles[var] = role
            for body in bodies(eqn):
                self._copy_roles(body.of_operands(eqn.invars), body.jaxpr.jaxpr.invars)
                self._copy_roles(eqn.outvars, body.jaxpr.jaxpr.outvars)

    def _find_stored(self, eqns: Sequence[JaxprEqn]) -> None:
        """Give values stored to streaming memory the role of the buffer."""
        for eqn in eqns:
            if (operand := _STORES.get(eqn.primitive.name)) is not None:
                self._copy_roles(eqn.invars[:1], eqn.invars[operand : operand + 1])

    def _role(self, var: Var, part: str, is_read_by_gradient: bool, is_read_by_rest: bool) -> str:
        """Return the role of a result of an equation in a part of the step, "" for none."""
        # The rest: equations outside of the gradient, and the results of the body.
        if part == "backward":
            return GRADIENTS if is_read_by_rest and shape_of(var) in self._weight_shapes else ""
        if var in self._sums and is_read_by_rest and shape_of(var) in self._weight_shapes:
            return GRADIENTS
        if is_read_by_gradient:
            return RECOMPUTED if part == "recomputed" else STORED
        return RESULTS if var in self._results else ""

    def _copy_roles(self, sources: Sequence[Atom], destinations: Sequence[Atom]) -> None:
        """Give values of one jaxpr the roles of the same values in another."""
        for source, destination in zip(sources, destinations, strict=True):
            role = self.get(source)
            if role and isinstance(destination, Var):
                self._roles.setdefault(destination, role)

    def _find_arguments(self, jaxpr: Jaxpr, donated: Sequence[bool]) -> None:
        """Find the roles of arguments by how results are computed from them, and of results that update them."""
        flow = _Flow()
        env = {var: (1 << n, False, 1 << n) for n, var in enumerate(jaxpr.invars)}
        results = flow.through(jaxpr, env)
        self._sums = flow.sums
        roles = self._roles
        arguments = list(jaxpr.invars)
        if not flow.gradient_shapes:
            changed = _updates(arguments, jaxpr.outvars, results, (_BY_ELEMENT,))
            changed = changed if len(changed) < len(arguments) else {}
            is_donated = donated or [False] * len(arguments)
            roles.update(
                (var, STATE if is_overwritten or n in changed else ARGUMENTS)
                for n, (var, is_overwritten) in enumerate(zip(arguments, is_donated, strict=True))
            )
            return
        updates = _updates(arguments, jaxpr.outvars, results, (_OUTSIDE_OF_GRADIENTS, _BY_ELEMENT))
        differentiated = {n for n in range(len(arguments)) if flow.differentiated >> n & 1}
        weights = {
            n
            for n, result in updates.items()
            if n in differentiated and results[result][1] and shape_of(arguments[n]) in flow.gradient_shapes
        }
        into_weights = 0
        for n in weights:
            into_weights |= results[updates[n]][0]
        for n, var in enumerate(arguments):
            is_changed = n in updates
            is_of_gradient = is_changed and (results[updates[n]][1] or bool(into_weights >> n & 1))
            if n in weights:
                roles[var] = WEIGHTS
            elif is_changed:
                roles[var] = OPTIMISER_STATE if is_of_gradient and n not in differentiated else STATE
            else:
                roles[var] = INPUTS
        self._find_returned_gradients(arguments, jaxpr.outvars, results, differentiated - set(updates))
        self._weight_shapes |= {shape_of(arguments[n]) for n in weights}
        for n, result in updates.items():
            if isinstance(out := jaxpr.outvars[result], Var):
                roles.setdefault(out, roles[arguments[n]])

    def _find_returned_gradients(
        self, arguments: Sequence[Var], outs: Sequence[Atom], results: Sequence[Dependence], unmatched: set[int]
    ) -> None:
        """Add as weights the arguments whose gradient is returned, paired in order."""
        for out, dependence in zip(outs, results, strict=True):
            if _is_gradient_alone(dependence) and isinstance(out, Var):
                match = next((n for n in sorted(unmatched) if _kind(arguments[n]) == _kind(out)), None)
                if match is not None:
                    unmatched.remove(match)
                    self._roles[arguments[match]] = WEIGHTS
                    self._weight_shapes.add(shape_of(out))
                    self._roles.setdefault(out, GRADIENTS)


class _Flow:
    """Dataflow of a jaxpr: for each value the arguments it is computed from, also inside loops, branches and functions.

    Attributes:
        differentiated: bits of the arguments that equations of a gradient read.
        gradient_shapes: shapes of results of the backward pass that the rest reads.
        sums: results of loops, pipelines and collectives that are computed from gradients only.
    """

    def __init__(self) -> None:
        self.differentiated = 0
        self.gradient_shapes: set[tuple[int, ...]] = set()
        self.sums: set[Var] = set()
        self._backward: set[Var] = set()
        self._branches: dict[Var, Dependence] = {}  # of results of equations, joined over their branches

    def through(self, jaxpr: Jaxpr, env: dict[Var, Dependence]) -> list[Dependence]:
        """Return the dependences of a jaxpr's results; `env` has those of its inputs, and gets those of all values."""
        for eqn in jaxpr.eqns:
            part = part_of_name(name_stack(eqn))
            mask = 0
            is_from_gradient = False
            by_shape: dict[tuple[int, ...], int] = {}
            for var in variables_read(eqn):
                from_arguments, from_gradient, same_shape = env.get(var, _NOTHING)
                mask |= from_arguments
                is_from_gradient |= from_gradient
                if same_shape and record_of(eqn).cost != "product":
                    by_shape[shape_of(var)] = by_shape.get(shape_of(var), 0) | same_shape
            if part:
                self.differentiated |= mask
                sources = (0, is_from_gradient or part == "backward")
                env.update((var, (*sources, by_shape.get(shape_of(var), 0) if by_shape else 0)) for var in eqn.outvars)
                if part == "backward":
                    self._backward.update(eqn.outvars)
                continue
            self._note_gradients(variables_read(eqn))
            env.update(
                (var, (mask, is_from_gradient, by_shape.get(shape_of(var), 0) if by_shape else 0))
                for var in eqn.outvars
            )
            is_sum = eqn.primitive.name in _SUMS
            for body in bodies(eqn):
                is_sum = True
                self._through_body(body, eqn, env)
            if is_sum:
                self.sums.update(var for var in eqn.outvars if _is_gradient_alone(env[var]))
        self._note_gradients(variables(jaxpr.outvars))
        return [_NOTHING if isinstance(atom, Literal) else env.get(atom, _NOTHING) for atom in jaxpr.outvars]

    def _note_gradients(self, read: Sequence[Var]) -> None:
        self.gradient_shapes.update(shape_of(var) for var in read if var in self._backward)

    def _through_body(self, body: Body, eqn: JaxprEqn, env: dict[Var, Dependence]) -> None:
        """Add the dependences of an equation's results from a body in it; loops are walked twice."""
        jaxpr = body.jaxpr.jaxpr
        first_inputs = [
            _NOTHING if isinstance(atom, Literal) else env.get(atom, _NOTHING) for atom in body.of_operands(eqn.invars)
        ]
        results = self.through(jaxpr, dict(zip(jaxpr.invars, first_inputs, strict=True)))
        inputs = [*first_inputs]
        inputs[body.inputs.carries] = map(_union, first_inputs[body.inputs.carries], results[body.results.carries])
        if inputs != first_inputs:
            read_in_first = self.differentiated  # in the second walk weights read all that updates them
            results = self.through(jaxpr, dict(zip(jaxpr.invars, inputs, strict=True)))
            self.differentiated = read_in_first
        for var, dependence in zip(eqn.outvars, results, strict=True):
            env[var] = _union(self._branches.get(var, _NOTHING), dependence)
            self._branches[var] = env[var]


def _union(a: Dependence, b: Dependence) -> Dependence:
    return a[0] | b[0], a[1] or b[1], a[2] | b[2]


def _is_gradient_alone(dependence: Dependence) -> bool:
    return dependence[1] and not dependence[0]


def _is_move(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _MOVES and bool(eqn.invars) and isinstance(eqn.invars[0], Var)


def _kind(var: Var) -> tuple[Any, ...]:
    aval: Any = var.aval
    return aval.shape, aval.dtype


def _updates(
    arguments: Sequence[Var], outs: Sequence[Atom], results: Sequence[Dependence], evidence: Sequence[int]
) -> dict[int, int]:
    """Number of the result that updates each argument; results with fewest candidates are assigned first."""
    # Of `evidence`, fields of a dependence, the first counts first.
    kinds: dict[tuple[Any, ...], int] = {}
    for n, var in enumerate(arguments):
        kinds[_kind(var)] = kinds.get(_kind(var), 0) | 1 << n
    updates: dict[int, int] = {}
    assigned = 0
    matched = set[int]()
    for field in evidence:
        rows = [
            (candidates.bit_count(), number, candidates)
            for number, (out, dependence) in enumerate(zip(outs, results, strict=True))
            if isinstance(out, Var) and (candidates := int(dependence[field]) & kinds.get(_kind(out), 0))
        ]
        for _, number, candidates in sorted(rows):
            # The lowest free bit: of several candidates the first argument.
            free = candidates & ~assigned
            if free and number not in matched:
                argument = (free & -free).bit_length() - 1
                assigned |= 1 << argument
                updates[argument] = number
                matched.add(number)
    return updates
