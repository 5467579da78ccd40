"""Micro-batches of a batch or a step: one after another in a loop, or in a pipeline.

Input: a function of one micro-batch with results `{"anchors", "buffers", …}`. Output: a function of rows of
micro-batches, whose results are summed, stacked or the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import ipujax as ipu
from ipujax.popart.flow import AnchorReturnTypeId
from ipujax.popart.model_graph.stage_placement import Placement, pipeline_settings
from ipujax.popart.reserved_names import ACCUMULATOR
from ipujax.popart.steps.step_plan import Anchors

Results = dict[str, Any]
# `micro_batch(weights, buffers, frozen, scale, rows)`, rows with a first axis of one micro-batch.
MicroBatch = Callable[[Any, Any, Any, Any, Any], Results]
_BUFFERS = 1  # position of the argument that goes from one micro-batch to the next
_REDUCTIONS = {AnchorReturnTypeId.Final: "last", AnchorReturnTypeId.Sum: "sum"}  # all others are stacked


def reductions(anchors: Anchors, gradients: str = "sum") -> dict[str, Any]:
    """Return how the results of micro-batches are reduced, as `ipu.pipeline` names it.

    Args:
        anchors: of the session.
        gradients: of the gradients.
    """
    by_name = {name: _REDUCTIONS.get(anchors.kinds[name].id(), "stack") for name in anchors.of_micro_batches}
    # An accumulator is a sum over the micro-batches before: all of their gradients are needed, whatever is returned.
    by_name |= dict.fromkeys((ACCUMULATOR + name for name in anchors.accumulators), "stack")
    return {"anchors": by_name, "buffers": "last", "gradients": gradients, "loss": "last"}


def in_pipeline(micro_batch: MicroBatch, count: int, reduce: Mapping[str, Any], placement: Placement) -> MicroBatch:
    """Return a function of several micro-batches that stages work on at once.

    Args:
        micro_batch: function of one.
        count: number of micro-batches.
        reduce: see `reductions`.
        placement: stages, and where they are.
    """

    def run(weights: Any, buffers: Any, frozen: Any, scale: Any, rows: Any) -> Results:
        sample = jax.eval_shape(micro_batch, weights, buffers, frozen, scale, _first(rows))
        tree = {name: reduce[name] for name in sample}
        # Running statistics of a micro-batch are operands of the next, also between stages of a pipeline.
        carry = {_BUFFERS: ("buffers",)} if jax.tree.leaves(buffers) else None
        pipelined = ipu.pipeline(
            micro_batch, micro_batches=count, reduce=tree, carry=carry, **pipeline_settings(placement)
        )
        return dict(pipelined(weights, buffers, frozen, scale, rows))

    return run


def in_loop(micro_batch: MicroBatch, count: int, reduce: Mapping[str, Any]) -> MicroBatch:
    """Return a function of several micro-batches, one after another.

    Args:
        micro_batch: function of one.
        count: number of micro-batches.
        reduce: see `reductions`.
    """

    def run(weights: Any, buffers: Any, frozen: Any, scale: Any, rows: Any) -> Results:
        """Scan over micro-batches: reduced results and buffers are carried, others come out as rows."""
        if count == 1:
            return _reduced_one(micro_batch(weights, buffers, frozen, scale, rows), reduce)
        sample = jax.eval_shape(micro_batch, weights, buffers, frozen, scale, _first(rows))
        kinds = _spread({name: reduce[name] for name in sample}, sample)
        start = jax.tree.map(lambda x, kind: None if kind == "stack" else jnp.zeros(x.shape, x.dtype), sample, kinds)
        start["buffers"] = buffers

        def body(carry: Any, row: tuple[Any, Any]) -> tuple[Any, Any]:
            number, micro = row
            results = micro_batch(weights, carry["buffers"], frozen, scale, jax.tree.map(lambda x: x[None], micro))
            step = jnp.asarray(number, jnp.float32)
            reduced = jax.tree.map(
                lambda x, kind, before: None if kind == "stack" else _COMBINE[kind](before, x, step),
                results,
                kinds,
                carry,
                is_leaf=lambda x: x is None,
            )
            return reduced, jax.tree.map(lambda x, kind: x if kind == "stack" else None, results, kinds)

        last, stacked = jax.lax.scan(body, start, (jnp.arange(count), rows))
        return dict(jax.tree.map(lambda a, b: b if a is None else a, last, stacked, is_leaf=lambda x: x is None))

    return run


def in_phases(micro_batch: MicroBatch, count: int, reduce: Mapping[str, Any]) -> MicroBatch:
    """Return a function of several micro-batches, all of which go through a phase before the next phase begins."""
    # Phases may not be in a loop, so micro-batches are written out one by one; each phase loads its weights once.

    def run(weights: Any, buffers: Any, frozen: Any, scale: Any, rows: Any) -> Results:
        reduced: Results = {}
        for number in range(count):
            row = jax.tree.map(lambda x, i=number: x[i : i + 1], rows)
            results = micro_batch(weights, buffers, frozen, scale, row)
            buffers = results["buffers"]
            kinds = _spread({name: reduce[name] for name in results}, results)
            step = jnp.asarray(number, jnp.float32)
            rows_of_one = jax.tree.map(lambda x, kind: x[None] if kind == "stack" else x, results, kinds)
            join = partial(_with_step, step)
            reduced = jax.tree.map(join, rows_of_one, kinds, reduced) if number else rows_of_one
        return reduced

    return run


# How a result joins those of the micro-batches before it; `step` counts them.
_COMBINE: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    "sum": lambda before, x, step: before + x,
    "last": lambda before, x, step: x,
    "running_mean": lambda before, x, step: (before * (step / (step + 1)) + x / (step + 1)).astype(x.dtype),
}

_JOIN: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    **_COMBINE,
    "stack": lambda before, x, step: jnp.concatenate([before, x]),
}


def _with_step(step: jax.Array, x: Any, kind: str, before: Any) -> Any:
    return _JOIN[kind](before, x, step)


def _first(rows: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), rows)


def _spread(prefix: Mapping[str, Any], results: Results) -> Results:
    """Return the reductions of all leaves of the results."""
    return {
        name: kind if isinstance(kind, dict) else jax.tree.map(lambda _, k=kind: k, results[name])
        for name, kind in prefix.items()
    }


def _reduced_one(results: Results, reduce: Mapping[str, Any]) -> Results:
    kinds = _spread({name: reduce[name] for name in results}, results)
    return dict(jax.tree.map(lambda x, kind: x[None] if kind == "stack" else x, results, kinds))
