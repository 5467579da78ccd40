"""A recorded function, compiled for an IPU from its trace: none of the script's code runs again.

Input: a record. Output: `CallProfiles`. The profile is static, but for loops and branches that depend on data: the
function is run once more on the samples of its arguments, for what these took.

Over several replicas the batch is split, all else is whole on each. A script that knows of one device does not say
which arguments are a batch. State has a result of its own shape and dtype (weights, the optimiser's state); a batch has
none, and its arrays have equally many rows. Shardings of these rows over one IPU for each replica let the pass
`partition` add the sums over the batch, so results stay the script's.
Limits: where more than one number of rows remains, the batch is unknown, and `batch_size` has to name it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ipujax.arguments import FunctionName
from ipujax.caching import find_or_lower
from ipujax.calls import CallArguments, Traced, check_jaxpr
from ipujax.device import IPUModel
from ipujax.jax_scripts.recorder import FunctionRecord
from ipujax.jax_scripts.running_again import MOST_DECISIONS, least_decisions, profiles_of_calls, silent
from ipujax.lowering.jax_compat import ClosedJaxpr, argument_names
from ipujax.lowering.jaxpr import equations, has_64_bit_values
from ipujax.lowering.partition import tracing_without_mesh
from ipujax.lowering_plan import LoweringPlan, ProgramSettings
from ipujax.runtime.errors import ArgumentError, IpuError, ProfileError, line_of
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.graph import Decision, Program, while_names
from ipujax.runtime.logs import Log
from ipujax.runtime.options import Options
from ipujax.runtime.target import Target
from ipujax.sharding import CallShardings

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile
    from ipujax.stages import Compiled, Lowered

_AXIS = "replica"


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """Number of replicas, and of rows of a batch.

    Args:
        replicas: number of replicas.
        batch_size: rows of a batch; None for those of all arguments that are no state, if they are equally many.
    """

    replicas: int
    batch_size: int | None = None

    def shardings(self, record: FunctionRecord) -> CallShardings:
        """Return the shardings of a function.

        Raises:
            ArgumentError: a batch that is unknown, or that the replicas do not divide.
        """
        assert record.jaxpr is not None
        inputs = record.jaxpr.in_avals
        results = tuple(record.jaxpr.out_avals)
        states = set(map(_type_of, results))
        rows = sorted({x.shape[0] for x in inputs if _has_rows(x) and _type_of(x) not in states})
        size = self.batch_size
        if size is None and len(rows) == 1:
            (size,) = rows
        if size is None or size not in rows:
            raise ArgumentError(
                f"the batch is not known: arguments that are no state have {', '.join(map(str, rows)) or 'no'} rows",
                expected="one number of rows",
                got=f"replicas={self.replicas}, batch_size={self.batch_size}",
                hint="batch_size=, --batch-size",
            )
        if size % self.replicas:
            raise ArgumentError(
                f"{self.replicas} replicas do not divide a batch of {size} rows",
                expected="a divisor",
                got=self.replicas,
            )
        mesh = AbstractMesh((self.replicas,), (_AXIS,), axis_types=(AxisType.Auto,))
        split = NamedSharding(mesh, PartitionSpec(_AXIS))
        whole = NamedSharding(mesh, PartitionSpec())
        state = states & set(map(_type_of, inputs))

        def is_batch(x: Any) -> bool:
            return _has_rows(x) and x.shape[0] == size and _type_of(x) not in state

        return CallShardings(
            tuple(split if is_batch(x) else None for x in inputs),
            tuple(split if is_batch(x) else whole for x in results),
        )

    def __str__(self) -> str:
        rows = "the batch" if self.batch_size is None else f"a batch of {self.batch_size} rows"
        return f"{rows} split over {self.replicas} replicas"


def _type_of(x: Any) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype


def _has_rows(x: Any) -> bool:
    return len(x.shape) > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


_LOG = Log("profiling")
_TOO_MANY = f"a call decides more than {MOST_DECISIONS:,} times"


class CompilationFailedError(IpuError):
    """A recorded function that cannot be compiled, for a reason that no error for users names."""


@dataclass(frozen=True, slots=True, eq=False)
class CallProfiles:
    """Profiles of the calls of a function.

    Args:
        profile: profile of a call: of the calls that were run again that with most cycles in all its calls.
        total_cycles: cycles of all calls; None if they are unknown.
        worst_cycles: cycles of a call with the dearest branches; None if there are none, or if a trip count is data.
        sampled_calls: number of calls whose own cycles are counted, the others as their mean; None for a function whose
            calls take equally long.
        unrecorded: reason for which no call was run again, so that `profile` and `total_cycles` have the dearest
            branches, and trip counts stay unknown; "" for a function without, and for recorded calls.
        used_trip_counts: names of loops whose trip counts the options have.
    """

    profile: Profile
    total_cycles: int | None
    worst_cycles: int | None = None
    sampled_calls: int | None = None
    unrecorded: str = ""
    used_trip_counts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _FlatTrace:
    """A jaxpr with what `Traced` reads of a trace of JAX; arguments and results are flat."""

    jaxpr: ClosedJaxpr
    fun_name: str

    @property
    def out_info(self) -> tuple[Any, ...]:
        return tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self.jaxpr.out_avals)

    @property
    def out_tree(self) -> Any:
        return jax.tree.structure((0,) * len(self.jaxpr.out_avals))


def profiles_of(
    record: FunctionRecord, device: IPUModel, options: Options, split: BatchSplit | None = None
) -> CallProfiles:
    """Return the profiles of the calls of a recorded function.

    Args:
        record: the function.
        device: device to compile for.
        options: options of the compiler; trip counts of loops that the function lacks are left out.
        split: split of its batch, if it has no shardings; None for one replica.

    Raises:
        IpuError: the function cannot be compiled for the device.
    """
    jaxpr = record.jaxpr
    assert jaxpr is not None
    with collecting_rarely(), tracing_without_mesh(), _plain_settings(jaxpr):
        with _step("its lowering", record):
            if split is not None and split.replicas > 1 and record.shardings.is_empty:
                record = replace(record, shardings=split.shardings(record))
            if record.samples is not None:
                record = replace(record, jaxpr=silent(jaxpr))
            target = _target_with_mesh(device.target, record)
        compiled = _compiled(record, device, target, replace(options, trip_counts={}))
        loops = {name for names in while_names(compiled.executable.program).values() for name in names}
        trip_counts = {name: count for name, count in options.trip_counts.items() if name in loops}
        if trip_counts:
            compiled = _compiled(record, device, target, replace(options, trip_counts=trip_counts))
        with _step("its profile", record):
            profile: Profile = compiled.profile
            cycles = _cycles_of(profile)
            depends_on_data = _has_decisions(compiled.executable.program)
        total = None if cycles is None else record.calls * cycles
        static = CallProfiles(profile, total, used_trip_counts=frozenset(trip_counts))
        if not depends_on_data:
            return static
        if trip_counts:
            return replace(static, unrecorded="its trip counts are given")
        if record.samples is None:
            return replace(static, unrecorded="it changes Refs, or needs results of the host")
        try:
            with _step("its run on arguments of the script's calls", record):
                return _recorded(compiled, record, cycles) or replace(static, unrecorded=_TOO_MANY)
        except IpuError as error:  # as the script's own call may have failed
            return replace(static, unrecorded=error.what.partition("\n")[0])


def _compiled(record: FunctionRecord, device: IPUModel, target: Target, options: Options) -> Compiled:
    """Compile a recorded function from its trace; the error of a failure names the step."""
    assert record.jaxpr is not None
    with _step("its lowering", record):
        name = FunctionName(record.name, device, None, record.file)
        check_jaxpr(name, record.jaxpr, None)
        settings = ProgramSettings(name, record.line, target, options)
        lowered: Lowered = find_or_lower(LoweringPlan.of(settings, _traced(record)))
    with _step("its compilation", record):
        compiled = lowered.compile()
        assert compiled.executable is not None
        return compiled


def _recorded(compiled: Compiled, record: FunctionRecord, worst_cycles: int | None) -> CallProfiles | None:
    """Return the profiles of the calls that were sampled, by running these again; None if one decides too often."""
    assert record.jaxpr is not None and record.samples is not None
    if least_decisions(record.jaxpr.jaxpr) > MOST_DECISIONS:
        return None
    profiles = profiles_of_calls(compiled, record.samples.arguments)
    if not profiles:
        return None
    calls = record.samples.calls[: len(profiles)]
    cycles = [profile.cycles * count for profile, count in zip(profiles, calls, strict=True)]
    profile = profiles[cycles.index(max(cycles))]
    total = round(sum(cycles) * record.calls / sum(calls))
    return CallProfiles(profile, total, worst_cycles, sum(calls))


@contextmanager
def _step(name: str, record: FunctionRecord) -> Iterator[None]:
    """Give an exception of another kind than ours a sentence, with the step and the line where it failed."""
    try:
        yield
    except IpuError:
        raise
    except Exception as error:
        _LOG.error("%s failed for %s: %r", name, record.name, error)
        text = str(error).partition("\n")[0]
        fault = f"{type(error).__name__} ({text})" if text else type(error).__name__
        place = line_of(error) or record.line
        where = f" at {place}" if place else ""
        raise CompilationFailedError(f"{name} failed{where} with {fault}", where=place) from error


def _traced(record: FunctionRecord) -> Traced:
    """Return a record as a trace of `ipu.jit`, which the plan lowers."""
    assert record.jaxpr is not None
    names = tuple(argument_names(record.jaxpr))
    tree = jax.tree.structure(((0,) * len(names), {}))
    donated = record.donated or (False,) * len(names)
    arguments = CallArguments(tree, (1,) * len(names) + (0,), donated)
    trace: Any = _FlatTrace(record.jaxpr, record.name)
    return Traced(trace, names, arguments, {}, lambda _: None, shardings=record.shardings)


def _target_with_mesh(target: Target, record: FunctionRecord) -> Target:
    """Return the target with an IPU for each device of the largest mesh of a function, if these are more."""
    assert record.jaxpr is not None
    meshes: list[Any] = [record.shardings.mesh, *(s.mesh for s in record.shardings.inputs if s is not None)]
    for eqn in equations(record.jaxpr.jaxpr):
        values = (x for value in eqn.params.values() for x in (value if isinstance(value, tuple) else (value,)))
        meshes += [getattr(value, "mesh", value) for value in values]
    sizes = [mesh.size for mesh in meshes if isinstance(mesh, Mesh | AbstractMesh) and not mesh.empty]
    num_ipus = max([target.num_ipus, *sizes])
    return target if num_ipus == target.num_ipus else target.replace(num_ipus=1 << (num_ipus - 1).bit_length())


@contextmanager
def _plain_settings(jaxpr: ClosedJaxpr) -> Iterator[None]:
    """Lower with JAX's own settings, whatever the script has set, but with 64-bit numbers where the trace has them."""
    with (
        jax.enable_x64(has_64_bit_values(jaxpr) or jax.config.jax_enable_x64),  # type: ignore[attr-defined]
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.check_tracer_leaks(False),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
    ):
        yield


def _cycles_of(profile: Profile) -> int | None:
    try:
        return profile.cycles
    except ProfileError:  # a trip count is data
        return None


def _has_decisions(program: Program) -> bool:
    """Return whether a program chooses by data: a loop or a branch on data is left after all passes."""
    return isinstance(program, Decision) or any(map(_has_decisions, program.children()))
