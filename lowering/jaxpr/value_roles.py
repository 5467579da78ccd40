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
argument. Inside loops, functions and branches, operands and results have the roles of those outside.
Limits: without a gradient, weights cannot be told from inputs. Frozen weights are inputs, or other state if they are
returned. Weights of a hand-written backward pass are not detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

from ipujax.lowering.jax_compat import Atom, Jaxpr, JaxprEqn, Literal, Var, shape_of
from ipujax.lowering.jaxpr.argument_flow import ArgumentFlow, Dependence
from ipujax.lowering.jaxpr.control_bodies import bodies
from ipujax.lowering.jaxpr.nested import variables, variables_read
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
            flow = ArgumentFlow(jaxpr)
            self._sums = flow.sums
            if flow.gradient_shapes:
                self._find_arguments_by_gradient(jaxpr, flow)
            else:
                self._find_arguments_without_gradient(jaxpr, flow, donated)

    def get(self, var: Atom) -> str:
        """Return the role of a value, "" if unknown."""
        return "" if isinstance(var, Literal) else self._roles.get(var, "")

    def find_roles(self, eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> None:
        """Find the roles (weights, gradients, stored for the backward pass, …) of the results of equations.

        A role that a value has already stays. Bodies of control flow are not walked: their inputs and results get the
        roles outside, for their own `find_roles`.

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
        for eqn, part in zip(eqns, parts, strict=True):
            source_role = self.get(eqn.invars[0]) if _is_move(eqn) else ""
            for var in eqn.outvars:
                role = source_role
                if role not in _LASTING_ROLES:
                    role = self._role_of_result(
                        var,
                        part,
                        is_read_by_gradient=var in read_by_gradient,
                        is_read_by_rest=var in read_by_rest,
                    )
                if role:
                    self._roles.setdefault(var, role)
            for body in bodies(eqn):
                self._copy_roles(body.of_operands(eqn.invars), body.jaxpr.jaxpr.invars)
                self._copy_roles(eqn.outvars, body.jaxpr.jaxpr.outvars)

    def _find_stored(self, eqns: Sequence[JaxprEqn]) -> None:
        """Give values stored to streaming memory the role of the buffer."""
        for eqn in eqns:
            if (operand := _STORES.get(eqn.primitive.name)) is not None:
                self._copy_roles(eqn.invars[:1], eqn.invars[operand : operand + 1])

    def _role_of_result(self, var: Var, part: str, *, is_read_by_gradient: bool, is_read_by_rest: bool) -> str:
        """Return the role of a result of an equation, "" for none.

        A gradient of weights has their shape, and the rest of the program reads it; other results of the backward pass
        have no role.

        Args:
            var: the result.
            part: part of training of its equation, "" outside of gradients.
            is_read_by_gradient: whether equations of the backward pass, or of a recomputation, read it.
            is_read_by_rest: whether other equations read it, or it is a result of the body.
        """
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

    def _find_arguments_without_gradient(self, jaxpr: Jaxpr, flow: ArgumentFlow, donated: Sequence[bool]) -> None:
        """Find the state among arguments: those that are donated, or updated beside others that are not."""
        updates = _match_updates(jaxpr.invars, jaxpr.outvars, [[x.by_element for x in flow.results]])
        # If all arguments have a result, these may be what became of inputs.
        updated = updates.keys() if len(updates) < len(jaxpr.invars) else ()
        is_donated = donated or [False] * len(jaxpr.invars)
        for n, var in enumerate(jaxpr.invars):
            self._roles[var] = STATE if is_donated[n] or n in updated else ARGUMENTS

    def _find_arguments_by_gradient(self, jaxpr: Jaxpr, flow: ArgumentFlow) -> None:
        """Find the roles of a training step's arguments, by how its results are computed from them.

        Weights are differentiated, and updated by a gradient; optimiser state is updated by a gradient, or goes into
        weights; state is updated otherwise; inputs are not updated. A result that updates an argument has its role.

        Args:
            jaxpr: the training step.
            flow: on which arguments each result depends, as bit masks: bit n is argument n.
        """
        arguments = jaxpr.invars
        roles = self._roles
        outside_of_gradients = [x.arguments for x in flow.results]
        by_element = [x.by_element for x in flow.results]
        updates = _match_updates(arguments, jaxpr.outvars, [outside_of_gradients, by_element])
        new_values = {n: flow.results[result] for n, result in updates.items()}
        differentiated = {n for n in range(len(arguments)) if flow.differentiated >> n & 1}
        weights = {
            n
            for n, new_value in new_values.items()
            if n in differentiated and new_value.is_from_gradient and shape_of(arguments[n]) in flow.gradient_shapes
        }
        into_weights = reduce(or_, (new_values[n].arguments for n in weights), 0)  # such as momenta
        for n, var in enumerate(arguments):
            if n in weights:
                roles[var] = WEIGHTS
            elif n not in new_values:
                roles[var] = INPUTS
            elif n not in differentiated and (new_values[n].is_from_gradient or into_weights >> n & 1):
                roles[var] = OPTIMISER_STATE
            else:
                roles[var] = STATE
        self._find_returned_gradients(arguments, jaxpr.outvars, flow.results, differentiated - set(updates))
        self._weight_shapes |= {shape_of(arguments[n]) for n in weights}
        for n, result in updates.items():
            if isinstance(out := jaxpr.outvars[result], Var):
                roles.setdefault(out, roles[arguments[n]])

    def _find_returned_gradients(
        self, arguments: Sequence[Var], outs: Sequence[Atom], results: Sequence[Dependence], unmatched: set[int]
    ) -> None:
        """Give the role of weights to arguments whose gradient is returned, and the role of gradients to these results.

        A gradient belongs to the first argument of its shape and dtype that no other has taken.

        Args:
            arguments: all arguments.
            outs: all results.
            results: dependence of each result.
            unmatched: numbers of the arguments that gradients read and no result updates; updated: weights are removed.
        """
        for out, dependence in zip(outs, results, strict=True):
            if dependence.is_from_gradient_alone and isinstance(out, Var):
                match = next((n for n in sorted(unmatched) if _type_of(arguments[n]) == _type_of(out)), None)
                if match is not None:
                    unmatched.remove(match)
                    self._roles[arguments[match]] = WEIGHTS
                    self._weight_shapes.add(shape_of(out))
                    self._roles.setdefault(out, GRADIENTS)


def _is_move(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _MOVES and bool(eqn.invars) and isinstance(eqn.invars[0], Var)


def _type_of(var: Var) -> tuple[Any, ...]:
    aval: Any = var.aval
    return aval.shape, aval.dtype


def _match_updates(arguments: Sequence[Var], outs: Sequence[Atom], evidence: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return by number of the argument that of the result that updates it: at most one argument for each result.

    Results with fewest candidates are assigned first. A candidate has the shape and dtype of the result.

    Args:
        arguments: all arguments.
        outs: all results.
        evidence: lists of a bit mask for each result: bit n is set if it may update argument n, as far as its
            computation tells. A later list assigns only what the lists before it have left.
    """
    arguments_of_type: dict[tuple[Any, ...], int] = {}
    for n, var in enumerate(arguments):
        arguments_of_type[_type_of(var)] = arguments_of_type.get(_type_of(var), 0) | 1 << n
    updates: dict[int, int] = {}
    updated = 0  # bits of the arguments in `updates`
    assigned_results = set[int]()
    for bits_of_results in evidence:
        rows = [
            (candidates.bit_count(), number, candidates)
            for number, (out, bits) in enumerate(zip(outs, bits_of_results, strict=True))
            if isinstance(out, Var) and (candidates := bits & arguments_of_type.get(_type_of(out), 0))
        ]
        for _, number, candidates in sorted(rows):
            free = candidates & ~updated
            if free and number not in assigned_results:
                # The lowest free bit: of several candidates the first argument.
                argument = (free & -free).bit_length() - 1
                updated |= 1 << argument
                updates[argument] = number
                assigned_results.add(number)
    return updates
