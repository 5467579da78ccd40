"""Variants of a function that `ipu.advise` compiles: other options, donation, pipelines and dtypes, by one table.

Input: a function of `ipu.jit`, and the shapes of its arguments. Output: `Variant`s.
Limits: pipelines inside a function of `jax.jit` that was traced before keep their settings; such a variant is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import prod
from typing import Any, cast

import jax
import numpy as np

from ipujax.device import IPUModel
from ipujax.jit import IpuFunction
from ipujax.lowering.jaxpr import PIPELINE, ValueRoles, equations, stage_name
from ipujax.lowering.schedules import SCHEDULE_NAMES
from ipujax.pipeline.changed_settings import PipelineChange, with_changed_pipelines
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.options import Options, Recompute
from ipujax.runtime.target import Arch, Target
from ipujax.runtime.tensor.roles import INPUTS

_DEFAULT = Options()
_MOST_OFFLOADED = 2  # arguments that are not donated, each tried by itself
_SMALL_SHARE = 0.03  # of a call: what takes less is no reason to change a program
ArrayType = tuple[tuple[int, ...], Any]  # shape and dtype
PipelineOf = tuple[int, str | None]  # number of micro-batches, name of the schedule if one is given


@dataclass(frozen=True, slots=True)
class Variant:
    """A function to compile, its change from the user's, and the number of calls for the whole batch.

    Args:
        change: what is changed, ready to paste where it is code.
        fun: the changed function.
        args: its arguments, or their shapes.
        times: calls for the whole batch.
        pipelines: micro-batches and schedule of the pipelines that its trace must have; None for other changes.
    """

    change: str
    fun: IpuFunction[Any, Any]
    args: Sequence[Any]
    times: int = 1
    pipelines: tuple[PipelineOf, ...] | None = None

    @property
    def is_changed(self) -> bool:
        """Whether the pipelines of its trace have the change: a function of `jax.jit` around them hides it."""
        return self.pipelines is None or self.pipelines == tuple(map(_settings_of, _pipelines(self.fun, self.args)))


def _settings_of(spec: Any) -> PipelineOf:
    return spec.micro_batches, None if spec.schedule is None else spec.schedule.name


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument that later calls may find on the device.

    Args:
        number: its position.
        types: shapes and dtypes of its arrays.
        is_donated: whether any of them is.
    """

    number: int
    types: tuple[ArrayType, ...]
    is_donated: bool

    @property
    def num_bytes(self) -> int:
        """Size of its arrays; single elements stay on the tiles, and count as nothing."""
        sizes = (prod(shape) * dtype.itemsize for shape, dtype in self.types if prod(shape) > 1)
        return sum(sizes)


def kept_arguments(fun: IpuFunction[Any, Any], args: Sequence[Any], batch: Sequence[int] = ()) -> list[Argument]:
    """Return the arguments that calls may keep on the device or in streaming memory: all but batches and other inputs.

    Only a gradient tells weights from inputs: without one, all but `batch` are returned. Functions with static
    arguments have none.
    """
    traced = fun.trace(*args)
    infos, keywords = traced.args_info
    if keywords or len(infos) != len(args):
        return []
    jaxpr = traced.jaxpr.jaxpr
    roles = ValueRoles(jaxpr)
    operands = iter(jaxpr.invars)
    kept = []
    for number, info in enumerate(infos):
        leaves = jax.tree.leaves(info)
        variables = list(islice(operands, len(leaves)))
        is_input = all(roles.get(var) == INPUTS for var in variables)
        if leaves and not is_input and number not in {n % len(args) for n in batch}:
            is_donated = any(leaf.donated for leaf in leaves)
            kept.append(Argument(number, tuple(map(_type_of, leaves)), is_donated))
    return kept


def donating(fun: IpuFunction[Any, Any], args: Sequence[Any], kept: Sequence[Argument]) -> list[Variant]:
    """Return a variant that donates the arguments whose arrays all come back with their shapes; none without any.

    As in `jax.jit` each result takes the place of one array.
    """
    free = Counter(map(_type_of, jax.tree.leaves(fun.trace(*args).out_info)))
    free.subtract(kind for argument in kept if argument.is_donated for kind in argument.types)
    donated = []
    for argument in kept:
        needed = Counter(argument.types)
        if not argument.is_donated and needed <= free:
            free -= needed
            donated.append(argument.number)
    if not donated:
        return []
    numbers = tuple(sorted((*fun.donated_positions(args), *donated)))
    changed = fun.with_options(fitting(fun.options), donate_argnums=numbers)
    return [Variant(f"donate_argnums={numbers}", changed, args)]


def _type_of(array: Any) -> ArrayType:
    return tuple(array.shape), array.dtype


def offloading(
    fun: IpuFunction[Any, Any], args: Sequence[Any], kept: Sequence[Argument], cycles: int | None = None
) -> list[Variant]:
    """Return variants with more arguments in streaming memory: the donated ones, and each of the largest others.

    Of the donated ones the first, often the weights, stays on the tiles in one variant.

    Args:
        fun: the function.
        args: its arguments.
        kept: those of `kept_arguments`.
        cycles: of a call; arguments with transfers of a small share of it are left out. None if it does not fit.
    """
    if not args:
        return []
    donated = fun.donated_positions(args)
    # Only supersets of the present setting: a change must not bring arguments back to the chip.
    offloaded = {number % len(args) for number in fun.offload_argnums}
    others = [each for each in kept if not each.is_donated and each.number not in offloaded]
    others.sort(key=lambda each: -each.num_bytes)
    least_bytes = 1.0
    if cycles is not None:
        target = fun.target
        least_bytes = _SMALL_SHARE * cycles / target.clock_hz * target.host_bytes_per_second
    large = [each.number for each in others[:_MOST_OFFLOADED] if each.num_bytes >= least_bytes]
    additions = [donated[1:], donated, *((number,) for number in large)]
    sets = dict.fromkeys(tuple(sorted({*offloaded, *numbers})) for numbers in additions)
    return [
        Variant(f"offload_argnums={numbers}", fun.with_options(fitting(fun.options), offload_argnums=numbers), args)
        for numbers in sets
        if offloaded < set(numbers)
    ]


def has_gradient(fun: IpuFunction[Any, Any], args: Sequence[Any]) -> bool:
    """Return whether a function takes a gradient, for which values may be computed again."""
    return any(stage_name(eqn).is_backward for eqn in equations(fun.trace(*args).jaxpr.jaxpr))


def _pipelines(fun: IpuFunction[Any, Any], args: Sequence[Any]) -> list[Any]:
    """Return the specifications of the pipelines of a function."""
    functions_found = equations(fun.trace(*args).jaxpr.jaxpr)
    return [eqn.params["spec"] for eqn in functions_found if eqn.primitive.name == PIPELINE]


def with_more_ipus(fun: IpuFunction[Any, Any], args: Sequence[Any]) -> list[Variant]:
    """Return a variant with twice the IPUs, if a pipeline has automatic stages."""
    if not any(spec.stages == "auto" for spec in _pipelines(fun, args)):
        return []
    target = fun.target
    device = IPUModel(2 * target.num_ipus, cast(Arch, target.name), **target.changes())
    return [Variant(f"device={_device_as_code(target)}", fun.with_options(fitting(fun.options), device=device), args)]


def repipelined(fun: IpuFunction[Any, Any], args: Sequence[Any]) -> list[Variant]:
    """Return variants with other schedules, and with twice and half as many micro-batches of the same batch."""
    present = tuple(map(_settings_of, _pipelines(fun, args)))
    if not present or fun.target.num_ipus == 1:
        return []
    changes: dict[str, tuple[PipelineChange, tuple[PipelineOf, ...]]] = {
        f'schedule="{name}"': (PipelineChange(name), tuple((count, name) for count, _ in present))
        for name in SCHEDULE_NAMES
        if name not in {schedule for _, schedule in present} and name != "sequential"
    }
    # Both directions: twice the micro-batches shorten the bubble, half of them have larger products.
    for change in (PipelineChange(None, 2, 1), PipelineChange(None, 1, 2)):
        pipelines = tuple((change.micro_batches_of(count), schedule) for count, schedule in present)
        counts = dict.fromkeys(str(count) for count, _ in pipelines)
        if pipelines != present:
            changes[f"micro_batches={', '.join(counts)}"] = change, pipelines
    return [
        Variant(
            f"{code} of ipu.pipeline",
            fun.with_options(fitting(fun.options), decorator=partial(with_changed_pipelines, change)),
            args,
            pipelines=pipelines,
        )
        for code, (change, pipelines) in changes.items()
    ]


def in_half_precision(fun: IpuFunction[Any, Any], args: Sequence[Any]) -> list[Variant]:
    """Return a variant with float16 arguments in the place of float32 ones; none without any."""
    halves = jax.tree.map(_as_half, list(args))
    if jax.tree.map(_is_single, list(args)) == jax.tree.map(_is_single, halves):
        return []
    return [Variant("float16 arguments in place of float32", fun.with_options(fitting(fun.options)), halves)]


def _is_single(x: Any) -> bool:
    return getattr(x, "dtype", None) == np.float32


def _as_half(x: Any) -> Any:
    if not _is_single(x):
        return x
    return jax.ShapeDtypeStruct(np.shape(x), np.float16, sharding=_sharding(x))


def _sharding(x: Any) -> Any:
    # A sharded argument stays sharded, else the variant would be another program.
    return x.sharding if isinstance(x, jax.ShapeDtypeStruct | jax.Array) else None


def padded(fun: IpuFunction[Any, Any], args: Sequence[Any]) -> list[Variant]:
    """Return a variant with rows that are padded to whole vectors."""
    options = replace(fitting(fun.options), pad_rows=True)
    return [Variant(as_code(options), fun.with_options(options), args)]


def _device_as_code(target: Target) -> str:
    changes = "".join(f", {name}={value!r}" for name, value in target.changes().items())
    return f'ipu.IPUModel(num_ipus={2 * target.num_ipus}, arch="{target.name}"{changes})'


def fitting(options: Options) -> Options:
    # A change that makes a program exceed its memory is no advice.
    return replace(options, allow_out_of_memory=False)


def recomputing(fun: IpuFunction[Any, Any], mode: Recompute) -> IpuFunction[Any, Any]:
    return fun.with_options(replace(fitting(fun.options), recompute=mode))


def as_code(options: Options) -> str:
    """Return code of the options: those that are not the default, the recomputation last."""
    values = {name: getattr(options, name) for name in Options.__slots__ if name != "recompute"}
    values["trip_counts"] = dict(options.trip_counts)
    arguments = [f"{name}={value!r}" for name, value in values.items() if value != getattr(_DEFAULT, name)]
    arguments.append(f'recompute="{options.recompute}"')
    return f"options=ipu.Options({', '.join(arguments)})"


def halved(args: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    """Return the arguments, those of the batch as shapes with half of their first axis."""
    halved: list[Any] = list(args)
    for number in numbers:
        if not -len(args) <= number < len(args):
            problem = "batch_argnums of ipu.advise names an argument that the call lacks"
            raise ArgumentError(problem, expected=f"positions of {len(args)} arguments", got=number)
        halved[number] = jax.tree.map(_half, args[number])
    return halved


def _half(x: Any) -> jax.ShapeDtypeStruct:
    shape = np.shape(x)
    if not shape or shape[0] % 2:
        problem = "the batch of ipu.advise must have an even size"
        raise ArgumentError(problem, expected="arrays with an even first axis", got=f"an array of shape {list(shape)}")
    return jax.ShapeDtypeStruct((shape[0] // 2, *shape[1:]), x.dtype, sharding=_sharding(x))
