"""Evaluates a jaxpr of whole values on the blocks of one device of a mesh, under `jax.shard_map`.

Each equation is computed on blocks of the operands, by its factors. Operands that are needed in another split are
resharded before, results whose spec is another one after. Equations without factors get whole operands, and are noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    DropVar,
    JaxprEqn,
    Var,
    closed,
    eval_equation,
    eval_jaxpr,
    shape_of,
    source_of,
    with_weak_type,
)
from ipujax.lowering.jaxpr import PIPELINE, equations_inside, scan_body, while_body, while_condition
from ipujax.lowering.partition.assignments import Values, axes_of, decide, needed_specs
from ipujax.lowering.partition.block_rules import Blocks, results_of
from ipujax.lowering.partition.pipelines import pipeline_results
from ipujax.lowering.partition.resharding import (
    ADDITIONS,
    Step,
    itemsize,
    received_blocks,
    reshard,
    transitions,
    values_that_stay_terms,
)
from ipujax.lowering.partition.specs import Axes, MeshAxes, Spec, in_words, local_shape, typed_spec, whole
from ipujax.lowering.partition.users_blocks import CUSTOM_PARTITIONING, check_mesh, custom_function, shard_map_specs
from ipujax.lowering.primitives import Factors, record_of
from ipujax.lowering.replicas import HOST_CALLS, call_once
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import GraphError
from ipujax.runtime.target import Target

# Equations that only state the spec of a value.
STATEMENTS = frozenset({"sharding_constraint", "reshard"})


@dataclass(frozen=True, slots=True)
class Block:
    """The block of a value that one device has.

    Args:
        array: the block.
        spec: split of the value.
        aval: type of the whole value.
    """

    array: Any
    spec: Spec
    aval: Any


@dataclass(frozen=True, slots=True)
class Move:
    """A collective that partitioning has added.

    Args:
        primitive: equation that it is for.
        line: line of source of that equation.
        step: the collective.
        num_bytes: bytes of a device's block before it.
        received_bytes: bytes that a device receives.
        why: spec of the block, and the spec that it is moved to.
    """

    primitive: str
    line: str
    step: Step
    num_bytes: int
    received_bytes: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Notes:
    """Record of a partitioning.

    Args:
        moves: collectives, in order.
        gathered: primitive and line of each equation that is computed whole for want of factors.
        terms: for each result the axes over which it is a stack of the terms of a sum; none for other results.
        conflicts: conflicts of annotations that cycles have decided, in words.
    """

    moves: list[Move] = field(default_factory=list)
    gathered: list[tuple[str, str]] = field(default_factory=list)
    terms: list[Axes] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Evaluates jaxprs on blocks.

    Args:
        mesh: the mesh.
        target: machine whose cycles decide.
        specs: spec of each value that has one; others have that of their type, or any.
        notes: receives collectives and equations without factors.
        user_mesh: mesh of the user's shardings.
        is_manual: True inside of a user's `shard_map`, where every value is a device's own.
    """

    mesh: MeshAxes
    target: Target
    specs: Mapping[Var, Spec]
    notes: Notes
    user_mesh: Mesh | AbstractMesh
    is_manual: bool = False
    # Values of which devices may have the terms of a sum, as its reader takes the sum.
    sums: frozenset[Var] = frozenset()
    # By id of a block's array and spec: a value that several equations gather is gathered once.
    resharded: dict[tuple[int, Spec], tuple[Any, Any]] = field(default_factory=dict)

    def run(self, jaxpr: ClosedJaxpr, operands: Sequence[Block]) -> list[Block]:
        """Blocks of the results."""
        return eval_jaxpr(jaxpr, operands, self._equation, self._constant)

    def required(self, var: Any) -> Spec | None:
        """Spec that a value must have; None for any."""
        if self.is_manual:
            return whole(len(shape_of(var)))
        spec = self.specs.get(var) if isinstance(var, Var) else None
        return typed_spec(var.aval, self.mesh) if spec is None else spec

    def spec_or_whole(self, var: Any) -> Spec:
        """Spec that a value must have; whole for any."""
        spec = self.required(var)
        return whole(len(shape_of(var))) if spec is None else spec

    def to_spec(self, block: Block, spec: Spec, eqn: JaxprEqn | None = None) -> Block:
        """Block of the same value under another spec."""
        if block.spec == spec:
            return block
        key = id(block.array), spec
        if key not in self.resharded:
            self._note_moves(block, spec, eqn)
            self.resharded[key] = block.array, reshard(block.array, block.spec, spec, self.mesh)
        return Block(self.resharded[key][1], spec, block.aval)

    def _note_moves(self, block: Block, spec: Spec, eqn: JaxprEqn | None) -> None:
        name, line = ("result", "") if eqn is None else (eqn.primitive.name, source_line(eqn))
        why = f"{in_words(block.spec)} to {in_words(spec)}"
        element_bytes = itemsize(block.aval.dtype)
        for step, before in transitions(block.spec, spec, self.mesh):
            if step.communicates:
                num_bytes = prod(local_shape(block.aval.shape, before, self.mesh)) * element_bytes
                received = int(received_blocks(step, self.mesh) * num_bytes)
                self.notes.moves.append(Move(name, line, step, num_bytes, received, why))

    def _constant(self, value: Any) -> Block:
        aval = jax.typeof(value)
        return Block(value, whole(len(aval.shape)), aval)

    def _equation(self, eqn: JaxprEqn, operands: list[Block]) -> Sequence[Block]:
        """Blocks of the results of one equation: by its factors, or gathered if it has none."""
        with source_of(eqn):
            name = eqn.primitive.name
            if name in _CONTROL:
                return _CONTROL[name](self, eqn, operands)
            if name in _OF_MANUAL_VALUES:
                return [replace(operands[0], array=_OF_MANUAL_VALUES[name](operands[0].array, eqn.params))]
            if name in STATEMENTS:
                return [self._stated(eqn, operands[0])]
            required = [self.required(var) for var in eqn.outvars]
            if all(block.spec.is_whole for block in operands) and all(s is None or s.is_whole for s in required):
                return self._on_whole(eqn, operands, required)
            factors_of = record_of(eqn).factors
            if factors_of is None:
                return self._gathered(eqn, operands, required)
            return self._on_blocks(factors_of(eqn), eqn, operands, required)

    def _stated(self, eqn: JaxprEqn, block: Block) -> Block:
        (result,) = eqn.outvars
        spec = self.required(result)
        spec = block.spec if spec is None else spec
        if result in self.sums:
            spec = replace(spec, unreduced=block.spec.unreduced - set(spec.axes))
        if isinstance(result, DropVar):
            return block
        # A sum may stay to be taken only where the type says so.
        return self.to_spec(block, spec, eqn)

    def _on_whole(self, eqn: JaxprEqn, operands: Sequence[Block], required: Sequence[Spec | None]) -> list[Block]:
        arrays = [block.array for block in operands]
        if record_of(eqn).factors is None:
            results = eval_equation(eqn, *arrays)
        else:
            results = Blocks(eqn, arrays, [shape_of(var) for var in eqn.outvars], {}, self.mesh).bind()
        return [Block(x, whole(len(shape_of(v))), v.aval) for x, v in zip(results, eqn.outvars, strict=True)]

    def _gathered(self, eqn: JaxprEqn, operands: Sequence[Block], required: Sequence[Spec | None]) -> list[Block]:
        """The equation on whole operands, on every device."""
        _check_no_statements(eqn)
        if any(not block.spec.is_whole for block in operands):
            self.notes.gathered.append((eqn.primitive.name, source_line(eqn)))
        gathered = [self.to_spec(block, whole(len(block.spec.dims)), eqn) for block in operands]
        results = self._on_whole(eqn, gathered, required)
        return [self._to_required(block, spec, eqn) for block, spec in zip(results, required, strict=True)]

    def _to_required(self, block: Block, spec: Spec | None, eqn: JaxprEqn) -> Block:
        return self.to_spec(block, block.spec.reduced() if spec is None else spec, eqn)

    def _on_blocks(
        self, factors: Factors, eqn: JaxprEqn, operands: Sequence[Block], required: Sequence[Spec | None]
    ) -> list[Block]:
        """Blocks of the results, computed from blocks of the operands, and moved to the required specs."""
        # An operand may stay a term of a sum over an axis where all results may: the sum is then taken of them.
        may_stay = frozenset.intersection(*map(self._may_stay_unreduced, required, eqn.outvars))
        axes_left = [block.spec.unreduced & may_stay for block in operands]
        if eqn.primitive.name in ADDITIONS:
            axes_left = [frozenset[str]().union(*axes_left)] * len(operands)  # a term is added to a term
        pairs = zip(operands, axes_left, strict=True)
        operands = [self.to_spec(b, replace(b.spec, unreduced=axes), eqn) for b, axes in pairs]
        values = Values(
            [block.aval for block in operands],
            [block.spec for block in operands],
            [var.aval for var in eqn.outvars],
            required,
        )
        decision = decide(factors, values, self.mesh, self.target)
        needed = needed_specs(factors, decision.assignment, values.operand_specs)
        arrays = [self.to_spec(block, spec, eqn).array for block, spec in zip(operands, needed, strict=True)]
        unreduced = frozenset(axis for block in operands for axis in block.spec.unreduced)
        specs = [Spec(axes_of(labels, decision.assignment)) for labels in factors.results]
        result_shapes = [
            local_shape(shape_of(var), spec, self.mesh) for var, spec in zip(eqn.outvars, specs, strict=True)
        ]
        results = results_of(Blocks(eqn, arrays, result_shapes, decision.assignment, self.mesh))
        monoids = decision.reduced_axes(factors)
        blocks = [
            self._reduced(monoids, x, spec, unreduced, eqn, var)
            for x, spec, var in zip(results, specs, eqn.outvars, strict=True)
        ]
        return [
            block
            if var in self.sums and (spec is None or block.spec.dims == spec.dims)
            else self._to_required(block, spec, eqn)
            for block, spec, var in zip(blocks, required, eqn.outvars, strict=True)
        ]

    def _reduced(
        self, monoids: Mapping[str, str], x: Any, spec: Spec, unreduced: frozenset[str], eqn: JaxprEqn, var: Any
    ) -> Block:
        """Block of a result; sums stay unreduced, other reductions of devices do not."""
        for monoid in sorted(set(monoids.values()) - {"add"}):
            axes = tuple(axis for axis, other in monoids.items() if other == monoid)
            self._note_reduction(monoid, axes, spec, eqn, var)
            x = _REDUCED_OVER_DEVICES[monoid](x, axes, eqn)
        sums = frozenset(axis for axis, monoid in monoids.items() if monoid == "add")
        return Block(x, replace(spec, unreduced=sums | unreduced), var.aval)

    def _note_reduction(self, monoid: str, axes: Axes, spec: Spec, eqn: JaxprEqn, var: Any) -> None:
        step = Step("all_gather" if monoid == "own" else "all_reduce", axes)
        num_bytes = prod(local_shape(var.aval.shape, spec, self.mesh)) * itemsize(var.aval.dtype)
        received = int(received_blocks(step, self.mesh) * num_bytes)
        why = f"terms of {eqn.primitive.name} over {', '.join(axes)} to {in_words(spec)}"
        self.notes.moves.append(Move(eqn.primitive.name, source_line(eqn), step, num_bytes, received, why))

    def _may_stay_unreduced(self, spec: Spec | None, var: Var) -> frozenset[str]:
        """Axes over which a result may stay an unreduced sum."""
        if var in self.sums:
            return frozenset(self.mesh.names)
        return frozenset() if spec is None else spec.unreduced

    def blocks_of(self, arrays: Sequence[Any], specs: Sequence[Spec], avals: Sequence[Any]) -> list[Block]:
        """Blocks of values."""
        return [Block(x, spec, aval) for x, spec, aval in zip(arrays, specs, avals, strict=True)]

    def traced(self, fun: Any, avals: Sequence[Any], results: Sequence[Any]) -> ClosedJaxpr:
        """Jaxpr of a function of blocks, whose results have the weak types of `results`."""

        def typed(*arrays: Any) -> list[Any]:
            return [with_weak_type(x, v.aval.weak_type) for x, v in zip(fun(*arrays), results, strict=True)]

        return jax.make_jaxpr(typed)(*avals)

    def block_aval(self, aval: Any, spec: Spec) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a block."""
        shape = local_shape(aval.shape, spec, self.mesh)
        return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)

    def body(
        self, jaxpr: ClosedJaxpr, in_specs: Sequence[Spec], out_specs: Sequence[Spec], eqn: JaxprEqn, *sums: bool
    ) -> tuple[ClosedJaxpr, list[Spec]]:
        """Jaxpr on blocks of a body, and specs of its results: the given ones; some may stay terms of `sums`."""
        are_sums = sums or (False,) * len(out_specs)
        summed = [v for v, is_sum in zip(jaxpr.jaxpr.outvars, are_sums, strict=True) if is_sum and isinstance(v, Var)]
        inner = replace(self, resharded={}, sums=values_that_stay_terms(jaxpr.jaxpr, summed))
        specs: list[Spec] = []

        def fun(*arrays: Any) -> list[Any]:
            results = inner.run(jaxpr, self.blocks_of(arrays, in_specs, jaxpr.in_avals))
            for block, spec, is_sum in zip(results, out_specs, are_sums, strict=True):
                terms = block.spec.unreduced - set(spec.axes) if is_sum else frozenset()
                specs.append(replace(spec, unreduced=spec.unreduced | terms))
            return [inner.to_spec(b, spec, eqn).array for b, spec in zip(results, specs, strict=True)]

        avals = [self.block_aval(aval, spec) for aval, spec in zip(jaxpr.in_avals, in_specs, strict=True)]
        return self.traced(fun, avals, jaxpr.jaxpr.outvars), specs


def _check_no_statements(eqn: JaxprEqn) -> None:
    """Refuse shardings inside of an equation that is computed whole, such as a pipeline with stages.

    Raises:
        GraphError: with the line of the sharding.
    """
    for inner in equations_inside(eqn):
        if inner.primitive.name in STATEMENTS:
            problem = f"a sharding inside of {eqn.primitive.name}, which is not partitioned"
            hint = "state shardings outside of pipelines with stages, or use jax.shard_map"
            raise GraphError(problem, where=source_line(inner) or None, hint=hint)


def _of_flags(fun: Any, x: Any, axes: Any) -> Any:
    """A maximum or minimum over devices; of flags, that of their numbers."""
    return fun(x.astype(jnp.int32), axes) != 0 if x.dtype == jnp.bool_ else fun(x, axes)


def _of_gathered_terms(x: Any, axes: Axes, eqn: JaxprEqn) -> Any:
    """The equation's own reduction, of the terms of all devices, for one that no collective takes."""
    params = eqn.primitive.get_bind_params({**eqn.params, "axes": (0,)})
    return eqn.primitive.bind(lax.all_gather(x, axes), **params)


# By monoid of the terms.
_REDUCED_OVER_DEVICES = {
    "max": lambda x, axes, _: _of_flags(lax.pmax, x, axes),
    "min": lambda x, axes, _: _of_flags(lax.pmin, x, axes),
    "own": _of_gathered_terms,
}


def stacked(spec: Spec) -> Spec:
    """Spec of a stack of values, whose first dimension is whole."""
    return replace(spec, dims=((), *spec.dims))


def _scan(run: Evaluation, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """A loop on blocks: its body is partitioned once, with the specs of its carries and rows."""
    body = scan_body(eqn.params)
    jaxpr = body.jaxpr.jaxpr
    in_specs = list(map(run.spec_or_whole, jaxpr.invars))
    const_specs, carry_specs, row_specs = (in_specs[places] for places in body.inputs)
    row_result_specs = list(map(run.spec_or_whole, jaxpr.outvars[body.results.stacks]))
    outer = [*const_specs, *carry_specs, *map(stacked, row_specs)]
    arrays = [run.to_spec(b, spec, eqn).array for b, spec in zip(operands, outer, strict=True)]
    # The sum of a stack is taken after the loop where its reader takes it.
    are_sums = [False] * len(carry_specs) + [var in run.sums for var in eqn.outvars[body.results.stacks]]
    result_specs = [*carry_specs, *row_result_specs]
    partitioned, specs = run.body(body.jaxpr, in_specs, result_specs, eqn, *are_sums)
    results = eqn.primitive.bind(*arrays, **{**eqn.params, "jaxpr": partitioned})
    return _required_blocks(run, eqn, results, [*carry_specs, *map(stacked, specs[len(carry_specs) :])])


def _while(run: Evaluation, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """A tested loop on blocks: condition and body share the specs of the carries."""
    condition = while_condition(eqn.params)
    body = while_body(eqn.params)
    body_specs = list(map(run.spec_or_whole, body.jaxpr.jaxpr.invars))
    carry_specs = body_specs[body.inputs.carries]
    condition_consts = condition.jaxpr.jaxpr.invars[condition.inputs.constants]
    condition_specs = list(map(run.spec_or_whole, condition_consts))
    specs = [*condition_specs, *body_specs]
    arrays = [run.to_spec(b, spec, eqn).array for b, spec in zip(operands, specs, strict=True)]
    # Devices must agree on the condition. In a user's `shard_map` it may be one of each element of a batch.
    decision = whole(len(condition.jaxpr.out_avals[0].shape))
    changes = {
        "cond_jaxpr": run.body(condition.jaxpr, [*condition_specs, *carry_specs], [decision], eqn)[0],
        "body_jaxpr": run.body(body.jaxpr, body_specs, carry_specs, eqn)[0],
    }
    results = eqn.primitive.bind(*arrays, **{**eqn.params, **changes})
    return _required_blocks(run, eqn, results, carry_specs)


def _cond(run: Evaluation, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    branches = eqn.params["branches"]
    index, *others = operands
    index = run.to_spec(index, Spec(()), eqn)
    specs = [block.spec.reduced() for block in others]
    arrays = [run.to_spec(b, spec, eqn).array for b, spec in zip(others, specs, strict=True)]
    out_specs = [run.spec_or_whole(var) for var in eqn.outvars]
    bodies = tuple(run.body(branch, specs, out_specs, eqn)[0] for branch in branches)
    results = eqn.primitive.bind(index.array, *arrays, **{**eqn.params, "branches": bodies})
    return _required_blocks(run, eqn, results, out_specs)


def _pipeline(run: Evaluation, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    return _required_blocks(run, eqn, *pipeline_results(run, eqn, operands))


def _required_blocks(run: Evaluation, eqn: JaxprEqn, results: Any, specs: Sequence[Spec]) -> list[Block]:
    blocks = [Block(x, spec, var.aval) for x, spec, var in zip(results, specs, eqn.outvars, strict=True)]
    required = [run.required(var) for var in eqn.outvars]
    return [
        b if spec is None or (var in run.sums and b.spec.dims == spec.dims) else run.to_spec(b, spec, eqn)
        for b, spec, var in zip(blocks, required, eqn.outvars, strict=True)
    ]


def _shard_map(run: Evaluation, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """A user's own code for each device."""
    params = eqn.params
    check_mesh(eqn, run.mesh)
    body = closed(params["jaxpr"])
    in_specs, out_specs = shard_map_specs(eqn, run.mesh)
    arrays = [run.to_spec(b, spec, eqn).array for b, spec in zip(operands, in_specs, strict=True)]
    inner = replace(run, is_manual=True, resharded={})
    blocks = [Block(x, whole(jnp.ndim(x)), jax.typeof(x)) for x in arrays]
    results = [block.array for block in inner.run(body, blocks)]
    return _required_blocks(run, eqn, results, out_specs)


def _custom(run: Evaluation, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """A user's own partitioning; each device computes the whole function inside of a user's `shard_map`."""
    if run.is_manual:
        return run.run(eqn.params["call"], operands)
    specs = [block.spec.reduced() for block in operands]
    result_specs = [run.spec_or_whole(var) for var in eqn.outvars]
    compute, taken, returned = custom_function(eqn, specs, result_specs, run.mesh, run.user_mesh)
    arrays = [run.to_spec(b, spec, eqn).array for b, spec in zip(operands, taken, strict=True)]
    return _required_blocks(run, eqn, compute(*arrays), returned)


def _inspect(run: Evaluation, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """Tells the user's callback the sharding of a value, as the partitioner of `jax.jit` does while it compiles."""
    (block,) = operands
    spec = PartitionSpec() if run.is_manual else block.spec.reduced().partition_spec()
    eqn.params["callback"](NamedSharding(run.user_mesh, spec))
    return []


def _host_call(run: Evaluation, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """A call of each device on its block if the user asks for `partitioned`, else one call on whole values."""
    is_of_blocks = run.is_manual or eqn.params.get("partitioned", False)
    specs = [block.spec.reduced() if is_of_blocks else whole(len(block.spec.dims)) for block in operands]
    arrays = [run.to_spec(b, spec, eqn).array for b, spec in zip(operands, specs, strict=True)]
    results = eval_equation(eqn, *arrays) if is_of_blocks else call_once(eqn, arrays, run.mesh.num_devices)
    return _required_blocks(run, eqn, results, [whole(len(shape_of(var))) for var in eqn.outvars])


def _sum_of_axes(x: Any, params: Mapping[str, Any]) -> Any:
    return lax.psum(x, params["axes"], axis_index_groups=params.get("axis_index_groups"))


def _gather_of_axes(x: Any, params: Mapping[str, Any]) -> Any:
    return lax.all_gather(
        x,
        params["axis_name"],
        axis=params["all_gather_dimension"],
        tiled=params["tiled"],
        axis_index_groups=params.get("axis_index_groups"),
    )


def _scatter_of_axes(x: Any, params: Mapping[str, Any]) -> Any:
    dim = params["scatter_dimension"]
    return lax.psum_scatter(x, params["axis_name"], scatter_dimension=dim, tiled=params["tiled"])


# Equations with a type of their own for values that are equal on all devices, which blocks are without.
_OF_MANUAL_VALUES = {
    "pvary": lambda x, params: x,
    "pcast": lambda x, params: x,
    "psum_invariant": _sum_of_axes,
    "all_gather_invariant": _gather_of_axes,
    "all_gather_reduced": _gather_of_axes,
    "unreduced_psum": _sum_of_axes,
    "unreduced_reduce_scatter": _scatter_of_axes,
    **{name: lambda x, params: x for name in ("preduced", "vary_unreduced_cast_p", "reduced_vary_cast_p")},
}
_CONTROL = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    PIPELINE: _pipeline,
    CUSTOM_PARTITIONING: _custom,
    "inspect_sharding": _inspect,
    **dict.fromkeys(HOST_CALLS, _host_call),
}
