"""A program in the cache: figures of it, its profile, and its computation where that is not the traced function.

Input: a compiled program. Output: files of a `CacheDirectory`, each as soon as it is known:

    program    figures, and the engine's StableHLO unless XLA computes the function itself
    profile    a saved profile, when the profile is read first

Limits: a program that calls Python functions, is spread over instances or partitioned is not stored.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ipujax.caching.program_key import program_key
from ipujax.compiled_programs import bound_warnings
from ipujax.lowering.digests import NoDigestError
from ipujax.lowering.jax_compat import is_float0
from ipujax.lowering_plan import LoweringPlan
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.files import DamagedError, FileError, FileKind
from ipujax.runtime.files.kinds import Integer, List, Record, Text
from ipujax.runtime.logs import Log
from ipujax.stages import Compiled
from ipujax.storage import (
    COMPUTATION,
    PROGRAM,
    CacheDirectory,
    Computation,
    ExportError,
    NewFile,
    exported_computation,
    read_computation,
)

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile

_LOG = Log("cache")
_COMPUTATION = "computation"
_LEVEL = 1  # of compression: the profile of 4 layers has 0.17 MB, 0.12 at level 6 in three times the time
PROGRAM_FILE = FileKind(
    PROGRAM,
    {_COMPUTATION: replace(COMPUTATION, may_lack=True)},
    Record({"used_ipus": Integer(1), "warnings": List(Text())}),
)


@dataclass(frozen=True, slots=True)
class CallFigures:
    """Figures of a program for calls and warnings, without lowering it.

    Args:
        used_ipus: IPUs of the device that it uses.
        warnings: lines about memory bounds that it exceeds.
    """

    used_ipus: int
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
        return CallFigures(figures["used_ipus"], tuple(figures["warnings"]))

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
        """Return the data of the profile; None if it is not stored."""
        from ipujax.runtime.schema import DATA, PROFILE_FILE

        file = self._directory.read(self._key, PROFILE_FILE)
        if file is None:
            return None
        try:
            return file.data(DATA)
        except FileError as error:
            self._directory.discard(self._key, PROFILE_FILE, error)
            return None

    def put_program(self, compiled: Compiled) -> None:
        """Store the figures that are known when a program is compiled."""
        lowered = compiled.lowered
        if lowered.calls is not None or lowered.partitioning is not None or lowered.closes_over_host_arrays:
            return
        figures = CallFigures(lowered.num_used_ipus, bound_warnings(compiled.executable))
        sections: dict[str, bytes] = {}
        if not lowered.runs_apart(None):
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
        _LOG.info("%s is not cached: %s", plan.name, error)
        return None
    signature = plan.signature
    avals = tuple([x for x in each if not is_float0(x)] for each in (signature.in_avals, signature.out_avals))
    return ProgramEntry(directory, key, plan.name, avals)
