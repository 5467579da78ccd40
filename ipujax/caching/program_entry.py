"""A program in the cache: figures of it, its profile, and its computation where that is not the traced function.

Input: a compiled program. Output: files of a `CacheDirectory`, each as soon as it is known:

    program    figures, and the engine's StableHLO unless XLA computes the function itself
    profile    a saved profile, when the profile is read first

Limits: a program that calls Python functions, is spread over instances or partitioned is not stored.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ipujax.caching.program_key import program_key
from ipujax.compiled_programs import bound_warnings
from ipujax.lowering.digests import NoDigestError
from ipujax.lowering.jax_compat import is_float0
from ipujax.lowering_plan import LoweringPlan
from ipujax.runtime.logs import Log
from ipujax.stages import Compiled
from ipujax.storage import (
    PROFILE,
    PROGRAM,
    CacheDirectory,
    Computation,
    ExportError,
    Head,
    exported_computation,
    read_computation,
)

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile

_LOG = Log("cache")
# Sections of files.
_COMPUTATION = "computation"
_DATA = "profile"
_LEVEL = 1  # of compression: the profile of 4 layers has 0.6 MB, 0.35 at level 6 in three times the time


@dataclass(frozen=True, slots=True)
class CallFigures:
    """Figures of a program for calls and warnings, without lowering it.

    Args:
        computes_function: whether XLA computes the traced function, not the program.
        used_ipus: IPUs of the device that it uses.
        warnings: lines about memory bounds that it exceeds.
    """

    computes_function: bool
    used_ipus: int
    warnings: tuple[str, ...]

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> CallFigures:
        """Return the figures of a file."""
        return cls(bool(data["computes_function"]), int(data["used_ipus"]), tuple(map(str, data["warnings"])))


class ProgramEntry:
    """The files of one program.

    Args:
        directory: of the cache.
        key: key of the program.
        name: name of its function.
    """

    def __init__(self, directory: CacheDirectory, key: str, name: str) -> None:
        self._directory = directory
        self._key = key
        self._name = name
        self._content: bytes | None = None  # of the computation
        self._avals: Sequence[Any] = ()

    def figures(self) -> CallFigures | None:
        """Return the figures of the program; None if it is not in the cache."""
        file = self._directory.read(self._key, PROGRAM)
        if file is None:
            return None
        head, sections = file
        self._content = sections.get(_COMPUTATION)
        _LOG.info("%s is in the cache: %s", self._name, self._key)
        return CallFigures.of_data(head.figures)

    def computation(self) -> Computation | None:
        """Return the program as a function of the jaxpr's inputs; None if it is not stored."""
        return None if self._content is None else read_computation(self._content)

    def profile(self) -> Any:
        """Return the data of the profile; None if it is not stored."""
        file = self._directory.read(self._key, PROFILE)
        if file is None:
            return None
        # Neither its checksum nor its fields are checked again: the seal has done that, and versions are equal.
        return json.loads(gzip.decompress(file[1][_DATA]))

    def put_program(self, compiled: Compiled) -> None:
        """Store the figures that are known when a program is compiled."""
        lowered = compiled.lowered
        if lowered.calls is not None or lowered.partitioning is not None or lowered.closes_over_host_arrays:
            return
        figures = CallFigures(lowered.computes_function, lowered.num_used_ipus, bound_warnings(compiled.executable))
        sections: dict[str, bytes] = {}
        if not (figures.computes_function or lowered.runs_apart(None)):
            avals = [aval for aval in lowered.signature.in_avals if not is_float0(aval)]
            try:
                sections[_COMPUTATION] = exported_computation(lowered.run_program, avals)
            except ExportError as error:
                _LOG.info("%s: its computation is not stored: %s", self._name, error)
        self._directory.write((Head(PROGRAM, self._key, asdict(figures)), sections))

    def put_profile(self, profile: Profile) -> None:
        """Store a profile, when it is read first: all of its figures are computed for that."""
        from ipujax.runtime.profile.saved_figures import saved_data

        try:
            content = gzip.compress(json.dumps(saved_data(profile), allow_nan=False).encode(), _LEVEL, mtime=0)
        except ValueError as error:  # a figure that is not finite
            _LOG.info("the profile of %s is not stored: %s", self._name, error)
            return
        self._directory.write((Head(PROFILE, self._key), {_DATA: content}))


def entry_of(plan: LoweringPlan, directory: CacheDirectory) -> ProgramEntry | None:
    """Return the entry of a program in a cache; None without a key."""
    try:
        return ProgramEntry(directory, program_key(plan), plan.name)
    except NoDigestError as error:
        _LOG.info("%s is not cached: %s", plan.name, error)
        return None
