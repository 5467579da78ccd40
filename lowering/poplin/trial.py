"""Chooses among plans by what they are charged, on a graph of their own.

A plan's estimate leaves out what depends on where operands lie: fragments, and copies on the tile that make a scattered
operand contiguous. A trial adds the operation to a graph that holds nothing else and asks the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ipujax.lowering.layout import charged_price, least_charged, map_linearly
from ipujax.lowering.poplin.product_plan import Plan
from ipujax.runtime.graph import Graph, Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Affine, Group, Tensor, TileMapping

Add = Callable[[Graph, Sequence[Tensor], Plan, ProgramSequence], Tensor]


@dataclass(frozen=True, slots=True)
class Operand:
    """What an operand's part in a cost depends on.

    Args:
        shape: of the operand.
        dtype: of the operand.
        view: shape of the variable it is a view of, offset and dimensions of the view; None if not of one variable.
        mapping: where that variable lies; None while that is open.
    """

    shape: tuple[int, ...]
    dtype: Any
    view: tuple[tuple[int, ...], int, tuple[Group, ...]] | None
    mapping: TileMapping | None

    @staticmethod
    def of(graph: Graph, tensor: Tensor) -> Operand:
        """Describes an operand of a graph."""
        affine = tensor.affine
        if affine is None:
            return Operand(tensor.shape, tensor.dtype, None, None)
        view = affine.variable.shape, affine.offset, affine.dims
        return Operand(tensor.shape, tensor.dtype, view, graph.mappings.get(affine.variable))

    def add_to(self, graph: Graph) -> Tensor:
        """Adds such an operand; one of several variables lies linearly."""
        if self.view is None:
            tensor = graph.add_variable(self.shape, self.dtype, "operand")
            map_linearly(graph, tensor)
            return tensor
        shape, offset, dims = self.view
        (variable,) = graph.add_variable(shape, self.dtype, "operand", self.mapping).variables()
        return Tensor(Affine(variable, offset, dims), self.shape, self.dtype)


def cheapest(plans: Sequence[Plan], operands: Sequence[Operand], add: Add, target: Target, byte_price: float) -> Plan:
    """The plan that is charged least cycles, the first of equals.

    Args:
        plans: what to choose from.
        operands: the operands.
        add: adds the operation by a plan to a graph and a program.
        target: the machine.
        byte_price: cycles that a byte of exchange code on the fullest tile is worth.
    """

    def charge(plan: Plan) -> int:
        graph = Graph(target, byte_price_cycles=byte_price)
        tensors = [operand.add_to(graph) for operand in operands]
        return charged_price(graph, lambda scratch, prog: add(scratch, tensors, plan, prog))

    return least_charged(plans, [plan.likely_least_cycles for plan in plans], charge)
