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
What results depend on is found through loops, branches and functions (`ArgumentFlow`); sets of arguments are whole
numbers, bit n of which stands for argument n.
Limits: without a gradient, weights cannot be told from inputs. Frozen weights are inputs, or other state if they are
returned. Weights of a hand-written backward pass are not detected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

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
# Primitives that overwrite a buffer, their operand 0, by the number of the operand that is stored there.
STORES = {"remote_store": 1, "remote_update": 2}


class ValueRoles:
    """Roles of values, found as their equations are lowered.

    Args:
        jaxpr: the entire function, None if it is unknown.
        donated: True for each argument whose place a result takes; none when empty.
    """

    def __init__(self, jaxpr: Jaxpr | None = None, donated: Sequence[bool] = ()) -> None:
        """Find the roles of a program's arguments: weights, optimiser state, inputs, as reports name memory."""
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
            if (operand := STORES.get(eqn.primitive.name)) is not None:
                self._copy_roles(eqn.invars[:1], eqn.invars[operand : operand + 1])

    def _role_of_result(self, var: Var, part: str, *, is_read_by_gradient: bool, is_read_by_rest: bool) -> str:
        """Return the role of a result of an equation, "" for none.

        A gradient of weights, or a sum of gradients over micro-batches or replicas, has the shape of weights, and the
        rest of the program reads it; other results of the backward pass have no role.

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


_SUMS = frozenset(("psum", "all_reduce", "psum_invariant", "reduce_scatter"))  # of gradients over replicas


class Dependence(NamedTuple):
    """Dependence of a value on arguments and gradients.

    Args:
        arguments: bits of the arguments that it is computed from outside of gradients.
        is_from_gradient: True if it is computed from a result of a backward pass.
        by_element: bits of the arguments of its shape, or whose parts it joins, that it is computed from element by
            element, also in gradients.
    """

    arguments: int = 0
    is_from_gradient: bool = False
    by_element: int = 0

    @property
    def is_from_gradient_alone(self) -> bool:
        """True for a gradient, or a value that is computed from gradients."""
        return self.is_from_gradient and not self.arguments

    def union(self, other: Dependence) -> Dependence:
        """Dependence of a value that is computed from two."""
        return Dependence(
            self.arguments | other.arguments,
            self.is_from_gradient or other.is_from_gradient,
            self.by_element | other.by_element,
        )


_NOTHING = Dependence()
_PARTS = ("part", "joined")  # costs of equations whose results have elements of operands of other shapes


class ArgumentFlow:
    """Dataflow of a jaxpr.

    Args:
        jaxpr: the entire function.

    Attributes:
        results: dependence of each result.
        differentiated: bits of the arguments that equations of a gradient read.
        gradient_shapes: shapes of results of the backward pass that the rest reads.
        sums: results of loops, pipelines and collectives that are computed from gradients only.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        """Walk the equations once, and find on which arguments each result depends; argument n is bit n of a mask."""
        self.differentiated = 0
        self.gradient_shapes: set[tuple[int, ...]] = set()
        self.sums: set[Var] = set()
        self._backward: set[Var] = set()
        self._of_branches: dict[Var, Dependence] = {}  # of results of equations, joined over the branches seen so far
        arguments = {var: Dependence(1 << n, by_element=1 << n) for n, var in enumerate(jaxpr.invars)}
        self.results = self._walk_equations(jaxpr, arguments)

    def _walk_equations(self, jaxpr: Jaxpr, dependences: dict[Var, Dependence]) -> list[Dependence]:
        """Return for each result of a jaxpr the arguments of the program, and whether gradients, that it depends on.

        An equation of a gradient, one with a part of training, ends the dependence on arguments, which are noted as
        differentiated; its results depend on a gradient if their operands do or it is of the backward pass. Dependence
        by element, of a value that may be an argument's new value, goes on through all equations.

        Args:
            jaxpr: the jaxpr.
            dependences: those of its inputs; updated: gets those of all values.
        """
        for eqn in jaxpr.eqns:
            part = part_of_name(name_stack(eqn))
            of_operands, by_element_of_shape = _dependence_on_operands(eqn, dependences)
            if part:  # forward, recomputed or backward
                self.differentiated |= of_operands.arguments
                arguments = 0
                is_from_gradient = of_operands.is_from_gradient or part == "backward"
            else:
                self._note_gradients(variables_read(eqn))
                arguments = of_operands.arguments
                is_from_gradient = of_operands.is_from_gradient
            for var in eqn.outvars:
                # Arguments of the result's shape that it may be the new value of; of rows that moved, of any shape.
                by_element = 0
                if by_element_of_shape:
                    is_moved = record_of(eqn).cost in _PARTS
                    shapes = by_element_of_shape if is_moved else (shape_of(var),)
                    by_element = reduce(or_, (by_element_of_shape.get(shape, 0) for shape in shapes))
                dependences[var] = Dependence(arguments, is_from_gradient, by_element)
            if part == "backward":
                self._backward.update(eqn.outvars)
            if not part:
                inner_bodies = bodies(eqn)
                for body in inner_bodies:
                    self._walk_body(body, eqn, dependences)
                # Sums of gradients over iterations, micro-batches or replicas are gradients too.
                if inner_bodies or eqn.primitive.name in _SUMS:
                    self.sums.update(var for var in eqn.outvars if dependences[var].is_from_gradient_alone)
        self._note_gradients(variables(jaxpr.outvars))
        return _dependences_of(jaxpr.outvars, dependences)

    def _note_gradients(self, variables_of_rest: Sequence[Var]) -> None:
        self.gradient_shapes.update(shape_of(var) for var in variables_of_rest if var in self._backward)

    def _walk_body(self, body: Body, eqn: JaxprEqn, dependences: dict[Var, Dependence]) -> None:
        """Find on which arguments of the program results of a loop, branch or call depend, by one of its bodies.

        Results of several bodies, branches, depend on the union. A loop is walked twice: in the second iteration its
        carries depend on what the first one has computed.

        Args:
            body: the body.
            eqn: the loop, branch or call.
            dependences: those of all values around it; updated: gets those of the results.
        """
        jaxpr = body.jaxpr.jaxpr
        first_inputs = _dependences_of(body.of_operands(eqn.invars), dependences)
        results = self._walk_equations(jaxpr, dict(zip(jaxpr.invars, first_inputs, strict=True)))
        inputs = [*first_inputs]
        inputs[body.inputs.carries] = map(
            Dependence.union, first_inputs[body.inputs.carries], results[body.results.carries]
        )
        if inputs != first_inputs:
            # In the second walk weights depend on all that updates them, which no gradient reads.
            differentiated_in_first = self.differentiated
            results = self._walk_equations(jaxpr, dict(zip(jaxpr.invars, inputs, strict=True)))
            self.differentiated = differentiated_in_first
        for var, dependence in zip(eqn.outvars, results, strict=True):
            dependences[var] = self._of_branches.get(var, _NOTHING).union(dependence)
            self._of_branches[var] = dependences[var]


def _dependence_on_operands(
    eqn: JaxprEqn, dependences: Mapping[Var, Dependence]
) -> tuple[Dependence, dict[tuple[int, ...], int]]:
    """Return which arguments of the program the operands of an equation depend on: all together, and by element.

    The latter, bit masks of arguments, by shape of the operands: a result of that shape is taken to be computed from
    them element by element, as an updated weight from the old one; not so in products.
    """
    arguments = 0  # a bit for each
    is_from_gradient = False
    by_element: dict[tuple[int, ...], int] = {}
    for var in variables_read(eqn):
        dependence = dependences.get(var, _NOTHING)
        arguments |= dependence.arguments
        is_from_gradient |= dependence.is_from_gradient
        if dependence.by_element and record_of(eqn).cost != "product":
            by_element[shape_of(var)] = by_element.get(shape_of(var), 0) | dependence.by_element
    return Dependence(arguments, is_from_gradient), by_element


def _dependences_of(atoms: Sequence[Atom], dependences: Mapping[Var, Dependence]) -> list[Dependence]:
    return [_NOTHING if isinstance(atom, Literal) else dependences.get(atom, _NOTHING) for atom in atoms]
