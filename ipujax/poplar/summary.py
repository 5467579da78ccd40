"""The profile summary with Poplar's options: execution steps, variable storage, memory of each IPU.

Input: a `Profile`. Output: text. Source: Poplar & PopLibs user guide, "Profile summary output".
Limits: no colours, no breakdown of exchange instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.profile import Profile
from ipujax.runtime.target import nearest


def profile_summary(profile: Profile, options: Mapping[str, Any]) -> str:
    """The summary of a profile, with the sections that options ask for.

    Raises:
        ArgumentError: an unknown option, or a value that is neither "true" nor "false".
    """
    sections = [profile.summary()]
    for name, value in options.items():
        if name not in _SECTIONS:
            hint = nearest(name, _SECTIONS)
            raise ArgumentError(f"no summary option {name!r}", expected=f"one of {', '.join(_SECTIONS)}", hint=hint)
        if str(value).lower() not in ("true", "false"):
            raise ArgumentError(f"summary option {name}", expected='"true" or "false"', got=repr(value))
    asked = [name for name in _SECTIONS if str(options.get(name, "false")).lower() == "true"]
    return "\n".join([*sections, *(_SECTIONS[name](profile) for name in asked)])


def _execution_steps(profile: Profile) -> str:
    lines = ["Steps:"]
    for step in profile.execution()["simulation"]["steps"]:
        if step["type"] == "Sync":
            lines.append(f"  --- {step['syncType']} Sync ---")
            continue
        repeats = f", {step['repeats']:,} times" if step["repeats"] > 1 else ""
        name = f": {step['name']}" if step.get("name") else ""
        lines.append(f"  {step['type']} (cycles {step['cyclesFrom']:,} - {step['cyclesTo']:,}{repeats}){name}")
        lines.append(f"    Cycles:               {step['cycles']:,}")
        lines.append(f"    Active Tiles:         {step['activeTiles']:,} / {_num_tiles(profile):,}")
        lines.append(f"    Tile Balance:         {step['tileBalance']:.1%}")
        lines.append(f"    Active Tile Balance:  {step['activeTileBalance']:.1%}")
        if "totalData" in step:
            lines.append(f"    Total Data:           {step['totalData']:,}")
    return "\n".join(lines) + "\n"


def _variable_storage(profile: Profile) -> str:
    memory = profile.memory
    lines = [f"Variable Storage Liveness: tile {memory.worst_tile}, fullest at {memory.peak_step}"]
    return "\n".join([*lines, *(f"  {item}" for item in memory.largest)]) + "\n"


def _per_ipu_memory(profile: Profile) -> str:
    lines = ["Memory by IPU:"]
    by_ipu = profile.memory.tile_bytes.reshape(profile.executable.target.num_ipus, -1)
    for number, tiles in enumerate(by_ipu):
        lines.append(f"  IPU {number}: {int(tiles.sum()):,} B in all, {int(tiles.max()):,} B on its fullest tile")
    return "\n".join(lines) + "\n"


def _num_tiles(profile: Profile) -> int:
    return profile.executable.target.num_tiles


_SECTIONS: dict[str, Callable[[Profile], str]] = {
    "showVarStorage": _variable_storage,
    "showPerIpuMemoryUsage": _per_ipu_memory,
    "showExecutionSteps": _execution_steps,
}
