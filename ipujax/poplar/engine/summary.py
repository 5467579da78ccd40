"""Poplar's names for the text and the files of a profile: options of its summary, and serialisation to JSON and CBOR.

Input: a `Profile` and options by Poplar's names, or the dicts of `Engine.get_graph_profile()`. Output: text, or files.
The texts themselves are `Profile.summary`'s.
Source: Poplar & PopLibs user guide, "Profiling" and "Profile summary output".
Limits: no breakdown of exchange instructions, as in Poplar itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from ipujax.runtime.errors import ArgumentError
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
