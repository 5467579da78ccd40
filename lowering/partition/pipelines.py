"""Partition of pipelines with stages: the jaxpr of one micro-batch becomes that of one device of the mesh.

Each stage is on as many IPUs as the mesh has devices. A micro-batch whose rows are split has some rows of each device,
so that the batch is cut into micro-batches first. Sums and means over micro-batches keep the devices' terms: their
sum is taken once, after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Var, closed
from ipujax.lowering.jaxpr import PIPELINE
from ipujax.lowering.partition.resharding import reshard, values_that_stay_terms
from ipujax.lowering.partition.specs import Axes, MeshAxes, Spec

_SUMMED = frozenset({"sum", "mean"})


def with_inlined_micro_batches(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr whose pipelines have no calls in their micro-batches."""
    eqns = [
        eqn.replace(params={**eqn.params, "micro_batch": eqn.params["micro_batch"].inlined()})
        if eqn.primitive.name == PIPELINE
        else eqn
        for eqn in jaxpr.jaxpr.eqns
    ]
    return ClosedJaxpr(jaxpr.jaxpr.replace(eqns=eqns), jaxpr.consts)


def micro_batch_jaxpr(eqn: JaxprEqn) -> ClosedJaxpr:
    """Jaxpr of one micro-batch of a pipeline."""
    return closed(eqn.params["micro_batch"].jaxpr)


def kinds_of_results(eqn: JaxprEqn) -> list[str]:
    """Reduction of each result over micro-batches, "carry" for a state."""
    spec = eqn.params["spec"]
    return [spec.kind_of(number) for number in range(len(eqn.outvars))]


def pipeline_results(run: Any, eqn: JaxprEqn, operands: Sequence[Any]) -> tuple[list[jax.Array], list[Spec]]:
    """Blocks of the results of a pipeline, and their specs; `run` is the evaluation of its equations."""
    spec = eqn.params["spec"]
    jaxpr = micro_batch_jaxpr(eqn)
    in_specs = [run.spec_or_whole(var) for var in jaxpr.jaxpr.invars]
    arrays = [
        _rows(run.to_spec(block, _with_rows(inner, ()), eqn).array, spec.micro_batches, inner, run.mesh)
        if role == "batch" and inner.dims[0] and not spec.rows_in_any_order
        # A device's rows of the batch are its rows of the micro-batches, if those may be any.
        else run.to_spec(block, inner, eqn).array
        for block, role, inner in zip(operands, spec.roles, in_specs, strict=True)
    ]
    kinds = kinds_of_results(eqn)
    states = {result: in_specs[operand] for operand, result in spec.carries}
    summed = [v for v, kind in zip(jaxpr.jaxpr.outvars, kinds, strict=True) if kind in _SUMMED]
    sums = values_that_stay_terms(jaxpr.jaxpr, [v for v in summed if isinstance(v, Var)])
    inner = replace(run, resharded={}, sums=sums)
    out_specs: list[Spec] = []

    def fun(*blocks: Any) -> list[Any]:
        results = inner.run(jaxpr, run.blocks_of(blocks, in_specs, jaxpr.in_avals))
        for number, (block, var) in enumerate(zip(results, jaxpr.jaxpr.outvars, strict=True)):
            wanted = states.get(number, run.spec_or_whole(var))
            terms = block.spec.unreduced - set(wanted.axes) if kinds[number] in _SUMMED else frozenset()
            out_specs.append(replace(wanted, unreduced=wanted.unreduced | terms))
        return [inner.to_spec(b, s, eqn).array for b, s in zip(results, out_specs, strict=True)]

    avals = [run.block_aval(aval, s) for aval, s in zip(jaxpr.in_avals, in_specs, strict=True)]
    local = run.traced(fun, avals, jaxpr.jaxpr.outvars)
    results = eqn.params["micro_batch"].bind(local, spec, arrays)
    is_stack = [kind == "stack" for kind in kinds]
    return results, [replace(s, dims=((), *s.dims)) if flag else s for s, flag in zip(out_specs, is_stack, strict=True)]


def _with_rows(spec: Spec, axes: Axes) -> Spec:
    return replace(spec, dims=(axes, *spec.dims[1:]))


def _rows(x: jax.Array, micro_batches: int, spec: Spec, mesh: MeshAxes) -> jax.Array:
    """A device's rows of each micro-batch, of a batch whose rows it has all."""
    shape = x.shape
    stacks = x.reshape(micro_batches, shape[0] // micro_batches, *shape[1:])
    before = Spec(((), (), *spec.dims[1:]))
    part = reshard(stacks, before, replace(before, dims=((), *spec.dims)), mesh)
    return part.reshape(-1, *shape[1:])
