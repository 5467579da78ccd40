"""Figures of a run as flat data, and a table of several runs with their layers.

Input: profiles. Output: `scalars`, a flat dict for any logger, and text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.profile import Figures
from ipujax.runtime.profile.text import size

_MAX_LAYERS = 20
_MAX_LABEL = 40  # characters of the label of a run


def scalars(profile: Figures) -> dict[str, float]:
    """Return figures by name for loggers of experiments; those in cycles only where trip counts are known."""
    memory = profile.memory
    figures: dict[str, float] = {
        "memory/max_tile_bytes": memory.max_tile_bytes,
        "memory/total_bytes": memory.total_bytes,
        "memory/streaming_bytes": profile.streaming_memory_bytes,
    }
    figures |= {f"memory/{name}_bytes": int(tile_bytes.sum()) for name, tile_bytes in memory.by_category.items()}
    figures |= {f"compile/{name}": seconds for name, seconds in profile.optimization_info.items()}
    figures["unpriced_operations"] = len(profile.unpriced)
    try:
        figures |= {"cycles": profile.cycles, "seconds": profile.seconds, "busy_cycles": profile.busy_cycles}
        figures |= {f"phases/{name}": cycles for name, cycles in profile.phase_cycles.items()}
        figures |= {f"layers/{layer}": cycles for layer, cycles in layer_cycles(profile).items()}
        figures |= {f"metrics/{name}": metric.total for name, metric in profile.metrics.items()}
    except ProfileError:
        pass  # a trip count is data: `profile.cycles`, the first to be read, raises before any figure is added
    return {name: float(value) for name, value in figures.items()}


def layer_cycles(profile: Figures) -> Counter[str]:
    """Count the busy cycles of each layer without those inside it."""
    cycles = Counter[str]()
    for row in profile.layers:  # one for each layer and part of training
        cycles[row.layer] += row.cycles
    return cycles


def runs_table(profiles: Sequence[tuple[str, Figures]]) -> str:
    """Return a table of profiles, and of the layers in which they differ.

    Args:
        profiles: (label, profile) of each run; changes are relative to the first.

    Raises:
        ProfileError: a loop whose trip count is unknown.
    """
    width = min(_MAX_LABEL, max(len(label) for label, _ in profiles))
    phases = list(profiles[0][1].phase_cycles)
    columns = [f"{phase.replace('_', ' '):>15}" for phase in phases]
    head = [
        f"{'run':<{width}}",
        f"{'cycles':>15}",
        f"{'change':>8}",
        *columns,
        f"{'fullest tile':>12}",
        f"{'compiled in':>11}",
    ]
    lines = ["Runs:", "  " + "  ".join(head)]
    first_cycles = profiles[0][1].cycles
    for label, profile in profiles:
        shares = [f"{cycles / max(1, profile.cycles):>15.1%}" for cycles in profile.phase_cycles.values()]
        change = f"{profile.cycles / max(1, first_cycles) - 1:>+8.1%}"
        seconds = f"{sum(profile.optimization_info.values()):>9.2f} s"
        cells = [f"{label[:width]:<{width}}", f"{profile.cycles:>15,}", change, *shares]
        lines.append("  " + "  ".join([*cells, f"{size(profile.memory.max_tile_bytes):>12}", seconds]))
    return "\n".join([*lines, *_list_layers(profiles)])


def _list_layers(profiles: Sequence[tuple[str, Figures]]) -> list[str]:
    """List the layers in which runs differ, with a column for each run."""
    cycles = [layer_cycles(profile) for _, profile in profiles]
    spread = {
        layer: max(run[layer] for run in cycles) - min(run[layer] for run in cycles)
        for layer in dict.fromkeys(layer for run in cycles for layer in run)
    }
    differing = sorted((layer for layer in spread if spread[layer]), key=lambda layer: -spread[layer])[:_MAX_LAYERS]
    if not differing:
        return ["No layer differs."]
    rows = [f"  {'  '.join(f'{run[layer]:>15,}' for run in cycles)}  {layer}" for layer in differing]
    labels = "  ".join(f"{label[:15]:>15}" for label, _ in profiles)
    return ["Busy cycles of layers that differ:", f"  {labels}  layer", *rows]
