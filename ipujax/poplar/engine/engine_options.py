"""Options of an engine, from the program and from the environment; those of a compiler that is not here are warned of.

Input: a dict of option names, and `IPUJAX_ENGINE_OPTIONS`, a JSON object of the same names, which overrides the
program's. Output: `EngineOptions`. Values are of Python's types or text, "true", "4".
Source: Poplar & PopLibs user guide, "Profiling options" and "Environment variables"; `streams.` names are ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ipujax.arguments.poplar_options import read_options
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.logs import Log

_LOG = Log("compile")
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
        values, without_effect = read_options("engine", values_by_name, _FIELDS)
        if without_effect:
            _LOG.warning("engine options without effect here: %s", ", ".join(without_effect))
        return cls(**{_FIELDS[name]: value for name, value in values.items() if name in _FIELDS})


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


# For each option of Poplar that has an effect its field in `EngineOptions`.
_FIELDS = {
    "debug.instrument": "instrument",
    "debug.allowOutOfMemory": "allow_out_of_memory",
    "debug.exactSplits": "exact_splits",
    "streams.prefetchDepth": "prefetch_depth",
    "streams.splitLargeCopies": "split_large_copies",
}
