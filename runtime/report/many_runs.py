"""Several runs side by side: their figures as flat data, and a table of them with their layers.

Input: profiles. Output: `scalars`, a flat dict for any logger, and text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.profile import Figures
from ipujax.runtime.profile.text import size

_MOST_LAYERS = 20
_MOST_NAME = 40  # characters of the label of a run


def scalars(profile: Figures) -> dict[str, float]:
    """The figures of a run that a logger can plot, by name; cycles and seconds only where trip counts are known.

    Args:
        profile: of the run.

    Returns:
        "cycles", "seconds", "busy_cycles", "phases/…" in cycles of the limiting IPU, "memory/…" in bytes,
        "layers/…" in busy cycles with the layers inside left out, and "compile/…" as in `graph()`.
    """
    memory = profile.memory
    found: dict[str, float] = {
        "memory/max_tile_bytes": memory.max_tile_bytes,
        "memory/total_bytes": memory.total_bytes,
        "memory/streaming_bytes": profile.streaming_memory_bytes,
    }
    found |= {f"memory/{name}_bytes": int(layer.sum()) for name, layer in memory.by_category.items()}
    found |= {f"compile/{name}": value for name, value in profile.optimization_info.items()}
    try:
        found |= {"cycles": profile.cycles, "seconds": profile.seconds, "busy_cycles": profile.busy_cycles}
        found |= {f"phases/{name}": cycles for name, cycles in profile.phase_cycles.items()}
        found |= {f"layers/{layer}": cycles for layer, cycles in layer_cycles(profile).items()}
    except ProfileError:  # a loop runs as often as its data says
        return {name: float(value) for name, value in found.items()}
    return {name: float(value) for name, value in found.items()}


def layer_cycles(profile: Figures) -> Counter[str]:
    """Busy cycles of each layer, those of layers inside it left out; none of a profile that was saved without.

    Args:
        profile: of a run.
    """
    try:
        rows = profile.layers
    except ProfileError:
        return Counter()
    cycles = Counter[str]()
    for row in rows:
        cycles[row.layer] += row.cycles
    return cycles


def runs_table(profiles: Sequence[tuple[str, Figures]]) -> str:
    """Several profiles as a table, and the layers in which they differ.

    Args:
        profiles: each with its label.

    Raises:
        ProfileError: a loop whose trip count is unknown.
    """
    width = min(_MOST_NAME, max(len(label) for label, _ in profiles))
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
    lines, first = ["Runs:", "  " + "  ".join(head)], profiles[0][1].cycles
    for label, profile in profiles:
        shares = [f"{cycles / max(1, profile.cycles):>15.1%}" for cycles in profile.phase_cycles.values()]
        change = f"{profile.cycles / max(1, first) - 1:>+8.1%}"
        seconds = f"{sum(profile.optimization_info.values()):>9.2f} s"
        cells = [f"{label[:width]:<{width}}", f"{profile.cycles:>15,}", change, *shares]
        lines.append("  " + "  ".join([*cells, f"{size(profile.memory.max_tile_bytes):>12}", seconds]))
    return "\n".join([*lines, *_layers(profiles, width)])


def _layers(profiles: Sequence[tuple[str, Figures]], width: int) -> list[str]:
    """The layers in which runs differ, a column a run."""
    cycles = [layer_cycles(profile) for _, profile in profiles]
    spread = {
        layer: max(run[layer] for run in cycles) - min(run[layer] for run in cycles)
        for layer in dict.fromkeys(layer for run in cycles for layer in run)
    }
    differing = sorted((layer for layer in spread if spread[layer]), key=lambda layer: -spread[layer])[:_MOST_LAYERS]
    if not differing:
        return ["No layer differs."]
    rows = [f"  {'  '.join(f'{run[layer]:>15,}' for run in cycles)}  {layer}" for layer in differing]
    labels = "  ".join(f"{label[:15]:>15}" for label, _ in profiles)
    return ["Busy cycles of layers that differ:", f"  {labels}  layer", *rows]
