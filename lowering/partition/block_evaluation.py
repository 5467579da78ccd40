"""Evaluates a jaxpr of whole values on the blocks of one device of a mesh, under `jax.shard_map`.

Each equation is computed on blocks of its operands, see `block_equations`. Control flow and pipelines keep their
equation: their bodies are traced again on blocks, with the specs of their inputs and results. Functions of blocks that
a user writes, and calls of the host, are called on the blocks that they ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    JaxprEqn,
    Var,
    closed,
    eval_equation,
    eval_jaxpr,
    shape_of,
    source_of,
    with_weak_type,
)
from ipujax.lowering.jaxpr import PIPELINE, scan_body, while_body, while_condition
from ipujax.lowering.partition.block_equations import equation_on_blocks
from ipujax.lowering.partition.block_values import Block, Notes, Scope, zeros
from ipujax.lowering.partition.pipelines import kinds_of_results, micro_batch_jaxpr
from ipujax.lowering.partition.resharding import holds_partial_sums, reshard, values_that_may_stay_unreduced
from ipujax.lowering.partition.specs import MeshAxes, Spec, local_shape, whole
from ipujax.lowering.partition.users_blocks import CUSTOM_PARTITIONING, check_mesh, custom_function, shard_map_specs
from ipujax.lowering.primitives import record_of
from ipujax.lowering.replicas import HOST_CALLS, call_once

_SUMMED = frozenset({"sum", "mean"})  # reductions over micro-batches that may add up partial sums


def evaluate_on_blocks(scope: Scope, jaxpr: ClosedJaxpr, operands: Sequence[Block]) -> list[Block]:
    """Blocks of the results of a jaxpr, whose values have their specs in `scope`."""

    def equation(eqn: JaxprEqn, blocks: list[Block]) -> list[Block]:
        # With the user's setting where it was traced, which decides on random numbers; the mesh is that of the blocks.
        with source_of(eqn), jax.threefry_partitionable(eqn.ctx.threefry_partitionable):
            if record_of(eqn).cost == "view" and blocks and all(block.is_zero for block in blocks):
                return [zeros(var.aval, scope.spec_or_whole(var), scope.mesh) for var in eqn.outvars]
            return _EVALUATIONS.get(eqn.primitive.name, equation_on_blocks)(scope, eqn, blocks)

    return eval_jaxpr(jaxpr, operands, equation, _constant_block)


def _constant_block(value: Any) -> Block:
    aval = jax.typeof(value)
    is_zero = isinstance(value, np.ndarray) and not value.ndim and not any(value.tobytes())  # −0.0 has other bytes
    return Block(value, whole(len(aval.shape)), aval, is_zero)


@dataclass(frozen=True, slots=True)
class _BlockBody:
    """A body on blocks, and the specs of its results."""

    jaxpr: ClosedJaxpr
    result_specs: Sequence[Spec]


def _body_on_blocks(
    scope: Scope,
    jaxpr: ClosedJaxpr,
    in_specs: Sequence[Spec],
    out_specs: Sequence[Spec],
    eqn: JaxprEqn,
    sums_of: Sequence[int] = (),
    stored_specs: Mapping[int, Spec] = MappingProxyType({}),
) -> _BlockBody:
    """Traces the jaxpr of a loop, a branch or a pipeline on blocks.

    Args:
        scope: specs of the values of all bodies.
        jaxpr: the body, on whole values.
        in_specs: spec of each input.
        out_specs: spec of each result.
        eqn: equation of the body.
        sums_of: for each result the number of executions of the body after which one sum of partial sums is taken; 0
            for all when empty: devices return no partial sums but those of its spec.
        stored_specs: specs with which inputs enter that are stored in parts, by number; the body begins with bringing
            them to `in_specs`.
    """
    counts = sums_of or (0,) * len(out_specs)
    unreduced = {v: count for v, count in zip(jaxpr.jaxpr.outvars, counts, strict=True) if count and isinstance(v, Var)}
    inner = replace(scope, resharded={}, may_stay_unreduced=values_that_may_stay_unreduced(jaxpr.jaxpr, unreduced))
    entry_specs = [stored_specs.get(n, spec) for n, spec in enumerate(in_specs)]
    result_specs: list[Spec] = []  # filled while `body` is traced, once

    def body(*arrays: Any) -> list[Any]:
        entered = [Block(x, spec, aval) for x, spec, aval in zip(arrays, entry_specs, jaxpr.in_avals, strict=True)]
        blocks = [inner.to_spec(block, spec, eqn) for block, spec in zip(entered, in_specs, strict=True)]
        results = evaluate_on_blocks(inner, jaxpr, blocks)
        for block, spec, count in zip(results, out_specs, counts, strict=True):
            # An axis that the result's spec splits a dimension over cannot be unreduced too: its sum is scattered.
            unreduced = block.spec.unreduced - set(spec.axes) if count else frozenset()
            result_specs.append(replace(spec, unreduced=spec.unreduced | unreduced))
        returned = inner.arrays_under(result_specs, results, eqn)
        # Weak types are a part of the types that inputs and results of an iteration share.
        return [with_weak_type(x, v.aval.weak_type) for x, v in zip(returned, jaxpr.jaxpr.outvars, strict=True)]

    avals = [_block_type(aval, spec, scope.mesh) for aval, spec in zip(jaxpr.in_avals, entry_specs, strict=True)]
    return _BlockBody(jax.make_jaxpr(body)(*avals), result_specs)


def _block_type(aval: Any, spec: Spec, mesh: MeshAxes) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(local_shape(aval.shape, spec, mesh), aval.dtype, weak_type=aval.weak_type)


def _to_required_specs(scope: Scope, eqn: JaxprEqn, results: Sequence[Any], specs: Sequence[Spec]) -> list[Block]:
    """Blocks of results, moved from `specs` to the specs that they must have; partial sums that may stay do."""
    blocks: list[Block] = []
    for x, spec, var in zip(results, specs, eqn.outvars, strict=True):
        block = Block(x, spec, var.aval)
        required = scope.required_spec(var)
        if required is not None and not (var in scope.may_stay_unreduced and spec.dims == required.dims):
            block = scope.to_spec(block, required, eqn)
        blocks.append(block)
    return blocks


def _spec_of_stack(spec: Spec) -> Spec:
    """Spec of a stack, whose first dimension is whole, of values with a spec."""
    return replace(spec, dims=((), *spec.dims))


def _scan_on_blocks(scope: Scope, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """A loop on blocks: its body is partitioned with the specs of its carries and rows.

    Accumulators stay partial sums in all iterations: devices add theirs up once, after the last one.
    Idea: XLA's pass WhileLoopAllReduceCodeMotion.
    """
    scan = scan_body(eqn.params)
    body = scan.jaxpr.jaxpr
    in_specs = list(map(scope.spec_or_whole, body.invars))
    outer_stacks = eqn.outvars[scan.results.stacks]
    row_result_specs = [
        scope.stored_rows.get(stack, scope.spec_or_whole(row))
        for stack, row in zip(outer_stacks, body.outvars[scan.results.stacks], strict=True)
    ]
    # A row that is stored in parts is gathered where the body begins.
    stored_specs = {
        n: scope.stored_rows[atom]
        for n, atom in enumerate(eqn.invars)
        if isinstance(atom, Var) and atom in scope.stored_rows
    }
    # The sum of a stack is taken after the loop where its reader takes it.
    stacks = [scope.may_stay_unreduced.get(var, 0) for var in outer_stacks]
    sums_of = [*_sums_of_accumulators(scope, eqn), *stacks]
    out_specs = [*in_specs[scan.inputs.carries], *row_result_specs]
    if any(sums_of[scan.results.carries]):
        # A trial tells over which axes the terms are partial sums: a carry has one spec in all iterations.
        trial_scope = replace(scope, notes=Notes(), is_trial=True)
        trial = _body_on_blocks(trial_scope, scan.jaxpr, in_specs, out_specs, eqn, sums_of, stored_specs)
        in_specs[scan.inputs.carries] = trial.result_specs[scan.results.carries]
        out_specs = [*in_specs[scan.inputs.carries], *row_result_specs]
    block_body = _body_on_blocks(scope, scan.jaxpr, in_specs, out_specs, eqn, sums_of, stored_specs)
    entry_specs = [stored_specs.get(n, spec) for n, spec in enumerate(in_specs)]
    const_specs, carry_specs, row_specs = (entry_specs[places] for places in scan.inputs)
    assert block_body.result_specs[scan.results.carries] == carry_specs
    arrays = scope.arrays_under([*const_specs, *carry_specs, *map(_spec_of_stack, row_specs)], operands, eqn)
    results = eqn.primitive.bind(*arrays, **{**eqn.params, "jaxpr": block_body.jaxpr})
    stack_specs = map(_spec_of_stack, block_body.result_specs[scan.results.stacks])
    return _to_required_specs(scope, eqn, results, [*carry_specs, *stack_specs])


def _sums_of_accumulators(scope: Scope, eqn: JaxprEqn) -> list[int]:
    """For each carry of a loop the number of iterations that share one sum over devices; 0 if it is no accumulator.

    An accumulator is read by linear equations alone, up to its next value.
    """
    scan = scan_body(eqn.params)
    body = scan.jaxpr.jaxpr
    counts: list[int] = []
    carries = zip(body.invars[scan.inputs.carries], body.outvars[scan.results.carries], eqn.outvars, strict=False)
    for before, after, result in carries:
        count = eqn.params["length"] * scope.may_stay_unreduced.get(result, 1)
        is_sum = isinstance(after, Var) and before in values_that_may_stay_unreduced(body, {after: count})
        counts.append(count if is_sum and not scope.is_manual else 0)
    return counts


def _while_on_blocks(scope: Scope, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """A tested loop on blocks: condition and body share the specs of the carries."""
    condition = while_condition(eqn.params)
    body = while_body(eqn.params)
    body_specs = list(map(scope.spec_or_whole, body.jaxpr.jaxpr.invars))
    carry_specs = body_specs[body.inputs.carries]
    condition_consts = condition.jaxpr.jaxpr.invars[condition.inputs.constants]
    condition_specs = list(map(scope.spec_or_whole, condition_consts))
    arrays = scope.arrays_under([*condition_specs, *body_specs], operands, eqn)
    # Devices must agree on the condition. In a user's `shard_map` it may be one of each element of a batch.
    decision = whole(len(condition.jaxpr.out_avals[0].shape))
    block_condition = _body_on_blocks(scope, condition.jaxpr, [*condition_specs, *carry_specs], [decision], eqn)
    block_body = _body_on_blocks(scope, body.jaxpr, body_specs, carry_specs, eqn)
    changes = {"cond_jaxpr": block_condition.jaxpr, "body_jaxpr": block_body.jaxpr}
    results = eqn.primitive.bind(*arrays, **{**eqn.params, **changes})
    return _to_required_specs(scope, eqn, results, carry_specs)


def _cond_on_blocks(scope: Scope, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """Branches on blocks; every device has the whole index, so that all take the same branch."""
    index, *inputs = operands
    index = scope.to_spec(index, Spec(()), eqn)
    specs = [block.spec.reduced() for block in inputs]
    arrays = scope.arrays_under(specs, inputs, eqn)
    out_specs = [scope.spec_or_whole(var) for var in eqn.outvars]
    branches = (_body_on_blocks(scope, branch, specs, out_specs, eqn).jaxpr for branch in eqn.params["branches"])
    results = eqn.primitive.bind(index.array, *arrays, **{**eqn.params, "branches": tuple(branches)})
    return _to_required_specs(scope, eqn, results, out_specs)


def _pipeline_on_blocks(scope: Scope, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """A pipeline on blocks: one micro-batch is partitioned; sums and means over micro-batches may stay unreduced."""
    spec = eqn.params["spec"]
    jaxpr = micro_batch_jaxpr(eqn)
    body = jaxpr.jaxpr
    in_specs = list(map(scope.spec_or_whole, body.invars))
    arrays: list[Any] = []
    for block, role, in_spec in zip(operands, spec.roles, in_specs, strict=True):
        are_rows_split = role == "batch" and in_spec.dims[0]
        if are_rows_split and not spec.rows_in_any_order:
            # Each device gets all rows of the batch, and takes its own of each micro-batch.
            batch = scope.to_spec(block, replace(in_spec, dims=((), *in_spec.dims[1:])), eqn).array
            arrays.append(_rows_of_micro_batches(batch, spec.micro_batches, in_spec, scope.mesh))
        else:
            # A device's rows of the batch are its rows of the micro-batches, if those may be any.
            arrays.append(scope.to_spec(block, in_spec, eqn).array)
    kinds = kinds_of_results(eqn)
    # The next value of a state has the spec of the state.
    state_specs = {result: in_specs[operand] for operand, result in spec.carries}
    out_specs = [state_specs.get(n, scope.spec_or_whole(var)) for n, var in enumerate(body.outvars)]
    sums_of = [
        spec.micro_batches if kind in _SUMMED and holds_partial_sums(spec.accumulator_dtype(aval)) else 0
        for kind, aval in zip(kinds, jaxpr.out_avals, strict=True)
    ]
    block_body = _body_on_blocks(scope, jaxpr, in_specs, out_specs, eqn, sums_of)
    results = eqn.params["micro_batch"].bind(block_body.jaxpr, spec, arrays)
    pairs = zip(block_body.result_specs, kinds, strict=True)
    return _to_required_specs(scope, eqn, results, [_spec_of_stack(s) if kind == "stack" else s for s, kind in pairs])


def _rows_of_micro_batches(x: jax.Array, micro_batches: int, spec: Spec, mesh: MeshAxes) -> jax.Array:
    """A device's rows of each micro-batch, of a batch whose rows it has all; `spec` is that of a micro-batch."""
    shape = x.shape
    stack = x.reshape(micro_batches, shape[0] // micro_batches, *shape[1:])
    # Dimensions of the stack: micro-batches and their rows, which are whole before, then those of a row.
    before = Spec(((), (), *spec.dims[1:]))
    rows = reshard(stack, before, replace(before, dims=((), *spec.dims)), mesh)
    return rows.reshape(-1, *shape[1:])


def _shard_map_on_blocks(scope: Scope, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """A user's own `jax.shard_map` on blocks: its code, for each device, on operands under the specs that it states."""
    check_mesh(eqn, scope.mesh)
    in_specs, out_specs = shard_map_specs(eqn, scope.mesh)
    arrays = scope.arrays_under(in_specs, operands, eqn)
    inner = replace(scope, is_manual=True, resharded={})
    blocks = [Block(x, whole(jnp.ndim(x)), jax.typeof(x)) for x in arrays]
    results = evaluate_on_blocks(inner, closed(eqn.params["jaxpr"]), blocks)
    return _to_required_specs(scope, eqn, [block.array for block in results], out_specs)


def _custom_partitioning_on_blocks(scope: Scope, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """A user's own partitioning; each device computes the whole function inside of a user's `shard_map`."""
    if scope.is_manual:
        return evaluate_on_blocks(scope, eqn.params["call"], operands)
    specs = [block.spec.reduced() for block in operands]
    result_specs = [scope.spec_or_whole(var) for var in eqn.outvars]
    custom = custom_function(eqn, specs, result_specs, scope.mesh, scope.user_mesh)
    results = custom.compute(*scope.arrays_under(custom.operand_specs, operands, eqn))
    return _to_required_specs(scope, eqn, results, custom.result_specs)


def _inspect_sharding(scope: Scope, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """Tells the user's callback the sharding of a value, as the partitioner of `jax.jit` does while it compiles."""
    (block,) = operands
    if scope.is_trial:
        return []
    spec = PartitionSpec() if scope.is_manual else block.spec.reduced().partition_spec()
    eqn.params["callback"](NamedSharding(scope.user_mesh, spec))
    return []


def _host_call(scope: Scope, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """A call of each device on its block if the user asks for `partitioned`, else one call on whole values."""
    is_of_blocks = scope.is_manual or eqn.params.get("partitioned", False)
    specs = [block.spec.reduced() if is_of_blocks else whole(len(block.spec.dims)) for block in operands]
    arrays = scope.arrays_under(specs, operands, eqn)
    results = eval_equation(eqn, *arrays) if is_of_blocks else call_once(eqn, arrays, scope.mesh.num_devices)
    return _to_required_specs(scope, eqn, results, [whole(len(shape_of(var))) for var in eqn.outvars])


_EVALUATIONS = {
    "scan": _scan_on_blocks,
    "while": _while_on_blocks,
    "cond": _cond_on_blocks,
    "shard_map": _shard_map_on_blocks,
    PIPELINE: _pipeline_on_blocks,
    CUSTOM_PARTITIONING: _custom_partitioning_on_blocks,
    "inspect_sharding": _inspect_sharding,
    **dict.fromkeys(HOST_CALLS, _host_call),
}
