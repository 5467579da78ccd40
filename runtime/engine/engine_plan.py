"""What the engine knows of a program before it traces it, as a value.

Input: a graph and a program. Output: `EnginePlan`: the vertex groups as they are run, the orders of arrays, the
variables of streams. Vertices are run unsplit wherever the kinds of their axes allow it (`runtime/engine/collapse.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import jax.numpy as jnp

from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.engine.collapse import (
    collapse_group,
    compared_variables,
    executed_groups,
    find_collapsible,
    observed_variables,
    one_slot,
)
from ipujax.runtime.engine.orders import ChosenOrders, choose_orders, reorder_group
from ipujax.runtime.engine.split import Signature, signatures
from ipujax.runtime.engine.values import stream_variables
from ipujax.runtime.graph import (
    Block,
    Branch,
    Call,
    Execute,
    Function,
    Graph,
    HostStream,
    Loop,
    Program,
    Repeat,
    StreamIn,
    StreamOut,
    VertexGroup,
    direct_tensors,
    distinct,
)
from ipujax.runtime.tensor import Orders, Variable

Live = frozenset[Variable]
CONTROL = (Loop, Branch, Call)
_MIN_LOOP = 16  # executions in a row that become a loop; XLA can fuse fewer ones


@dataclass(frozen=True, slots=True, eq=False)
class EnginePlan:
    """A program of one replica: all that depends neither on arrays nor on what is outside of the program.

    Args:
        graph: holds the vertex groups and constants.
        program: the program.
        exact_splits: whether every vertex is computed by itself.
        effects: effects of the nodes.
        order: number of each variable of the graph.
        groups: each vertex group as it is run, and the signatures of its vertices.
        orders: orders of the arrays that are not row-major.
        kept: variable → that whose array is kept for it: of one slot, or in the order of its elements.
        constants: constants that the program reads, in the order of the graph.
        inputs: variable for the value of each stream that is read, which loops and branches carry like any other.
        outputs: the same of streams that are written.
        has_failed: variable that says whether the host has failed.
        called_around: functions that stay functions.
        compared: variables whose values are computed once, see `collapse`.
    """

    graph: Graph
    program: Program
    exact_splits: bool
    effects: EffectsOf
    order: Mapping[Variable, int]
    groups: Mapping[VertexGroup, tuple[VertexGroup, list[Signature]]]
    orders: Orders
    kept: Mapping[Variable, Variable]
    constants: tuple[Variable, ...]
    inputs: Mapping[HostStream, Variable]
    outputs: Mapping[HostStream, Variable]
    has_failed: Variable
    called_around: Collection[Function]
    compared: frozenset[Variable]

    @classmethod
    def of(
        cls,
        graph: Graph,
        program: Program,
        exact_splits: bool,
        persistent: Collection[Variable],
        observed: Collection[HostStream],
    ) -> EnginePlan:
        """Return the plan of a program; `persistent` are the variables that last beyond a run."""
        effects = EffectsOf(graph)
        order = {variable: number for number, variable in enumerate(graph.variables)}
        collapsed = {} if exact_splits else {v: one_slot(v) for v in find_collapsible(graph, program, persistent)}
        groups = {group: collapse_group(group, collapsed, exact_splits) for group in executed_groups(graph, program)}
        chosen = ChosenOrders()
        if not exact_splits:
            fixed = {*persistent, *effects(program).reads, *graph.off_chip}
            chosen = choose_orders(program, lambda step: [groups[x] for x in graph.groups[step.compute_set]], fixed)
        ordered = {group: reorder_group(collapsed_group, chosen) for group, collapsed_group in groups.items()}
        orders = chosen.variables
        arrays = {v: orders[slot].array if slot in orders else slot for v, slot in collapsed.items()}
        return cls(
            graph,
            program,
            exact_splits,
            effects,
            order,
            groups={group: (vertices, signatures(vertices)) for group, vertices in ordered.items()},
            orders=orders,
            kept=arrays | {v: each.array for v, each in orders.items()},
            constants=constants_of(graph, program, order),
            inputs=stream_variables(program, StreamIn),
            outputs=stream_variables(program, StreamOut),
            has_failed=Variable((), jnp.dtype(bool), "host has failed"),
            called_around=called_around(program),
            compared=compared_variables(graph, program) | observed_variables(program, observed),
        )

    def in_order(self, variables: Collection[Variable]) -> list[Variable]:
        """Return variables in the order of the graph."""
        return sorted(variables, key=self.order.__getitem__)

    def array_of(self, variable: Variable) -> Variable:
        """Return the variable whose array is kept for a variable."""
        return self.kept.get(variable, variable)

    def live_after(self, steps: list[Program], live: Live) -> list[Live]:
        """Return the variables that may be read after each step of control flow; empty for other steps."""
        first = next((n for n, step in enumerate(steps) if isinstance(step, CONTROL)), len(steps))
        result = [Live()] * len(steps)
        # Backwards from the end: one set, copied for the few steps that need it.
        live_now = set(live)
        for number in range(len(steps) - 1, first - 1, -1):
            if isinstance(steps[number], CONTROL):
                result[number] = frozenset(live_now)
            effects = self.effects(steps[number])
            live_now -= effects.kills
            live_now |= effects.reads
        return result


def constants_of(graph: Graph, program: Program, order: Mapping[Variable, int]) -> tuple[Variable, ...]:
    """Return the constants that a program reads, in an order."""
    tensors = [tensor for node in distinct(program) for tensor in direct_tensors(node)]
    tensors += [access.tensor for group in executed_groups(graph, program) for access in group.accesses]
    used = {variable for tensor in tensors for variable in tensor.variables() if variable.is_constant}
    return tuple(sorted(used, key=order.__getitem__))


def steps_of(program: Program, is_whole: Callable[[Program], bool]) -> Iterator[Program]:
    """Yield the steps of a program in order, out of all sequences and calls for which `is_whole` is false."""
    for _, equal_steps in groupby(_flatten(program, is_whole), lambda step: getattr(step, "compute_set", step)):
        steps = list(equal_steps)
        # A compute set executed many times in a row becomes a loop, so that it is traced once.
        if isinstance(steps[0], Execute) and len(steps) >= _MIN_LOOP:
            yield Repeat(len(steps), steps[0])
        else:
            yield from steps


def _flatten(program: Program, is_whole: Callable[[Program], bool]) -> Iterator[Program]:
    if isinstance(program, Block) and not is_whole(program):
        for child in program.children():
            yield from _flatten(child, is_whole)
    else:
        yield program


def called_around(program: Program) -> set[Function]:
    """Return the functions that are called in several bodies, say in a loop and outside of it."""
    bodies: dict[Function, set[object]] = {}
    stack: list[tuple[Program, object]] = [(program, None)]
    visited = set(stack)
    while stack:
        node, body = stack.pop()
        if isinstance(node, Call):
            bodies.setdefault(node.function, set()).add(body)
            body = node.function
        elif isinstance(node, CONTROL):
            body = node
        # A node counts once in each body, so functions that share bodies do not multiply the walk.
        new = [(child, body) for child in node.children() if (child, body) not in visited]
        visited.update(new)
        stack += new
    return {function for function, callers in bodies.items() if len(callers) > 1}
