"""Options of an engine, from the program and from the environment; unknown names are refused.

Input: a dict of option names, and `IPUJAX_ENGINE_OPTIONS`, a JSON object of the same names, which overrides the
program's. Output: `EngineOptions`. Values are of Python's types or text, "true", "4".
Source: Poplar & PopLibs user guide, "Profiling options" and "Environment variables"; `streams.` names are ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.target import nearest

ENVIRONMENT = "IPUJAX_ENGINE_OPTIONS"


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
        if not isinstance(options, Mapping | None):
            raise ArgumentError(
                "engine options must be a dict", expected='{"debug.instrument": "true"}', got=repr(options)
            )
        values_by_name = dict(options or {}) | _from_environment(os.environ if environment is None else environment)
        values = {}
        for name, value in values_by_name.items():
            if name not in _PARSERS:
                expected = f"one of {', '.join(_PARSERS)}"
                hint = nearest(name, _PARSERS)
                raise ArgumentError(
                    f"no engine option is called {name!r}", expected=expected, got=repr(name), hint=hint
                )
            field, parse = _PARSERS[name]
            values[field] = parse(name, value)
        return cls(**values)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    text = environment.get(ENVIRONMENT, "")
    if not text:
        return {}
    expected = """a JSON object, such as '{"debug.instrument": "true"}'"""
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentError(f"{ENVIRONMENT} must be JSON: {error}", expected=expected, got=text) from error
    if not isinstance(options, dict):
        raise ArgumentError(f"{ENVIRONMENT} must be a JSON object", expected=expected, got=text)
    return options


def _flag(name: str, value: Any) -> bool:
    flags = {"true": True, "false": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in flags:
        return flags[value.lower()]
    raise ArgumentError(f"engine option {name} must be true or false", expected='"true" or "false"', got=repr(value))


def _count(name: str, value: Any) -> int:
    try:
        number = int(value) if not isinstance(value, (bool, float)) else -1
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        expected = "a whole number, at least 0"
        raise ArgumentError(f"engine option {name} must be a count", expected=expected, got=repr(value))
    return number


# For each option of Poplar its field in `EngineOptions`, and the parser of its value.
_PARSERS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "debug.instrument": ("instrument", _flag),
    "debug.allowOutOfMemory": ("allow_out_of_memory", _flag),
    "debug.exactSplits": ("exact_splits", _flag),
    "streams.prefetchDepth": ("prefetch_depth", _count),
    "streams.splitLargeCopies": ("split_large_copies", _flag),
}
