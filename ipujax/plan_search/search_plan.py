"""`ipu.Plan`: how a step is spread over IPUs, and the function that applies it to a step that knows nothing of it.

    step(params, state, batch), a plan  →  the same step for `ipu.jit`

Every axis keeps the global meaning of the step, so that its numbers stay those of one IPU:

    data, shards     axes of a mesh: the batch is split over one, arguments by `specs` over the other (pass `partition`)
    shard_state      arguments that only the update reads are split over `data` too: each IPU updates its part
    shard_stored     what a loop stores for its gradient, equal on all shards, is split over them
    micro_batches    the step's sums over the batch are accumulated, see `accumulation`
    serial           the largest values of a micro-batch, as logits, are computed in parts, see `serial_parts`
    stages           micro-batches go through a pipeline with so many automatic stages, by `schedule`
    recompute        `Options.recompute`
    offload          `offload_argnums` of `ipu.jit`

A step with an `ipu.pipeline` keeps its micro-batches and stages of its own; `stages`, `schedule` of the plan replace
those of a pipeline with automatic stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.tree_util import keystr

from ipujax.arguments import as_numbers, whole_number
from ipujax.device import IPUModel
from ipujax.jit import IpuFunction, jit
from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    JaxprEqn,
    constants_as_inputs,
    eval_equation,
    eval_jaxpr,
    jaxpr_as_fun,
)
from ipujax.lowering.jaxpr import PIPELINE, equations, stage_scope
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.pipelining import PipelineSpec, Role, bind_pipeline, pipeline_p, staged_pipeline_p
from ipujax.lowering.schedules import as_schedule
from ipujax.plan_search.accumulation import SplitStep, split_step
from ipujax.plan_search.search_settings import checked_positions
from ipujax.plan_search.serial_parts import in_parts
from ipujax.runtime.errors import ArgumentError, ArgumentValueError
from ipujax.runtime.names_at_import import jax_jit
from ipujax.runtime.options import RECOMPUTATIONS, Options, Recompute
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.target import nearest

DATA = "data"
MODEL = "model"


@checking_calls("ipu.Plan")
@dataclass(frozen=True, slots=True)
class Plan:
    """Plan by which a step is spread over IPUs; its text is code.

    Args:
        data: number of equal parts of the batch that IPUs compute at once.
        shards: number of IPUs over which arguments are split by `specs`.
        stages: number of stages of the pipeline.
        micro_batches: number of parts of the batch that are computed one after the other.
        schedule: name of the pipeline's schedule; the one that suits the machine when None.
        serial: number of parts in which the largest values of a micro-batch, as logits, are computed one after the
            other.
        recompute: values that gradients compute again, see `ipu.Options`.
        offload: positional arguments in streaming memory.
        shard_state: whether arguments that only the update reads are split over `data`.
        shard_stored: whether values that a loop over layers stores for its gradient, and that are equal on all shards,
            are stored in parts, one on each, and gathered where the gradient reads them.
        cuts: first segment of each stage but the first, as `ipu.search` finds them; when empty, `ipu.pipeline` searches
            the stages.
        specs: split of arrays over the mesh axis "model", by their path in the arguments, as "[0]['w']".
    """

    data: int = 1
    shards: int = 1
    stages: int = 1
    micro_batches: int = 1
    schedule: str | None = None
    serial: int = 1
    recompute: Recompute = "none"
    offload: tuple[int, ...] = ()
    shard_state: bool = False
    shard_stored: bool = False
    specs: Mapping[str, PartitionSpec] = field(default_factory=dict, hash=False)
    cuts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("data", "shards", "stages", "micro_batches", "serial"):
            whole_number(f"{name} of ipu.Plan", getattr(self, name), 1)
        if self.recompute not in RECOMPUTATIONS:
            expected = f"one of {', '.join(map(repr, RECOMPUTATIONS))}"
            hint = nearest(str(self.recompute), RECOMPUTATIONS)
            raise ArgumentValueError("recompute of ipu.Plan", expected=expected, got=repr(self.recompute), hint=hint)
        if self.schedule is not None:
            as_schedule(self.schedule)
        if self.shard_stored and self.shards == 1:
            raise ArgumentValueError(
                "shard_stored of ipu.Plan has no effect on one shard", expected="shards of 2 or more", got=repr(self)
            )
        axes = {axis for spec in self.specs.values() for part in spec for axis in _axes_of(part)}
        if axes - {MODEL}:
            raise ArgumentValueError(
                "specs of ipu.Plan", expected=f"splits over the mesh axis {MODEL!r}", got=repr(dict(self.specs))
            )

    @property
    def num_ipus(self) -> int:
        """Number of IPUs that the plan uses."""
        return self.data * self.shards * self.stages

    def __repr__(self) -> str:
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != _DEFAULTS[f.name]]
        texts = [f"{name}={_code(value)}" for name, value in changed]
        return f"ipu.Plan({', '.join(texts)})"

    @checking_calls("Plan.jit")
    def jit(
        self,
        step: Callable[..., Any],
        *,
        batch_argnums: int | Sequence[int],
        device: IPUModel,
        donate_argnums: int | Sequence[int] | None = None,
        options: Options | None = None,
    ) -> IpuFunction[..., Any]:
        """Return the step for `ipu.jit`, spread over IPUs by this plan.

        Args:
            step: function of pytrees of arrays, with or without `ipu.pipeline`; or one that `ipu.jit` returned.
            batch_argnums: positional arguments whose first axis is the batch.
            device: the machine.
            donate_argnums: as of `ipu.jit`; those of `step` when None.
            options: options, those of `step` when None; the plan's recomputation replaces theirs.

        Raises:
            ArgumentError: a step with settings that the plan has in their place; at a call, a batch that the plan does
                not divide, or a step without micro-batches.
        """
        numbers = as_numbers("batch_argnums", batch_argnums, "ipu.Plan.jit")
        if isinstance(step, IpuFunction):
            step.check_kept("ipu.Plan.jit", ("donate_argnums",))
            options = step.options if options is None else options
            donate_argnums = step.donate_argnums if donate_argnums is None else donate_argnums
            step = step.fun
        donated = as_numbers("donate_argnums", () if donate_argnums is None else donate_argnums, "ipu.Plan.jit")
        settings = replace(options or Options(), recompute=self.recompute)
        planned = planned_step(self, step, numbers, donated)
        return jit(planned, device=device, donate_argnums=donated, offload_argnums=self.offload, options=settings)


def _axes_of(part: Any) -> tuple[Any, ...]:
    """Mesh axes of one dimension of a spec."""
    return () if part is None else part if isinstance(part, tuple) else (part,)


def _code(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_code(spec)}" for key, spec in value.items()) + "}"
    return repr(value).replace("PartitionSpec(", "P(") if isinstance(value, PartitionSpec) else repr(value)


_DEFAULTS: dict[str, Any] = {f.name: {} if f.name == "specs" else f.default for f in fields(Plan)}


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step as a jaxpr without calls and constants.

    Args:
        jaxpr: constants of the step, then the leaves of its arguments, to the leaves of its results.
        constants: its constants.
        paths: path of each leaf of the arguments.
        arguments: number of the argument of each leaf.
        out_tree: structure of the results.
        has_pipeline: whether it has an `ipu.pipeline`, so micro-batches of its own.
    """

    jaxpr: ClosedJaxpr
    constants: tuple[Any, ...]
    paths: tuple[str, ...]
    arguments: tuple[int, ...]
    out_tree: Any
    has_pipeline: bool

    @property
    def avals(self) -> Sequence[Any]:
        """Types of the leaves of the arguments."""
        return self.jaxpr.in_avals[len(self.constants) :]

    def is_of(self, numbers: Sequence[int]) -> tuple[bool, ...]:
        """Return for each leaf whether it is of one of some arguments, by their position from 0."""
        return tuple(argument in numbers for argument in self.arguments)


def traced_step(step: Callable[..., Any], args: Sequence[Any]) -> TracedStep:
    """Trace a step with arguments or their shapes."""
    shapes = jax.tree.map(shape_of, tuple(args))
    trace = jax_jit(step).trace(*shapes)
    # As inputs: constants of a step may be large, and are split and moved like arguments.
    jaxpr, constants = constants_as_inputs(inline(trace.jaxpr))
    rows = jax.tree_util.tree_leaves_with_path(shapes)
    return TracedStep(
        jaxpr,
        tuple(constants),
        tuple(keystr(path) for path, _ in rows),
        tuple(path[0].idx for path, _ in rows),
        trace.out_tree,
        any(eqn.primitive in (pipeline_p, staged_pipeline_p) for eqn in equations(trace.jaxpr.jaxpr)),
    )


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Return shape and type of an array or a number."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def planned_step(
    plan: Plan, step: Callable[..., Any], batch: Sequence[int], donated: Sequence[int] = ()
) -> Callable[..., Any]:
    """Return a step that is spread over IPUs by a plan when `ipu.jit` traces it."""

    def planned(*args: Any) -> Any:
        traced = traced_step(step, args)
        is_batch = traced.is_of(checked_positions("batch_argnums", batch, args, "ipu.Plan.jit"))
        is_donated = traced.is_of(checked_positions("donate_argnums", donated, args, "ipu.Plan.jit"))
        _check_batch(plan, traced, is_batch)
        _check_paths(plan, traced)
        split = split_of(plan, traced, is_batch)
        return applied(plan, traced, split, is_batch, is_donated, jax.tree.leaves(args))

    planned.__name__ = planned.__qualname__ = getattr(step, "__name__", "step")
    return planned


def applied(
    plan: Plan,
    traced: TracedStep,
    split: SplitStep | None,
    is_batch: Sequence[bool],
    is_donated: Sequence[bool],
    leaves: Sequence[Any],
) -> Any:
    """Return the results of a step under a plan, while `ipu.jit` traces it; `split` as of `split_of`."""
    mesh = mesh_of(plan)
    specs = leaf_specs(plan, traced, is_batch, None if split is None else split.used[1 + len(traced.constants) :])
    rows = PartitionSpec(DATA) if plan.data > 1 else PartitionSpec()
    values = [*traced.constants, *(_constrained(x, spec, mesh) for x, spec in zip(leaves, specs, strict=True))]
    flags = [False] * len(traced.constants) + list(is_batch)
    if split is None:
        if plan.shard_stored:
            raise ArgumentError(
                "shard_stored of ipu.Plan is for the micro-batches of a plan",
                expected="micro_batches or stages of 2 or more, of a step without ipu.pipeline",
                got=repr(plan),
            )
        jaxpr = in_parts(traced.jaxpr, flags, plan.serial)
        results = eval_jaxpr(jaxpr, values, lambda eqn, operands: _evaluated(plan, eqn, operands), jnp.asarray)
    else:
        # The first operand is the number of the micro-batch, one row of a batch of numbers.
        operands = [jnp.arange(plan.micro_batches, dtype=jnp.int32), *values]
        roles: list[Role] = ["batch" if flag else "same" for flag in (True, *flags)]
        used = [n for n, is_used in enumerate(split.used) if is_used]
        micro_batch_jaxpr = in_parts(split.micro_batch, (True, *flags), plan.serial)
        # A part of a value of the whole batch, such as a mask that was drawn for it, belongs to certain rows.
        in_any_order = all(split.is_sum) and not split.used[0]
        shapes = [_micro_batch_shape(operands[n], roles[n], plan.micro_batches) for n in used]

        def micro_batch(*arrays: Any) -> Any:
            inputs: list[Any] = [jnp.zeros(x.shape, x.dtype) for x in split.micro_batch.in_avals]
            for n, x in zip(used, arrays, strict=True):
                inputs[n] = x[0] if n == 0 else _constrained(x, rows, mesh) if roles[n] == "batch" else x
            with jax.named_scope(stage_scope(0)) if in_any_order and plan.stages == 1 else nullcontext():
                return jaxpr_as_fun(micro_batch_jaxpr)(*inputs)

        jaxpr = jax.make_jaxpr(micro_batch)(*shapes)
        spec = PipelineSpec(
            getattr(jaxpr.jaxpr.debug_info, "func_name", "step") or "step",
            plan.micro_batches,
            tuple(roles[n] for n in used),
            (),
            tuple("sum" if flag else "stack" for flag in split.is_sum),
            schedule=None if plan.schedule is None or plan.stages == 1 else as_schedule(plan.schedule),
            stages=plan.stages if plan.stages > 1 else None,
            rows_in_any_order=in_any_order,
            cuts=plan.cuts,
            shards_stored_rows=plan.shard_stored,
        )
        reduced = bind_pipeline(jaxpr, spec, [operands[n] for n in used])
        values_of_batch = [
            x if is_sum else x.reshape(-1, *x.shape[2:]) for x, is_sum in zip(reduced, split.is_sum, strict=True)
        ]
        results = jaxpr_as_fun(split.update)(*values, *values_of_batch)
    # A result in the place of a donated array has its split, so that the next call finds it there.
    places = result_places(traced, is_donated)
    placed = [_constrained(x, specs[places[n]], mesh) if n in places else x for n, x in enumerate(results)]
    return jax.tree.unflatten(traced.out_tree, placed)


def _evaluated(plan: Plan, eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Results of an equation; a pipeline with automatic stages has those of the plan."""
    spec = eqn.params.get("spec") if eqn.primitive.name == PIPELINE else None
    if spec is None or plan.stages == 1:
        return eval_equation(eqn, *operands)
    schedule = spec.schedule if plan.schedule is None else as_schedule(plan.schedule)
    stages = spec.stages if spec.stages is None else plan.stages
    return bind_pipeline(
        eqn.params["micro_batch"].jaxpr, replace(spec, schedule=schedule, stages=stages), list(operands)
    )


def split_of(plan: Plan, traced: TracedStep, is_batch: Sequence[bool]) -> SplitStep | None:
    """Return the step as micro-batches and an update; None for a step that stays whole, or has its own pipeline."""
    if traced.has_pipeline or (plan.micro_batches == 1 and plan.stages == 1):
        return None
    return split_step(traced.jaxpr, [False] * len(traced.constants) + list(is_batch), plan.micro_batches)


def mesh_of(plan: Plan) -> AbstractMesh | None:
    """Return the mesh of each stage; None for one IPU."""
    sizes = {name: size for name, size in ((DATA, plan.data), (MODEL, plan.shards)) if size > 1}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes)) if sizes else None


def leaf_specs(
    plan: Plan, traced: TracedStep, is_batch: Sequence[bool], is_used: Sequence[bool] | None
) -> list[PartitionSpec | None]:
    """Return the spec of each leaf of the arguments; None where it is left to propagation.

    Args:
        plan: the plan.
        traced: the step.
        is_batch: whether each leaf is of the batch.
        is_used: whether a micro-batch reads it; None where that is not known.
    """
    if mesh_of(plan) is None:
        return [None] * len(traced.paths)
    read = is_used if is_used is not None else [True] * len(traced.paths)
    user_specs = {path: spec for path, spec in plan.specs.items()} if plan.shards > 1 else {}
    by_shape = {
        tuple(traced.avals[n].shape): user_specs[path] for n, path in enumerate(traced.paths) if path in user_specs
    }
    specs = list[PartitionSpec | None]()
    for path, aval, flag, is_read in zip(traced.paths, traced.avals, is_batch, read, strict=True):
        if flag:
            specs.append(PartitionSpec(DATA) if plan.data > 1 else PartitionSpec())
            continue
        # State has the split of the parameter that it belongs to, which has its shape.
        spec = user_specs.get(path) or by_shape.get(tuple(aval.shape), PartitionSpec())
        if plan.shard_state and not is_read and plan.data > 1:
            spec = _with_data(spec, aval.shape, plan)
        specs.append(spec)
    return specs


def _with_data(spec: PartitionSpec, shape: Sequence[int], plan: Plan) -> PartitionSpec:
    """A spec that splits the first dimension that it can over `data` too."""
    dims = [*spec, *[None] * (len(shape) - len(spec))]
    for n, (axis, size) in enumerate(zip(dims, shape, strict=True)):
        if axis is None and size % plan.data == 0 and size > 1:
            return PartitionSpec(*dims[:n], DATA, *dims[n + 1 :])
    return spec


def _constrained(x: Any, spec: PartitionSpec | None, mesh: AbstractMesh | None) -> Any:
    return x if mesh is None or spec is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _micro_batch_shape(x: Any, role: str, micro_batches: int) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x)
    rows = (aval.shape[0] // micro_batches, *aval.shape[1:]) if role == "batch" else aval.shape
    return jax.ShapeDtypeStruct(rows, aval.dtype, weak_type=role == "same" and aval.weak_type)


def result_places(traced: TracedStep, is_donated: Sequence[bool]) -> dict[int, int]:
    """Return for each result that takes the place of a donated array the number of its leaf."""
    # As under `jax.jit`, each result takes the place of one array of its type.
    free: dict[tuple[Any, ...], list[int]] = {}
    for number, (aval, flag) in enumerate(zip(traced.avals, is_donated, strict=True)):
        if flag:
            free.setdefault((aval.shape, aval.dtype), []).append(number)
    places = dict[int, int]()
    for number, aval in enumerate(traced.jaxpr.out_avals):
        if leaves := free.get((aval.shape, aval.dtype)):
            places[number] = leaves.pop(0)
    return places


def _check_paths(plan: Plan, traced: TracedStep) -> None:
    """Refuse specs of arguments that a step does not have."""
    for path in plan.specs:
        if path not in traced.paths:
            raise ArgumentError(
                f"specs of ipu.Plan name no argument: {path!r}",
                expected=f"paths of arrays in the arguments, as {traced.paths[0]!r}" if traced.paths else "arguments",
                got=repr(path),
                hint=nearest(path, traced.paths),
            )


def _check_batch(plan: Plan, traced: TracedStep, is_batch: Sequence[bool]) -> None:
    """Refuse a batch that a plan does not divide."""
    parts = plan.data * (1 if traced.has_pipeline else plan.micro_batches)
    for path, aval, flag in zip(traced.paths, traced.avals, is_batch, strict=True):
        if flag and (not aval.shape or aval.shape[0] % parts):
            rows = aval.shape[0] if aval.shape else 0
            closest = max((n for n in range(1, parts + 1) if rows and rows % n == 0), default=1)
            raise ArgumentError(
                f"the batch does not divide: args{path} has {rows:,} rows",
                expected=f"a multiple of {parts:,}: data={plan.data} × micro_batches={plan.micro_batches}",
                got=f"{aval.dtype}{list(aval.shape)}",
                hint=f"data × micro_batches={closest:,}, or a batch of {(rows // parts + 1) * parts:,} rows",
            )
