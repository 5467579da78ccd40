"""Stored rows: what a loop stores for another, as layers do for their gradients, split over the devices that have it.

    for each layer: stack x     →   each device stacks its part of x
    for each layer: read x      →   gathers the parts of one layer's x

Input: a jaxpr, and the spec of each of its values. Output: the spec of the rows of each stack that is stored in parts,
in the micro-batches of pipelines that ask for it. A device stores less, and each iteration that reads has a collective.
Idea: `--distribute-saved-activations` of Megatron-LM (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022).

Limit: stacks of loops that loops alone read, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ipujax.lowering.jax_compat import Jaxpr, Var, shape_of
from ipujax.lowering.jaxpr import PIPELINE, scan_body, variables
from ipujax.lowering.partition.pipelines import micro_batch_jaxpr
from ipujax.lowering.partition.specs import MeshAxes, Spec, whole


def split_stored_rows(jaxpr: Jaxpr, specs: Mapping[Var, Spec], mesh: MeshAxes) -> dict[Var, Spec]:
    """Return the specs of the rows of stacks that are stored in parts, by stack.

    Args:
        jaxpr: the program, whose pipelines say whether rows are.
        specs: spec of each value that is split.
        mesh: the mesh.
    """
    rows: dict[Var, Spec] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == PIPELINE and eqn.params["spec"].shards_stored_rows:
            for stack in stored_stacks(micro_batch_jaxpr(eqn).jaxpr):
                shape = shape_of(stack)
                if (row := _row_in_parts(shape[1:], specs.get(stack, whole(len(shape))), mesh)) is not None:
                    rows[stack] = row
    return rows


def _row_in_parts(shape: tuple[int, ...], stack: Spec, mesh: MeshAxes) -> Spec | None:
    """Spec of a row that is split over all axes which do not split it yet; None if no dimension has so many parts."""
    row = Spec(stack.dims[1:], stack.unreduced)
    axes = tuple(axis for axis in mesh.names if axis not in (*stack.axes, *stack.unreduced))
    if not axes:
        return None
    for dim, (size, used) in enumerate(zip(shape, row.dims, strict=True)):
        if size % mesh.size((*used, *axes)) == 0:
            return replace(row, dims=(*row.dims[:dim], (*used, *axes), *row.dims[dim + 1 :]))
    return None


def stored_stacks(jaxpr: Jaxpr) -> Iterator[Var]:
    """Yield the stacks of the loops of a jaxpr that its loops alone read, row by row."""
    rows_read = set[Var]()
    others_read = set(variables(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        places = scan_body(eqn.params).operands if eqn.primitive.name == "scan" else None
        rows_read.update(variables(eqn.invars[places.stacks] if places else ()))
        others_read.update(
            variables([*eqn.invars[places.constants], *eqn.invars[places.carries]] if places else eqn.invars)
        )
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            stacks = variables(eqn.outvars[scan_body(eqn.params).results.stacks])
            yield from (stack for stack in stacks if stack in rows_read - others_read)
