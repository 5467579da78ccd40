"""Intermediate forms of a compilation as JSON: the jaxpr after each pass, the graph and the program.

    {"format": "ipujax ir", "version": 1, "function": "step", "passes": [{"name": "trace", "jaxpr": 0}, …],
     "jaxprs": see `jaxpr_json`, "graph": see `graph_json`, "failed": {"step": "fuse", "error": "TypeError: …"}}

"graph" is null where there is none yet, "failed" where nothing did. A pass that changes nothing names the jaxpr before.
Input: jaxprs by pass, a graph and a program. Output: a dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ipujax.lowering.dumps.graph_json import graph_json
from ipujax.lowering.dumps.jaxpr_json import JaxprList
from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.runtime.graph import Graph, Program

VERSION = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """The step that failed, and its error."""

    step: str
    error: BaseException


def intermediate_json(
    name: str,
    jaxprs: Mapping[str, ClosedJaxpr],
    lowered: tuple[Graph, Program] | None = None,
    failure: Failure | None = None,
) -> dict[str, Any]:
    """Return the forms of a function as JSON: the jaxpr after each pass, the graph, or the step that failed."""
    numbered = JaxprList()
    passes = [{"name": step, "jaxpr": numbered.number_of(jaxpr)} for step, jaxpr in jaxprs.items()]
    failed = None
    if failure is not None:
        failed = {"step": failure.step, "error": f"{type(failure.error).__name__}: {failure.error}"}
    return {
        "format": "ipujax ir",
        "version": VERSION,
        "function": name,
        "passes": passes,
        "jaxprs": numbered.json(),
        "graph": None if lowered is None else graph_json(*lowered),
        "failed": failed,
    }
