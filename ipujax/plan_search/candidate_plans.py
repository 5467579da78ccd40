"""Candidate plans of a step on a machine: the combinations of axes that make sense, and why others are left out.

Input: a traced step, its batch, the machine, axes of the user. Output: `Candidates`. By default numbers of IPUs and of
micro-batches are powers of two. Plans that need less memory are `smaller_plans` of one that may not fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from ipujax.auto_sharding.sharding_search import Search as ShardingSearch
from ipujax.lowering.jaxpr import value_bytes
from ipujax.lowering.partition import stored_stacks
from ipujax.plan_search.accumulation import SplitStep, split_step
from ipujax.plan_search.search_plan import MODEL, Plan, TracedStep
from ipujax.plan_search.search_settings import AXES
from ipujax.plan_search.serial_parts import LargeValue, large_value
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.target import Target

_SCHEDULES = (None, "1f1b")  # the one that suits the machine, and the one that keeps fewest micro-batches
_MOST_SHARDS = 16
_MORE_PARTS = 4  # times the parts of the largest values, in plans that need less memory; assumed
_SMALL_SHARE = 1 / 256  # of all parameters' bytes: an argument that is smaller is not split
_ANY_BYTES = 1 << 40  # of a tile: more than a program needs


@dataclass(frozen=True, slots=True)
class Candidates:
    """Plans to compare.

    Args:
        plans: combinations of axes, without those that only save memory.
        impossible: plans that cannot be, and why.
        reasons: axes that were left at one, and why.
        savings: fields of plans that need less memory, in the order in which they are tried.
        is_split: whether the step is micro-batches and an update.
        least_rows: fewest rows of a micro-batch.
        large: its largest value.
        stored_row_bytes: bytes that its loops store for others, for each row.
    """

    plans: tuple[Plan, ...]
    impossible: Mapping[Plan, str] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    savings: tuple[Mapping[str, Any], ...] = ()
    is_split: bool = True
    least_rows: int = 1
    large: LargeValue = LargeValue()
    stored_row_bytes: float = 0.0

    def smaller_plans(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plan with what needs less memory."""
        # A stage of a pipeline is recomputed from its input; one IPU's loop over all layers is not.
        stores = self.stored_row_bytes > 0 and plan.stages == 1 and plan.shards > 1 and plan.micro_batches > 1
        for saving in self.savings:
            if saving["shard_state"] and plan.data == 1:
                continue
            saved = replace(plan, **saving)
            variants = [saved, replace(saved, shard_stored=True)] if stores and saved.recompute != "none" else [saved]
            for smaller in variants:
                if smaller != plan:
                    yield replace(smaller, serial=min(self.large.most_parts, _MORE_PARTS * plan.serial))

    def smallest(self, plan: Plan) -> Plan:
        """Return the one of `smaller_plans` that needs least memory, or the plan if there is none."""
        return max((plan, *self.smaller_plans(plan)), key=_saved)


def _saved(plan: Plan) -> tuple[int, bool, bool, bool]:
    return len(plan.offload), plan.shard_state, plan.recompute != "none", plan.shard_stored


def rows_of(traced: TracedStep, is_batch: Sequence[bool]) -> int:
    """Return the number of rows of the batch; refuses one without a common first axis."""
    shapes = [aval.shape for aval, flag in zip(traced.avals, is_batch, strict=True) if flag]
    sizes = {shape[0] if shape else 0 for shape in shapes}
    if len(sizes) != 1 or 0 in sizes:
        raise ArgumentError(
            "the batch of ipu.search has no common first axis",
            expected="batch_argnums of arrays with equally many examples",
            got=", ".join(map(str, map(list, shapes))) or "no arrays",
        )
    return int(sizes.pop())


def donated_arguments(traced: TracedStep, is_batch: Sequence[bool]) -> tuple[int, ...]:
    """Return the arguments, but for the batch, whose arrays all come back with their shapes."""
    free = Counter((aval.shape, str(aval.dtype)) for aval in traced.jaxpr.out_avals)
    numbers = list[int]()
    for number in sorted(set(traced.arguments)):
        leaves = [n for n, argument in enumerate(traced.arguments) if argument == number]
        needed = Counter((traced.avals[n].shape, str(traced.avals[n].dtype)) for n in leaves)
        if not any(is_batch[n] for n in leaves) and needed <= free:
            free -= needed
            numbers.append(number)
    return tuple(numbers)


def candidates(
    traced: TracedStep,
    is_batch: Sequence[bool],
    target: Target,
    axes: Mapping[str, tuple[Any, ...]],
    donate: Sequence[int],
) -> Candidates:
    """Return the plans of all combinations of axes.

    Raises:
        ArgumentError: a batch that no combination divides, or arguments that exceed the memory of the machine.
    """
    rows = rows_of(traced, is_batch)
    reasons = list[str]()
    split = _split(traced, is_batch, rows, reasons)
    used = [True] * len(traced.paths) if split is None else split.used[1 + len(traced.constants) :]
    _check_memory(traced, is_batch, used, target)
    state = [
        number
        for number in donate
        if not any(used[n] for n, argument in enumerate(traced.arguments) if argument == number)
    ]
    # Without micro-batches nothing says which arguments are parameters.
    specs = {} if split is None or target.num_ipus == 1 else _model_specs(traced, is_batch, used, split, target)
    if target.num_ipus > 1 and split is not None and not specs:
        reasons.append("shards: no argument has a dimension that two IPUs divide")
    large = LargeValue() if split is None else _large_value(traced, is_batch, split)
    stored_row_bytes = 0.0 if split is None else _stored_bytes(split) / _rows_of_part(traced, is_batch, split)
    # Powers of two: schedules, meshes and batches divide best by them.
    numbers = _powers(target.num_ipus)
    is_split = split is not None
    values = {
        "data": numbers,
        "shards": tuple(n for n in numbers if n <= _MOST_SHARDS) if specs else (1,),
        "stages": numbers if is_split or traced.has_pipeline else (1,),
        "micro_batches": tuple(n for n in _powers(rows) if rows % n == 0) if is_split else (1,),
        "schedule": _SCHEDULES,
        **axes,
    }
    plans = dict[Plan, None]()
    impossible: dict[Plan, str] = {}
    for data, shards, stages, micro_batches, schedule in product(*(values[name] for name in AXES[:5])):
        # Without stages a schedule has no effect: such plans are one.
        schedule = schedule if stages > 1 else None
        plan = Plan(data, shards, stages, micro_batches, schedule, specs=specs if shards > 1 else {})
        plan = replace(plan, **{name: axes[name][0] for name in AXES[5:] if name in axes})
        reason = _impossible(plan, rows, target.num_ipus, is_split, traced.has_pipeline)
        if reason is None:
            parts = large.parts(rows // (data * micro_batches), shards, target)
            plans[replace(plan, serial=parts)] = None
        elif axes:
            impossible[plan] = reason
    if not plans:
        _refuse_all(impossible, rows, target.num_ipus)
    least_rows = min(rows // (plan.data * plan.micro_batches) for plan in plans)
    savings = tuple(_savings(axes, state))
    # Plans of more IPUs than there are say nothing of the step.
    impossible = {plan: reason for plan, reason in impossible.items() if plan.num_ipus <= target.num_ipus}
    return Candidates(tuple(plans), impossible, tuple(reasons), savings, is_split, least_rows, large, stored_row_bytes)


def _powers(max_count: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(max_count.bit_length()))


def _split(traced: TracedStep, is_batch: Sequence[bool], rows: int, reasons: list[str]) -> SplitStep | None:
    """The step in the fewest micro-batches; None if it has none, with the reason."""
    if traced.has_pipeline:
        reasons.append("micro_batches: the step has an ipu.pipeline, which keeps its own")
        return None
    parts = next((n for n in range(2, rows + 1) if rows % n == 0), 0)
    if not parts:
        reasons.append("micro_batches, stages: the batch has one row")
        return None
    try:
        return split_step(traced.jaxpr, [False] * len(traced.constants) + list(is_batch), parts)
    except ArgumentError as error:
        place = f" ({error.where})" if error.where else ""
        reasons.append(f"micro_batches, stages: {error.what}{place}")
        return None


def _large_value(traced: TracedStep, is_batch: Sequence[bool], split: SplitStep) -> LargeValue:
    varies = [True, *[False] * len(traced.constants), *is_batch]
    return large_value(split.micro_batch, varies, _rows_of_part(traced, is_batch, split))


def _rows_of_part(traced: TracedStep, is_batch: Sequence[bool], split: SplitStep) -> int:
    """Rows of one micro-batch."""
    avals = split.micro_batch.in_avals[1 + len(traced.constants) :]
    return next(int(aval.shape[0]) for aval, flag in zip(avals, is_batch, strict=True) if flag)


def _stored_bytes(split: SplitStep) -> int:
    """Bytes that loops of a micro-batch store for other loops, as layers do for their gradients."""
    return sum(value_bytes(stack.aval) for stack in stored_stacks(split.micro_batch.jaxpr))


def _check_memory(traced: TracedStep, is_batch: Sequence[bool], used: Sequence[bool], target: Target) -> None:
    """Refuse parameters that exceed the memory of all IPUs."""
    rows = zip(traced.avals, is_batch, used, strict=True)
    num_bytes = sum(value_bytes(aval) for aval, flag, is_read in rows if is_read and not flag)
    of_an_ipu = target.tiles_per_ipu * target.bytes_per_tile
    if num_bytes > target.num_ipus * of_an_ipu:
        needed = _ceil_power(-(-num_bytes // of_an_ipu))
        raise ArgumentError(
            "the parameters of this step exceed the memory of the machine",
            expected=f"at most {target.num_ipus * of_an_ipu:,} bytes on {target.num_ipus} IPUs",
            got=f"{num_bytes:,} bytes that each micro-batch reads",
            hint=f"device=ipu.IPUModel(num_ipus={needed}) or more",
        )


def _impossible(plan: Plan, rows: int, num_ipus: int, is_split: bool, has_pipeline: bool) -> str | None:
    """Return the reason for which a plan cannot be; None if it can."""
    if plan.num_ipus > num_ipus:
        return f"needs {plan.num_ipus} IPUs, of {num_ipus}"
    if rows % (plan.data * plan.micro_batches):
        return f"{rows} rows do not divide into {plan.data * plan.micro_batches} parts"
    if plan.stages > 1 and plan.micro_batches == 1 and not has_pipeline:
        return "a pipeline of one micro-batch has one IPU at work"
    if plan.micro_batches > 1 and not is_split:
        return "the step has no micro-batches"
    return None


def _refuse_all(impossible: Mapping[Plan, str], rows: int, num_ipus: int) -> None:
    """Raise the error of axes without a plan, with the nearest that works."""
    hint = None
    fewest_ipus = min((plan.num_ipus for plan in impossible), default=0)
    fitting = [plan for plan in impossible if plan.num_ipus <= num_ipus]
    products = sorted({plan.data * plan.micro_batches for plan in fitting})
    if fewest_ipus > num_ipus:
        hint = (
            f"data × shards × stages of at most {num_ipus}, or device=ipu.IPUModel(num_ipus={_ceil_power(fewest_ipus)})"
        )
    elif products and all(rows % n for n in products):
        divisors = [n for n in range(1, rows + 1) if rows % n == 0]
        closest = min(divisors, key=lambda n: min(abs(n - each) for each in products))
        batch = -(-rows // products[0]) * products[0]
        hint = f"data × micro_batches of {closest}, or a batch of {batch:,} rows"
    elif all(plan.micro_batches == 1 < plan.stages for plan in fitting):
        hint = "micro_batches of 2 or more"
    raise ArgumentError(
        "no combination of the axes of ipu.search is possible",
        expected="axes whose IPUs the device has, and whose parts divide the batch",
        got="; ".join(sorted(set(impossible.values()))) or None,
        hint=hint,
    )


def _ceil_power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _savings(axes: Mapping[str, tuple[Any, ...]], state: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield fields of plans that need less memory: the least costly first."""
    shards = axes.get("shard_state", (False, True) if state else (False,))
    offloads = axes.get("offload", ((), tuple(state)) if state else ((),))
    recompute = axes.get("recompute", ("none", "auto"))
    for mode, offload, shard in product(recompute, offloads, shards):
        yield {"recompute": mode, "offload": tuple(offload), "shard_state": shard}


def _model_specs(
    traced: TracedStep, is_batch: Sequence[bool], used: Sequence[bool], split: SplitStep, target: Target
) -> dict[str, PartitionSpec]:
    """Split of all large parameters over two IPUs that takes least estimated cycles, by path."""
    jaxpr = split.micro_batch
    first = 1 + len(traced.constants)
    sizes = [value_bytes(aval) for aval in traced.avals]
    parameters = [n for n, (flag, is_read) in enumerate(zip(is_batch, used, strict=True)) if is_read and not flag]
    # Splitting a small array saves no memory and may cost a collective.
    min_bytes = _SMALL_SHARE * sum(sizes[n] for n in parameters)
    large = sorted((n for n in parameters if sizes[n] >= min_bytes), key=lambda n: -sizes[n])
    # Two shards stand for all numbers: a dimension that two divide is most often a power of two.
    mesh = AbstractMesh((2,), (MODEL,), (AxisType.Auto,))
    # Cycles alone decide: all large arguments are split, and more shards need less memory than two.
    machine = target.replace(num_ipus=2, bytes_per_tile=_ANY_BYTES)
    search = ShardingSearch(jaxpr, mesh, machine, {})
    start = [PartitionSpec()] * len(jaxpr.in_avals)
    shapes = {first + n: traced.avals[n].shape for n in large if prod(traced.avals[n].shape) > 1}
    chosen = search.all_split(start, shapes)
    return {traced.paths[n - first]: chosen[n] for n in shapes if any(chosen[n])}
