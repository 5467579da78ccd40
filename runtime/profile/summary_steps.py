"""The steps of a run as text, each with its times, balances and vertices.

Input: a `Profile`. Output: text. Source: Poplar & PopLibs user guide, "Profile summary output", `showExecutionSteps`.
Limits: as those of the execution profile: of a loop the first iteration, with the number of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.profile.ids import ComputeSetRow, Json

if TYPE_CHECKING:
    from ipujax.runtime.profile.profile import Profile


def execution_steps(profile: Profile) -> str:
    """All steps of a run, in order; nothing when its loops are not known."""
    try:
        steps = profile.execution()["simulation"]["steps"]
    except ProfileError:
        return ""  # which the section on execution says
    lines = ["Steps:"]
    for step in steps:
        if step["type"] == "Sync":
            lines.append(f"  --- {step['syncType']} Sync ---")
        else:
            lines.extend(_step(step, profile))
    return "\n".join(lines)


def _step(step: Json, profile: Profile) -> Iterator[str]:
    name = f": {step['name']}" if step.get("name") else ""
    repeats = f", {step['repeats']:,} times" if step["repeats"] > 1 else ""
    overlapped = f" ({step['cyclesOverlapped']:,} overlapped with previous)" if "cyclesOverlapped" in step else ""
    yield f"  {step['type']} (cycles {step['cyclesFrom']:,} - {step['cyclesTo']:,}{repeats}){name}"
    yield f"    Cycles:               {step['cycles']:,}{overlapped}"
    yield f"    Active Tiles:         {step['activeTiles']:,} / {profile.executable.target.num_tiles:,}"
    if "threadBalance" in step:
        yield f"    Thread Balance:       {step['threadBalance']:.1%}"
    yield f"    Tile Balance:         {step['tileBalance']:.1%}"
    yield f"    Active Tile Balance:  {step['activeTileBalance']:.1%}"
    if "totalData" in step:
        yield f"    Total Data:           {step['totalData']:,}"
        yield f"    Data Balance (mean / max data per tile): {step['dataBalance']:.1%}"
    if "computeSet" in step:
        yield from _vertices(profile.numbering.compute_sets[step["computeSet"]])


def _vertices(row: ComputeSetRow) -> Iterator[str]:
    """Instances and active cycles of each vertex type of one compute set."""
    if not row.vertices:
        return
    yield "    By vertex type:"
    width = max(map(len, row.vertices))
    for name, count in sorted(row.vertices.items(), key=lambda item: -row.active_by_type.get(item[0], 0)):
        yield f"      {name:<{width}}  ({count:,} instances):  {row.active_by_type.get(name, 0):>12,}"
