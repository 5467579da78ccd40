"""Cache of compiled programs on disk: a traced function is looked up by its key, and lowered only if it is not there.

LoweringPlan ── program_key ──▶ ProgramEntry ──▶ a hit: Lowered, of stored figures          a miss: Lowered, stored

An entry has files in a `CacheDirectory`, each written as soon as it is known. The computation is there where it is not
the traced function:

    program    figures, and the engine's StableHLO unless XLA computes the function itself
    profile    a saved profile, when the profile is read first

Its key is a digest of everything that its numbers and its profile depend on. They depend on nothing else only as long
as each part of the compiler reads these values alone; files of ipujax itself count by name, size and time, and by the
names that the program replaced in its modules.

A function whose program is in the cache is lowered only if its graph is read.

Limits: a program that calls Python functions, is spread over instances or partitioned is not stored.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ipujax.compiled_programs import compile_warnings
from ipujax.lowering.digests import NoDigestError, digest_of, jaxpr_digest
from ipujax.lowering.dumps import DumpRequest
from ipujax.lowering.jax_compat import is_float0
from ipujax.lowering.partition import tracing_without_mesh
from ipujax.lowering.refs import is_ref
from ipujax.lowering_plan import LoweringPlan, compilation_steps
from ipujax.lowering_plan.call_program import CallProgram
from ipujax.runtime.cache import set_basis
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.files import DamagedError, FileError, FileKind
from ipujax.runtime.files.kinds import Integer, List, Record, Text
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.logs import Log, step, watch_compilation
from ipujax.runtime.names_at_import import replaced_values
from ipujax.runtime.options import Options
from ipujax.stages import Compiled, Lowered
from ipujax.storage import (
    COMPUTATION,
    PROGRAM,
    CacheDirectory,
    Computation,
    ExportError,
    NewFile,
    exported_computation,
    read_computation,
    requested_directory,
)
from ipujax.storage.versions import compiler_state

if TYPE_CHECKING:
    from ipujax.lowering_plan.planned_program import PlannedProgram
    from ipujax.runtime.report import Profile

# Options without effect on numbers and profile.
_WITHOUT_EFFECT = frozenset({"progress", "cache_dir", "check"})


def program_key(plan: LoweringPlan) -> str:
    """Return the key of a program.

    Raises:
        NoDigestError: it has none; the text names the value that cannot be read.
    """
    signature = plan.signature
    settings = plan.settings
    shardings = plan.shardings
    values = shardings.of_values
    if settings.spread is not None:
        raise NoDigestError("its replicas are on several instances")
    if shardings.devices is not None or any(x is not None for x in (*values.inputs, *values.outputs)):
        raise NoDigestError("shardings partition it")
    if plan.refs or any(map(is_ref, signature.in_avals)):
        raise NoDigestError("it changes a Ref")
    request = DumpRequest.from_environment()
    if request.dots or request.kinds:
        raise NoDigestError("the environment asks for dumps of its compilation")
    return digest_of(
        compiler_state(),
        settings.target.to_data(),
        options_data(settings.options),
        (str(settings.name), settings.name.file, settings.line),
        (signature.donated, signature.offloaded, signature.used, signature.arguments, signature.leaf_names),
        tuple(plan.positions),
        jaxpr_digest(plan.jaxpr),
    )


def options_data(options: Options) -> dict[str, object]:
    """Return the options that numbers or profile depend on, by name."""
    names = (field.name for field in dataclasses.fields(options))
    return {name: getattr(options, name) for name in names if name not in _WITHOUT_EFFECT}


_LOG = Log("cache")
_COMPUTATION = "computation"
_LEVEL = 1  # of compression: the profile of 4 layers has 0.17 MB, 0.12 at level 6 in three times the time
PROGRAM_FILE = FileKind(
    PROGRAM,
    {_COMPUTATION: replace(COMPUTATION, may_lack=True)},
    Record({"used_ipus": Integer(1), "unused_options": List(Text()), "warnings": List(Text())}),
)


@dataclass(frozen=True, slots=True)
class CallFigures:
    """Figures of a program for calls and warnings, without lowering it.

    Args:
        used_ipus: IPUs of the device that it uses.
        unused_options: a line for each option without effect on it.
        warnings: lines about memory bounds that it exceeds.
    """

    used_ipus: int
    unused_options: tuple[str, ...]
    warnings: tuple[str, ...]


class ProgramEntry:
    """The files of one program.

    Args:
        directory: of the cache.
        key: key of the program.
        name: name of its function.
        avals: shapes and dtypes of the arrays that the program takes, and of those that it returns.
    """

    def __init__(self, directory: CacheDirectory, key: str, name: str, avals: tuple[list[Any], ...]) -> None:
        self._directory = directory
        self._key = key
        self._name = name
        self._avals = avals
        self._content: bytes | None = None  # of the computation

    def figures(self) -> CallFigures | None:
        """Return the figures of the program; None if it is not in the cache."""
        file = self._directory.read(self._key, PROGRAM_FILE)
        if file is None:
            return None
        figures = file.figures
        self._content = file.sections.get(_COMPUTATION)
        _LOG.info("%s is in the cache: %s", self._name, self._key)
        return CallFigures(figures["used_ipus"], tuple(figures["unused_options"]), tuple(figures["warnings"]))

    def computation(self) -> Computation | None:
        """Return the program as a function of the jaxpr's inputs; None if it is not stored, or damaged."""
        if self._content is None:
            return None
        try:
            computation = read_computation(self._content)
            for stored, traced in zip((computation.in_avals, computation.out_avals), self._avals, strict=True):
                if [(x.shape, x.dtype) for x in stored] != [(x.shape, x.dtype) for x in traced]:
                    raise DamagedError("it is of other arguments or results")
        except FileError as error:
            self._directory.discard(self._key, PROGRAM_FILE, error)
            return None
        return computation

    def profile(self) -> Any:
        """Return the data of the profile, with the source files as they are now; None if it is not stored."""
        from ipujax.runtime.schema import DATA, PROFILE_FILE
        from ipujax.runtime.sources import current_texts

        file = self._directory.read(self._key, PROFILE_FILE)
        if file is None:
            return None
        try:
            data = file.data(DATA)
            return data | {"sources": current_texts(data["sources"])}
        except FileError as error:
            self._directory.discard(self._key, PROFILE_FILE, error)
            return None

    def put_program(self, compiled: Compiled) -> None:
        """Store the figures that are known when a program is compiled."""
        lowered = compiled.lowered
        calls = lowered.call_program
        if calls.calls is not None or calls.partitioning is not None or calls.closes_over_host_arrays:
            return
        figures = CallFigures(calls.used_ipus, calls.unused_options, compile_warnings(compiled.executable))
        sections: dict[str, bytes] = {}
        if not calls.runs_apart(None):
            try:
                sections[_COMPUTATION] = exported_computation(lowered.run_program, self._name, self._avals[0])
            except ExportError as error:
                _LOG.info("%s: its computation is not stored: %s", self._name, error)
        self._directory.write(NewFile(PROGRAM_FILE, self._key, sections, asdict(figures)))

    def put_profile(self, profile: Profile) -> None:
        """Store a profile, when it is read first: all of its figures are computed for that."""
        from ipujax.runtime.report import profile_section
        from ipujax.runtime.schema import DATA, PROFILE_FILE

        try:
            section = profile_section(profile, _LEVEL)
        except ProfileError as error:  # a figure that no file can have, as one that is not finite
            _LOG.info("the profile of %s is not stored: %s", self._name, error)
            return
        self._directory.write(NewFile(PROFILE_FILE, self._key, {DATA: section}))


def entry_of(plan: LoweringPlan, directory: CacheDirectory) -> ProgramEntry | None:
    """Return the entry of a program in a cache; None without a key."""
    try:
        key = program_key(plan)
    except NoDigestError as error:
        _LOG.info("%s is not cached: %s", plan.settings.name, error)
        return None
    signature = plan.signature
    avals = tuple([x for x in each if not is_float0(x)] for each in (signature.in_avals, signature.out_avals))
    return ProgramEntry(directory, key, plan.settings.name, avals)


def find_or_lower(plan: LoweringPlan) -> Lowered:
    """Return the program of a plan from the cache of its options; without one, or if it is not there, lower it."""
    # Plans in memory were made by the passes, rules and planners of that time.
    set_basis(replaced_values())
    directory = requested_directory(plan.settings.options.cache_dir)
    entry = None
    if directory is not None:
        timings = dict(plan.timings)
        with step(_LOG, "cache", timings):
            entry = entry_of(plan, directory)
            figures = None if entry is None else entry.figures()
        if figures is not None:
            # Stored programs have results without Refs, and close over no arrays of the host.
            are_weak = tuple(aval.weak_type for aval in plan.jaxpr.out_avals)
            notes = figures.unused_options, figures.warnings
            stored = CallProgram(plan, figures.used_ipus, are_weak, (), None, None, timings, *notes, is_stored=True)
            return Lowered(plan, partial(_lowered_later, plan), entry, stored)
    # Imported here, as a program of the cache is called without the compiler.
    from ipujax.lowering_plan.planned_program import planned_program
    from ipujax.storage.stored_values import with_stored_values

    planned = with_stored_values(plan.settings.options.cache_dir, partial(planned_program, plan))
    return Lowered(plan, lambda: planned, entry)


def _lowered_later(plan: LoweringPlan) -> PlannedProgram:
    """Lower a program of the cache whose graph is read, as a compilation of its own."""
    from ipujax.lowering_plan.planned_program import planned_program
    from ipujax.storage.stored_values import with_stored_values

    settings = plan.settings
    spent_seconds = sum(plan.timings.values())
    watching = watch_compilation(settings.name, compilation_steps, settings.options.progress, spent_seconds)
    with collecting_rarely(), watching, tracing_without_mesh():
        return with_stored_values(settings.options.cache_dir, partial(planned_program, plan))
