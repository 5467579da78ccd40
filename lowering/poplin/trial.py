"""Chooses among plans by what they are charged, on a graph of their own.

A plan's estimate leaves out what depends on where operands lie: fragments, and copies on the tile that make a scattered
operand contiguous. A trial adds the operation to a graph that holds nothing else and asks the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ipujax.lowering.poplin.plan import Plan
from ipujax.lowering.poputil.mapping import map_linearly
from ipujax.runtime.clock_steps import clock_steps
from ipujax.runtime.compile import leaf_costs
from ipujax.runtime.effects import EffectsOf
from ipujax.runtime.graph import Graph
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.timeline import timeline

Operand = tuple[tuple[int, ...], Any, bool]  # shape, dtype, whether the plan places it
Add = Callable[[Graph, Sequence[Tensor], Plan, ProgramSequence], object]


def cheapest(plans: Sequence[Plan], operands: Sequence[Operand], add: Add, target: Target) -> Plan:
    """The plan that is charged least cycles, the first of equals.

    Args:
        plans: what to choose from; one is taken without a trial.
        operands: shape, dtype and freedom of each operand; one that is not free lies linearly in the trial.
        add: adds the operation by a plan to a graph and a program.
        target: the machine.
    """
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: _charged_cycles(plan, operands, add, target))


def _charged_cycles(plan: Plan, operands: Sequence[Operand], add: Add, target: Target) -> int:
    graph, prog = Graph(target), ProgramSequence()
    tensors = [graph.add_variable(shape, dtype, "operand") for shape, dtype, _ in operands]
    for tensor, (_, _, is_free) in zip(tensors, operands, strict=True):
        if not is_free:
            map_linearly(graph, tensor)
    add(graph, tensors, plan, prog)
    steps, slots = clock_steps(prog, leaf_costs(graph, prog), EffectsOf(graph), target)
    return timeline(prog, steps, target.num_ipus, slots).cycles
