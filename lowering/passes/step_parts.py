"""Parts of a training step from its data flow, for equations whose name stack tells none.

    forward, backward, recomputed    by JAX's names of transformations, see `part_of_name`
    update      computed from a complete gradient, or read by such values alone; computed once a step from state
                alone, which the step writes again: weights that are cast, a counter of steps
    forward     other values that the forward part reads, such as a scaled batch; values computed from its results
    backward    computed from the gradient of a micro-batch, which a loop adds up
    plumbing    control of a loop or branch with several parts inside

Input: an inlined jaxpr with notes of layers. Output: the same with parts in the notes, which all passes carry on. An
equation that neither reads nor is read by any of these has no part. A jaxpr without a backward part stays as it is.

A loop with a gradient inside trains if the forward part of its next iteration reads values computed from the gradient,
else it accumulates gradients. A loop or branch without a gradient inside is of one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var, closed, jaxprs_in_params
from ipujax.lowering.jaxpr import LOOPS, PIPELINE, ValueRoles, bodies, equations, equations_inside, with_inner
from ipujax.lowering.jaxpr.control_bodies import Body, Places
from ipujax.lowering.layer_notes import with_part
from ipujax.lowering.source_info import name_stack
from ipujax.runtime.tensor import BACKWARD, FORWARD, PLUMBING, RECOMPUTED, UPDATE, part_of_name
from ipujax.runtime.tensor.roles import OPTIMISER_STATE, STATE, WEIGHTS

# Data flow of a value, as bits: its sources, direct or not,
_STATE = 1  # arguments that the step writes again
_INPUT = 2  # other arguments
_ACTIVATION = 4  # results of the forward part
_GRADIENT = 8
_SOURCES = _STATE | _INPUT | _ACTIVATION | _GRADIENT
# and its readers.
_READ_BY_FORWARD = 16
_READ_BY_UPDATE = 32
_READERS = _READ_BY_FORWARD | _READ_BY_UPDATE
_NO_FLOW = 0  # of a value that is computed from constants alone; of one that nothing reads

_RESULTS_OF = {FORWARD: _ACTIVATION, RECOMPUTED: _ACTIVATION, BACKWARD: _GRADIENT}


def with_parts(jaxpr: ClosedJaxpr, *, is_micro_batch: bool = False) -> ClosedJaxpr:
    """Return the jaxpr with the part of a training step of each equation (forward, update, …) in its note.

    `is_micro_batch`: whether it is the micro-batch of a pipeline, whose gradients are added up, not yet an update.
    """
    if not any(_named_part(eqn) == BACKWARD for eqn in equations(jaxpr.jaxpr)):
        return jaxpr
    inputs = [_INPUT] * len(jaxpr.in_avals)
    if not is_micro_batch:
        roles = ValueRoles(_program(jaxpr).jaxpr)
        written = {WEIGHTS, OPTIMISER_STATE, STATE}
        inputs = [_STATE if roles.get(var) in written else _INPUT for var in _program(jaxpr).jaxpr.invars]
    data_flow = _DataFlow(jaxpr, inputs)
    data_flow.add_readers([_NO_FLOW] * len(jaxpr.out_avals))  # results are read by no part of the step
    return data_flow.rewritten(BACKWARD if is_micro_batch else UPDATE)


def _program(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return the jaxpr that computes, inside of calls that are entire programs, as those of several replicas."""
    eqns = jaxpr.eqns
    if len(eqns) == 1 and (inner := _inner_bodies(eqns[0])) and eqns[0].primitive.name not in (*LOOPS, "cond"):
        return _program(inner[0].jaxpr) if list(eqns[0].invars) == list(jaxpr.jaxpr.invars) else jaxpr
    return jaxpr


def _named_part(eqn: JaxprEqn) -> str:
    return part_of_name(name_stack(eqn))


def _inner_bodies(eqn: JaxprEqn) -> list[Body]:
    """Return the bodies of control flow, and of other calls with operands and results of their own number."""
    if inner_bodies := bodies(eqn):
        return inner_bodies
    counts = len(eqn.invars), len(eqn.outvars)
    calls = [closed(inner) for inner in jaxprs_in_params(eqn.params)]
    operands, results = (Places(slice(0, n), slice(n, n), slice(n, n)) for n in counts)
    return [Body(x, operands, operands, results) for x in calls if (len(x.in_avals), len(x.out_avals)) == counts]


def _is_region(eqn: JaxprEqn) -> bool:
    """Return whether an equation without a part has equations of a gradient inside."""
    return any(_named_part(inner) == BACKWARD for inner in equations_inside(eqn))


@dataclass(eq=False)
class _DataFlow:
    """Data flow of the values of one jaxpr: the sources and the readers of each, as bits.

    Args:
        jaxpr: the jaxpr.
        inputs: data flow of its inputs.
        flows: that of all values.
        regions: that of the bodies of equations with a gradient inside, by number of the equation.
    """

    jaxpr: ClosedJaxpr
    inputs: Sequence[int]
    flows: dict[Var, int] = field(default_factory=dict)
    regions: dict[int, list[tuple[Body, _DataFlow]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the sources of each value; `add_readers` adds its readers."""
        self._add_flows(self.jaxpr.jaxpr.invars, self.inputs)
        for number, eqn in enumerate(self.jaxpr.eqns):
            if part := _named_part(eqn):
                self._add_flows(eqn.outvars, [_RESULTS_OF[part]] * len(eqn.outvars))
            elif _is_region(eqn):
                self._follow_bodies(number, eqn)
            else:
                self._add_flows(eqn.outvars, [self._flow_of_any(eqn.invars) & _SOURCES] * len(eqn.outvars))

    @property
    def results(self) -> list[int]:
        """Data flow of its results."""
        return [self._flow_of(atom) for atom in self.jaxpr.jaxpr.outvars]

    def _flow_of(self, atom: Atom) -> int:
        return self.flows.get(atom, _NO_FLOW) if isinstance(atom, Var) else _NO_FLOW

    def _flow_of_any(self, atoms: Sequence[Atom]) -> int:
        return reduce(or_, map(self._flow_of, atoms), _NO_FLOW)

    def _add_flows(self, atoms: Sequence[Atom], flows: Sequence[int]) -> None:
        for atom, flow in zip(atoms, flows, strict=True):
            if isinstance(atom, Var):
                self.flows[atom] = self.flows.get(atom, _NO_FLOW) | flow

    def _follow_bodies(self, number: int, eqn: JaxprEqn) -> None:
        """Find the sources of values inside an equation with a gradient in its bodies, and so those of its results.

        Args:
            number: number of the equation.
            eqn: the equation, a loop, branch or call. Carries that a loop computes from gradients are its state.
        """
        is_loop = eqn.primitive.name in LOOPS
        self.regions[number] = []
        for body in _inner_bodies(eqn):
            # Sources of each input of the body: state, input, activation, gradient.
            inputs = [self._flow_of(atom) & _SOURCES for atom in body.of_operands(eqn.invars)]
            if is_loop:
                # An iteration's activations and gradients are those that it computes itself: others are inputs to it,
                # and so are values computed from state and from something else.
                inputs = [flow if flow in (_NO_FLOW, _STATE) else _INPUT for flow in inputs]
                # A carry that an iteration computes from gradients is state of the next: followed once to find these.
                updated = _DataFlow(body.jaxpr, inputs).results[body.results.carries]
                inputs[body.inputs.carries] = [
                    _STATE if flow & _GRADIENT else old
                    for flow, old in zip(updated, inputs[body.inputs.carries], strict=True)
                ]
            inside = _DataFlow(body.jaxpr, inputs)
            self.regions[number].append((body, inside))
            self._add_flows(eqn.outvars, [flow & _SOURCES for flow in inside.results])

    def add_readers(self, readers: Sequence[int]) -> None:
        """Add to each value, last equation first, whether the forward part or the update reads it.

        `readers` are those of the results, as bits of `_READERS`. The readers of a carry in the next iteration are
        added once: a part that reads it two iterations later only, through another carry, is left out.
        """
        self._add_flows(self.jaxpr.jaxpr.outvars, readers)
        for number, eqn in reversed(list(enumerate(self.jaxpr.eqns))):
            if number in self.regions:
                for body, inside in self.regions[number]:
                    inside.add_readers([self._flow_of(var) & _READERS for var in eqn.outvars])
                    if eqn.primitive.name in LOOPS:  # the next iteration reads what this one carries
                        carried = inside.readers_of_inputs(body.inputs.carries)
                        stacks = [_NO_FLOW] * (body.results.stacks.stop - body.results.stacks.start)
                        inside.add_readers([*carried, *stacks])
                    self._add_flows(body.of_operands(eqn.invars), inside.readers_of_inputs(slice(None)))
                continue
            part = self.part(number, of_gradients=UPDATE)  # equations that read gradients are the update
            # Operands of an equation of no part are read by the readers of its results. Operands of a gradient count as
            # read by the forward part: they are activations, which that part computes.
            readers_of_results = self._flow_of_any(eqn.outvars) & _READERS
            reader = {"": readers_of_results, UPDATE: _READ_BY_UPDATE}.get(part, _READ_BY_FORWARD)
            self._add_flows(eqn.invars, [reader] * len(eqn.invars))

    def readers_of_inputs(self, places: slice) -> list[int]:
        """Return the readers of some of its inputs, as bits."""
        return [self._flow_of(var) & _READERS for var in self.jaxpr.jaxpr.invars[places]]

    def part(self, number: int, of_gradients: str) -> str:
        """Return the part of a training step that an equation is of: by name, else by its sources and its readers.

        Args:
            number: number of the equation, which has no gradient inside.
            of_gradients: part of values computed from gradients: the update, or backward if a loop adds them up.

        Returns:
            The part; "" for an equation that no part reads and that reads none.
        """
        eqn = self.jaxpr.eqns[number]
        if part := _named_part(eqn):
            return part
        sources = self._flow_of_any(eqn.invars) & _SOURCES
        readers = self._flow_of_any(eqn.outvars) & _READERS
        if sources & _GRADIENT:
            return of_gradients
        if sources == _STATE and of_gradients == UPDATE:  # weights are cast, steps counted
            return UPDATE
        if readers & _READ_BY_FORWARD:
            return FORWARD
        if readers & _READ_BY_UPDATE:
            return of_gradients
        return FORWARD if sources & _ACTIVATION else ""

    def rewritten(self, of_gradients: str) -> ClosedJaxpr:
        """Return the jaxpr with the part of a training step (forward, update, …) of each equation in its note.

        `of_gradients` is the part of what is computed from gradients: the update, or backward if a loop adds them up.
        """
        eqns = []
        for number, eqn in enumerate(self.jaxpr.eqns):
            if number in self.regions:
                eqn = self._rewritten_region(number, eqn, of_gradients)
            elif not _named_part(eqn):  # others have theirs by name
                eqn = with_part(eqn, self.part(number, of_gradients))
            eqns.append(eqn)
        return ClosedJaxpr(self.jaxpr.jaxpr.replace(eqns=eqns), self.jaxpr.consts)

    def _rewritten_region(self, number: int, eqn: JaxprEqn, of_gradients: str) -> JaxprEqn:
        """Return an equation with gradients in its bodies, their equations with parts in notes.

        Its own part is plumbing: to control a loop or a branch is of none of the parts inside.

        Args:
            number: number of the equation.
            eqn: the equation, a loop or another one with bodies.
            of_gradients: part of what is computed from gradients around it, update or backward. A branch has the same
                inside; the body of a loop may have the other, see the method of that name.
        """
        if eqn.primitive.name == PIPELINE:  # its micro-batch gets parts when it is cut into stages
            return with_part(eqn, PLUMBING)
        is_loop = eqn.primitive.name in LOOPS
        rewritten = {
            id(body.jaxpr.jaxpr): inside.rewritten(inside.of_gradients(body) if is_loop else of_gradients)
            for body, inside in self.regions[number]
        }

        def rewrite(inner: ClosedJaxpr) -> ClosedJaxpr:
            return rewritten.get(id(inner.jaxpr), inner)

        return with_part(with_inner(eqn, rewrite), PLUMBING)

    def of_gradients(self, body: Body) -> str:
        """Return the part of values computed from gradients in a loop: the update if it trains, else backward."""
        carries = zip(self.results[body.results.carries], self.readers_of_inputs(body.inputs.carries), strict=True)
        trains = any(flow & _GRADIENT and reader & _READ_BY_FORWARD for flow, reader in carries)
        return UPDATE if trains else BACKWARD
