"""Pipelines with stages as the pass `partition` reads them: the jaxpr of one micro-batch, and how results are reduced.

Each stage is on as many IPUs as the mesh has devices. A micro-batch whose rows are split has some rows of each device,
so that the batch is cut into micro-batches first. Sums and means over micro-batches stay unreduced: devices add up
their partial sums once, after the last micro-batch.
"""

from __future__ import annotations

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, closed
from ipujax.lowering.jaxpr import PIPELINE


def with_inlined_micro_batches(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr whose pipelines have no calls in their micro-batches, so that partitioning meets no calls there."""
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
