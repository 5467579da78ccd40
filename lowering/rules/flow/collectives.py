"""Rules for collectives over replicas: each by its form, see `gcl.collective_params`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
from jax import lax

from ipujax.lowering.gcl import COLLECTIVES, Form, collectives, stacked
from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.popops import Op, neutral
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.reductions.reduce import reduce
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.runtime.graph import Builder, Graph
from ipujax.runtime.tensor import COLLECTIVES as COLLECTIVES_PART, Tensor


def collective_rule(ctx: Context, *operands: Tensor, **params: Any) -> Sequence[Tensor]:
    """Lowers any collective of JAX, such as `psum` or `all_gather`, over the axis of replicas; returns its results."""
    graph = ctx.graph
    replicas = graph.replication_factor
    # What any of JAX's collectives is by its parameters: a kind, groups of replicas, and views before and after it.
    form = COLLECTIVES[ctx.primitive.name](ctx.equation, replicas)
    if form.kind == "index":  # the number of the replica
        return [graph.add_replica_constant(np.array(form.ranks, np.int32), "replica index")]
    with _as_part(graph):
        if form.kind == "all_reduce":
            return _all_reduce(ctx, form, *operands)
        (x,) = operands
        result = _ADD_COLLECTIVE[form.kind](ctx.builder, form.before.of(x) if form.before else x, form)
        return [form.after.of(result) if form.after else result]


def _as_part(graph: Graph) -> AbstractContextManager[None]:
    """Gives what is added inside the context the part of collectives, whatever computes or reads their operands."""
    return graph.debug_origin(replace(graph.origin, part=COLLECTIVES_PART))


def _all_reduce(ctx: Context, form: Form, *operands: Tensor) -> Sequence[Tensor]:
    """Reduces the operands over replicas, and before over dimensions of each replica if the form has some."""
    if form.dims:
        operands = tuple(reduce(ctx.builder, x, form.dims, form.monoid) for x in operands)
    return _all_reduce_by_dtype(ctx.builder, form, operands, [ctx.graph] * len(operands))


def reduce_across_ipus(
    builder: Builder, eqn: JaxprEqn, operands: Sequence[Tensor], homes: Sequence[Graph]
) -> Sequence[Tensor]:
    """Reduces tensors over replicas of several IPUs; `homes` are the graph views of the operands' IPUs."""
    form = COLLECTIVES[eqn.primitive.name](eqn, builder.graph.replication_factor)
    with _as_part(builder.graph):
        return _all_reduce_by_dtype(builder, form, operands, homes)


def _all_reduce_by_dtype(
    builder: Builder, form: Form, operands: Sequence[Tensor], homes: Sequence[Graph]
) -> Sequence[Tensor]:
    """Reduces tensors over replicas: one collective for all of a dtype, which costs less than one each.

    Args:
        builder: where to add it.
        form: the reduction: its monoid and groups of replicas; groups of different sizes need a collective each.
        operands: the tensors.
        homes: for each of them the graph, or the view of its IPU.

    Returns:
        The reduced tensor for each operand.
    """
    if form.is_uneven:
        return [
            _all_reduce_uneven_groups(Builder(home, builder.prog, builder.name), form, x)
            for x, home in zip(operands, homes, strict=True)
        ]
    results: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in operands):
        numbers = [n for n, x in enumerate(operands) if x.dtype == dtype]
        tensors = [operands[n] for n in numbers]
        views = [homes[n] for n in numbers]
        reduced = collectives.all_reduce(builder, tensors, form.monoid, form.groups, views)
        results.update(zip(numbers, reduced, strict=True))
    return [results[n] for n in range(len(operands))]


def _all_reduce_uneven_groups(builder: Builder, form: Form, x: Tensor) -> Tensor:
    """Reduces a tensor over groups of replicas of different sizes; returns the result.

    Every replica gathers the values of all, and combines those of its group, with neutral elements for others. The
    rounds of `all_reduce` need groups of one size; a gather over all replicas has a single group.
    """
    graph = builder.graph
    all_replicas = stacked.whole(None, graph.replication_factor)
    gathered = collectives.all_gather(builder.named("gather"), x, all_replicas)
    in_own_group = graph.add_replica_constant(stacked.is_in_group(form.groups), "own group")
    neutral_value = graph.add_constant(neutral(form.monoid, x.dtype), "other groups")
    choice = Op("select_n", lax.select_n, x.dtype)
    mask = in_own_group.broadcast_in_dim(gathered.shape, (0,))
    operands = [mask, neutral_value.broadcast_in_dim(gathered.shape, ()), gathered]
    chosen = elementwise(builder.named("own group"), choice, operands)
    return reduce(builder, chosen, (0,), form.monoid)


_ADD_COLLECTIVE: dict[str, Callable[[Builder, Tensor, Form], Tensor]] = {
    "all_gather": lambda builder, x, form: collectives.all_gather(builder, x, form.groups),
    "reduce_scatter": lambda builder, x, form: collectives.reduce_scatter(builder, x, form.monoid, form.groups),
    "all_to_all": lambda builder, x, form: collectives.all_to_all(builder, x, form.groups),
    "permute": lambda builder, x, form: collectives.permute(builder, x, form.pairs),
}


RULES: dict[str, Rule] = dict.fromkeys(COLLECTIVES, collective_rule)
