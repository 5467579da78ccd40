"""A recorded function, compiled for an IPU from its trace: none of the script's code runs again.

Input: a record. Output: `Compiled`, whose profile is static; a loop that depends on data is run once on the recorded
arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, Mesh

from ipujax.arguments import FunctionName
from ipujax.caching import find_or_lower
from ipujax.calls import CallArguments, Traced, check_jaxpr
from ipujax.device import IPUModel
from ipujax.jax_scripts.batch_split import BatchSplit
from ipujax.jax_scripts.recorder import FunctionRecord
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.partition import tracing_without_mesh
from ipujax.lowering_plan import LoweringPlan, ProgramSettings
from ipujax.runtime.errors import IpuError, ProfileError, line_of
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.logs import Log
from ipujax.runtime.options import Options
from ipujax.runtime.target import Target

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile

_LOG = Log("profiling")
# One plan, whether it fits or not: a search for one that does would take several times as long as the script.
OPTIONS = Options(allow_out_of_memory=True)
_WIDE = frozenset(("float64", "int64", "uint64", "complex128"))  # dtypes that JAX has with `jax_enable_x64` alone


class CompilationFailedError(IpuError):
    """A recorded function that cannot be compiled, for a reason that no error for users names."""


def profile_of(record: FunctionRecord, device: IPUModel, split: BatchSplit | None = None) -> Profile:
    """Return the profile of one call of a recorded function.

    Args:
        record: the function.
        device: device to compile for.
        split: split of its batch, if it has no shardings; None for one replica.

    Raises:
        IpuError: the function cannot be compiled for the device.
    """
    traced = record.traced
    assert traced is not None
    with collecting_rarely(), tracing_without_mesh(), _plain_settings(record):
        with _step("its lowering", record):
            if split is not None and split.replicas > 1 and record.shardings.is_empty:
                record = replace(record, shardings=split.shardings(record))
            target = _target_with_mesh(device.target, record)
            name = FunctionName(record.name, device, None, record.name.file)
            check_jaxpr(name, traced.jaxpr, None)
            settings = ProgramSettings(name, record.line, target, OPTIONS)
            lowered = find_or_lower(LoweringPlan.of(settings, _traced(record, traced)))
        with _step("its compilation", record):
            compiled = lowered.compile()
    with _step("its profile", record):
        profile: Profile = compiled.profile
        is_complete = record.sample is None or _has_cycles(profile)
    if is_complete:
        return profile
    assert record.sample is not None
    args, kwargs = record.sample
    with _step("its run on the arguments of the first call, for the trip counts of its loops,", record):
        _, profile = compiled.profile_call(*args, **kwargs)
    return profile


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


def _traced(record: FunctionRecord, traced: jax.stages.Traced) -> Traced:
    """Return a trace of JAX as one of `ipu.jit`, which the plan lowers."""
    info = traced.args_info
    donated = tuple(bool(leaf.donated) for leaf in jax.tree.leaves(info))
    counts = (*(len(jax.tree.leaves(part)) for part in info[0]), len(jax.tree.leaves(info[1])))
    arguments = CallArguments(traced.in_tree, counts, donated)
    return Traced(traced, record.arguments, arguments, {}, lambda _: None, shardings=record.shardings)


def _target_with_mesh(target: Target, record: FunctionRecord) -> Target:
    """Return the target with an IPU for each device of the largest mesh of a function, if these are more."""
    assert record.traced is not None
    meshes: list[Any] = [record.shardings.mesh, *(s.mesh for s in record.shardings.inputs if s is not None)]
    for eqn in equations(record.traced.jaxpr.jaxpr):
        values = (x for value in eqn.params.values() for x in (value if isinstance(value, tuple) else (value,)))
        meshes += [getattr(value, "mesh", value) for value in values]
    sizes = [mesh.size for mesh in meshes if isinstance(mesh, Mesh | AbstractMesh) and not mesh.empty]
    most = max([target.num_ipus, *sizes])
    return target if most == target.num_ipus else target.replace(num_ipus=1 << (most - 1).bit_length())


@contextmanager
def _plain_settings(record: FunctionRecord) -> Iterator[None]:
    """Lower with JAX's own settings, whatever the script has set, but with 64-bit numbers where the trace has them."""
    assert record.traced is not None
    avals = [*record.traced.jaxpr.in_avals, *record.traced.jaxpr.out_avals]
    is_wide = any(str(getattr(aval, "dtype", "")) in _WIDE for aval in avals)
    with (
        jax.enable_x64(is_wide or jax.config.jax_enable_x64),  # type: ignore[attr-defined]
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.check_tracer_leaks(False),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
    ):
        yield


def _has_cycles(profile: Profile) -> bool:
    try:
        return profile.cycles >= 0
    except ProfileError:  # a trip count is data
        return False
