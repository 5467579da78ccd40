"""Flame graphs for https://www.speedscope.app: cycles and bytes by layer, part and operation; and tables as CSV.

Input: `Figures`. Output: data of speedscope's file format; names of tables and their texts.
Source: speedscope, "file-format-schema": sampled profiles, each sample a stack of frames.
Limits: bytes are those of the variables that are live at the peak of all tiles together.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from ipujax.runtime.profile import Figures
from ipujax.runtime.profile.step_costs import StepCost

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_OUTSIDE = "(no layer)"


def speedscope(profile: Figures) -> dict[str, Any]:
    """Return two flame graphs, of cycles and of bytes at the peak.

    Raises:
        ProfileError: a trip count is data.
    """
    rows = profile.step_costs
    frames: dict[tuple[str, str], int] = {}
    stacks = [[frames.setdefault(frame, len(frames)) for frame in _stack(row)] for row in rows]
    graphs = [
        _flame_graph("cycles of all IPUs", "none", stacks, [row.cycles for row in rows]),
        _flame_graph("bytes at the peak", "bytes", stacks, [row.peak_bytes for row in rows]),
    ]
    named = [{"name": name, **({"file": line} if line else {})} for name, line in frames]
    shared = {"frames": named}
    return {"$schema": _SCHEMA, "name": profile.title, "exporter": "ipujax", "shared": shared, "profiles": graphs}


def _stack(row: StepCost) -> list[tuple[str, str]]:
    """Return the frames of an operation, outermost first, each with its line of source."""
    layers = row.origin.layer.split("/") if row.origin.layer else [_OUTSIDE]
    parts = [row.origin.part] if row.origin.part else []
    return [*((name, "") for name in (*layers, *parts)), (row.name, str(row.origin))]


def _flame_graph(name: str, unit: str, stacks: Sequence[list[int]], weights: Sequence[int]) -> dict[str, Any]:
    """Return stacks of frame numbers with their weights as a sampled profile of speedscope; those of 0 are left out."""
    weighted = [(stack, weight) for stack, weight in zip(stacks, weights, strict=True) if weight]
    return {
        "type": "sampled",
        "name": name,
        "unit": unit,
        "startValue": 0,
        "endValue": sum(weight for _, weight in weighted),
        "samples": [stack for stack, _ in weighted],
        "weights": [weight for _, weight in weighted],
    }


# Tables of a profile by name: rows of one dataclass.
_TABLES: dict[str, Callable[[Figures], Sequence[Any]]] = {
    "operations": lambda profile: profile.step_costs,
    "lines": lambda profile: profile.operations(),
    "layers": lambda profile: profile.layers,
    "stages": lambda profile: profile.stages,
    "causes": lambda profile: profile.causes,
    "advice": lambda profile: profile.advice,
    "fallbacks": lambda profile: profile.fallbacks,
    "emulated": lambda profile: profile.emulated,
    "slow_paths": lambda profile: profile.slow_paths,
    "attempts": lambda profile: profile.attempts,
}


def tables_as_csv(profile: Figures) -> dict[str, str]:
    """Return the tables that have rows, as comma-separated values with a head; a dict is a column for each name.

    Raises:
        ProfileError: a trip count is data.
    """
    tables = {name: rows_of(profile) for name, rows_of in _TABLES.items()}
    return {name: _as_csv(rows) for name, rows in tables.items() if rows}


def _as_csv(rows: Sequence[Any]) -> str:
    flat = [_columns(row) for row in rows]
    head = list(dict.fromkeys(name for row in flat for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, head, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue()


def _columns(row: Any) -> dict[str, Any]:
    """Return the fields of a row as columns: a dict is one for each key, an origin its line, layer and part."""
    columns: dict[str, Any] = {}
    for each in fields(row):
        value = getattr(row, each.name)
        if isinstance(value, dict):
            columns |= {f"{each.name}.{name}": item for name, item in value.items()}
        elif each.name == "origin":
            columns |= {"line": str(value), "layer": value.layer, "part": value.part}
        else:
            columns[each.name] = str(value) if is_dataclass(value) else value
    return columns
