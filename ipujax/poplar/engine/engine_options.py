"""Options of an engine, and Poplar's names for the text and the files of its profile.

Those of a compiler that is not here are warned of.

Input: a dict of option names, and `IPUJAX_ENGINE_OPTIONS` or `POPLAR_ENGINE_OPTIONS`, a JSON object of the same names,
which overrides the program's. Output: `EngineOptions`. Values are of Python's types or text, "true", "4".
Source: Poplar & PopLibs user guide, "Profiling options" and "Environment variables"; `streams.` names are ours.

A profile has options of its summary, and is serialised to JSON and CBOR, as are the dicts of
`Engine.get_graph_profile()`. The texts themselves are `Profile.summary`'s.
Source: Poplar & PopLibs user guide, "Profiling" and "Profile summary output".
Limits: no breakdown of exchange instructions, as in Poplar itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from ipujax.arguments.poplar_options import read_options
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.logs import Log
from ipujax.runtime.profile import Where, wants_colours, write_cbor, write_json
from ipujax.runtime.report import Profile
from ipujax.runtime.target import nearest

# Poplar's options, and the arguments of `Profile.summary` they stand for.
_OPTIONS = {
    "colours": "colours",
    "showVarStorage": "show_var_storage",
    "showOptimizations": "show_optimizations",
    "showExecutionSteps": "show_execution_steps",
    "showPerIpuMemoryUsage": "show_per_ipu_memory_usage",
}


def print_summary(profile: Profile, stream: TextIO | None, options: Mapping[str, Any]) -> None:
    """Print the sections of a profile's summary that Poplar's options request, in colours on a terminal."""
    stream = sys.stdout if stream is None else stream
    arguments: dict[str, Any] = {_OPTIONS[name]: value for name, value in _checked(options).items()}
    is_terminal = bool(getattr(stream, "isatty", lambda: False)())
    arguments["colours"] = wants_colours(arguments.get("colours"), is_terminal=is_terminal)
    print(profile.summary(**arguments), file=stream, end="")


def _checked(options: Mapping[str, Any]) -> dict[str, bool]:
    """Return the switches of a profile summary; refuse unknown ones, and values other than true and false."""
    for name, value in options.items():
        if name not in _OPTIONS:
            expected = f"one of {', '.join(_OPTIONS)}"
            hint = nearest(name, _OPTIONS)
            raise ArgumentError(f"no summary option {name!r}", expected=expected, got=repr(name), hint=hint)
        if str(value).lower() not in ("true", "false"):
            raise ArgumentError(f"summary option {name}", expected='"true" or "false"', got=repr(value))
    return {name: str(value).lower() == "true" for name, value in options.items()}


def serialize_to_json(out: Where, profile: Mapping[str, Any], pretty_print: bool = False) -> None:
    """Write a graph or an execution profile as JSON.

    Args:
        out: a path, or a file open for text or bytes.
        profile: result of `Engine.get_graph_profile` or `Engine.get_execution_profile`.
        pretty_print: True to indent it.
    """
    write_json(dict(profile), out, pretty=pretty_print)


def serialize_to_cbor(out: Where, profile: Mapping[str, Any]) -> None:
    """Write a graph or an execution profile as CBOR.

    Args:
        out: a path, or a file open for bytes.
        profile: result of `Engine.get_graph_profile` or `Engine.get_execution_profile`.

    Raises:
        ProfileError: the extra `profile` is not installed.
    """
    write_cbor(dict(profile), out)


_LOG = Log("compile")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of one engine.

    Args:
        instrument: `debug.instrument`: record data-dependent control flow of every run, for the execution profile.
        allow_out_of_memory: `debug.allowOutOfMemory`: run programs that overflow tiles.
        exact_splits: `debug.exactSplits`: compute vertex by vertex, rounding as split; slower.
        prefetch_depth: `streams.prefetchDepth`: number of transfers to prefetch from callbacks; 0 for none.
        split_large_copies: `streams.splitLargeCopies`: split stream copies over the size limit.
    """

    instrument: bool = False
    allow_out_of_memory: bool = False
    exact_splits: bool = False
    prefetch_depth: int = 0
    split_large_copies: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, environment: Mapping[str, str] | None = None) -> EngineOptions:
        """Return the options of a program, overridden by those of the environment (by default that of the process)."""
        values, without_effect = read_options("engine", options, _FIELDS, environment=environment)
        if without_effect:
            _LOG.warning("engine options without effect here: %s", ", ".join(without_effect))
        return cls(**{_FIELDS[name]: value for name, value in values.items() if name in _FIELDS})


# For each option of Poplar that has an effect its field in `EngineOptions`.
_FIELDS = {
    "debug.instrument": "instrument",
    "debug.allowOutOfMemory": "allow_out_of_memory",
    "debug.exactSplits": "exact_splits",
    "streams.prefetchDepth": "prefetch_depth",
    "streams.splitLargeCopies": "split_large_copies",
}
