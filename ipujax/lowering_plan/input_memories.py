"""Memories of the inputs of a program, as its arguments, its function and its options say.

Input: a lowering plan. Output: `ProgramInputs`, with the results that take the places of donated inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

from ipujax.calls import may_be_offloaded
from ipujax.lowering.jax_compat import is_on_host
from ipujax.lowering.offload import batch_arguments, is_streamed, memory_spaces
from ipujax.lowering.partition import partition
from ipujax.lowering.passes.count_loops import count_loops
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.passes.shard_map import shard_map
from ipujax.lowering.program_inputs import ProgramInputs, donated_aliases
from ipujax.lowering.replicas import unwrapped
from ipujax.lowering_plan.traced_plan import LoweringPlan
from ipujax.runtime.tensor import element_bytes


def program_inputs(plan: LoweringPlan, stream_loops: bool) -> ProgramInputs:
    """Return name and memories of each input of the jaxpr; the last ones are constants on the host.

    Args:
        plan: the traced function.
        stream_loops: whether rows of loops stay in the host's memory.
    """
    signature = plan.program_signature
    batches = _batches(plan, stream_loops)
    num_constants = len(plan.constants)
    of_constants = [False] * num_constants
    names = [signature.leaf_names[n] for n in plan.positions]
    names += [f"closed over: array {n}" for n in range(num_constants)]
    # A donated batch leaves its place in the host's memory to no result: rows of both are in use at once.
    by_user = [*(signature.donated[n] for n in plan.positions), *of_constants]
    donated = tuple(flag and count is None for flag, count in zip(by_user, batches, strict=True))
    offloaded_by_user = [*(signature.offloaded[n] for n in plan.positions), *of_constants]
    offloaded = tuple(map(operator.or_, offloaded_by_user, map(is_streamed, plan.jaxpr.in_avals)))
    aliases = _aliases(plan, donated, any(offloaded))
    return ProgramInputs(names, donated, aliases, offloaded, _streamed(plan, offloaded, aliases, batches), batches)


def argument_bytes_per_tile(plan: LoweringPlan) -> float:
    """Return the mean bytes on a tile of the arguments that are on the chip during the whole call."""
    offloaded = plan.program_signature.offloaded
    batches = _batches(plan, plan.settings.options.stream_loops is True)
    on_chip = (
        aval
        for aval, number, count in zip(plan.jaxpr.in_avals, plan.positions, batches, strict=True)
        if count is None and not offloaded[number] and not is_on_host(aval)
    )
    return sum(aval.size * element_bytes(aval.dtype) for aval in on_chip) / plan.settings.target.num_tiles


def whole_on_host(plan: LoweringPlan, batches: Sequence[int | None]) -> tuple[bool, ...]:
    """Return for each input whether its type has the host's memory, and it stays whole."""
    return tuple(is_streamed(aval) and count is None for aval, count in zip(plan.jaxpr.in_avals, batches, strict=True))


def _aliases(plan: LoweringPlan, donated: Sequence[bool], streams: bool) -> tuple[int | None, ...]:
    """Return for each result the donated argument whose place it takes; if one streams, both are split alike."""
    replicated = unwrapped(plan.jaxpr)
    if streams:
        # A shard_map decides the split of arguments and results that each replica loads by itself.
        partitioned = partition(memory_spaces(inline(plan.jaxpr)), plan.shardings.of_values)
        sharded = unwrapped(shard_map(partitioned))
        replicated = replace(replicated, in_dims=sharded.in_dims, out_dims=sharded.out_dims)
    return donated_aliases(replicated, donated)


def _batches(plan: LoweringPlan, stream_loops: bool) -> tuple[int | None, ...]:
    """Return for each argument the number of rows in which it is loaded, None for one that stays whole."""
    # Loops read rows by functions of JAX too, as `dynamic_index_in_dim`; some are found only once they are counted.
    jaxpr = count_loops(inline(plan.jaxpr)) if stream_loops else plan.jaxpr
    counts = batch_arguments(jaxpr, stream_loops)
    return tuple(
        counts.get(number) if may_be_offloaded(aval) else None for number, aval in enumerate(plan.jaxpr.in_avals)
    )


def _streamed(
    plan: LoweringPlan,
    offloaded: Sequence[bool],
    aliases: Sequence[int | None],
    batches: Sequence[int | None],
) -> tuple[bool, ...]:
    """Return for each argument whether it is loaded from the host's memory: not one that is donated or offloaded.

    These are batches of pipelines, rows of loops that stream, and all others if I/O tiles load them.
    """
    has_io_tiles = plan.settings.options.io_tiles > 0
    return tuple(
        not is_offloaded and (count is not None or (has_io_tiles and number not in aliases and may_be_offloaded(aval)))
        for number, (is_offloaded, count, aval) in enumerate(zip(offloaded, batches, plan.jaxpr.in_avals, strict=True))
    )
