"""First lines of a page: the verdict, causes of cycles as a stacked bar, a bar of phases for each IPU, and remedies.

Input: `Figures`. Output: markup. Bars are elements of a width in percent, which need no script.
"""

from __future__ import annotations

from collections.abc import Mapping

from ipujax.runtime.causes import COMPUTATION
from ipujax.runtime.causes.removals import CAUSES
from ipujax.runtime.markup import Markup, join_markup, table, tag
from ipujax.runtime.page.charts import PHASE_COLOURS, legend
from ipujax.runtime.profile import Figures
from ipujax.runtime.profile.text import share
from ipujax.runtime.views import verdict

_MOST_IPUS = 16  # of which each has a bar
_NAMED_SHARE = 0.08  # of the width of a bar: a narrower part has no room for its name
# Okabe and Ito's palette, by family: host and memory, single tiles and dtypes, IPUs, exchange, tiles.
_COLOURS = (
    "#0072b2",
    "#56b4e9",
    "#7f9fb5",
    "#d55e00",
    "#e69f00",
    "#c77c02",
    "#8b5e00",
    "#cc79a7",
    "#8c5a78",
    "#b3b3b3",
)
_FURTHER_COLOURS = ("#aa4499", "#f0e442", "#b8ad00", "#999999", "#6a8f3c")
CAUSE_COLOURS = dict(zip(CAUSES, (*_COLOURS, *_FURTHER_COLOURS), strict=True)) | {COMPUTATION: "#009e73"}


def verdict_lines(profile: Figures) -> Markup:
    """Return the verdict of a profile: a sentence, bars, remedies and the table of causes.

    Raises:
        ProfileError: a trip count is data.
    """
    result = verdict(profile)
    total = max(1, profile.cycles)
    pairs = zip(result.causes, result.remedies, strict=True)
    remedies = tag("ul", *(tag("li", tag("b", cause.name), f": {remedy}") for cause, remedy in pairs))
    rows = [
        (
            *(row.name, row.cycles, share(row.cycles, total), row.alone_cycles, row.least_cycles),
            str(row.origin) if row.origin.line else "",
        )
        for row in profile.causes
    ]
    head = ("Cause", "Cycles behind those before it", "Share", "Cycles alone", "Of any plan", "Most of them at")
    causes = tag("details", tag("summary", "All causes"), table(head, rows, "Cycles that vanish without each cause"))
    tries = tag("div", tag("p", "What to try, not tried yet (ipu.advise compiles some):"), remedies, class_="ways")
    return tag(
        "div",
        tag("p", result.sentence, class_="verdict"),
        tag("p", result.bound),
        _cause_bar(profile),
        _ipu_bars(profile),
        tries if result.causes else "",
        causes,
    )


def _cause_bar(profile: Figures) -> Markup:
    """Return the waterfall as parts of one bar; a cause that makes a run shorter has none."""
    cycles = {row.name: row.cycles for row in profile.causes if row.cycles > 0}
    return join_markup([_stacked("Cycles by cause", cycles, CAUSE_COLOURS), legend(_used(CAUSE_COLOURS, cycles))])


def _ipu_bars(profile: Figures) -> Markup:
    """Return a bar of phases for each of the first IPUs."""
    ipus = profile.ipu_phase_cycles
    if len(ipus) == 1:
        return Markup()
    bars = [_stacked(f"IPU {number}", phases, PHASE_COLOURS) for number, phases in enumerate(ipus[:_MOST_IPUS])]
    note = tag("p", f"and {len(ipus) - _MOST_IPUS} more IPUs", class_="hint") if len(ipus) > _MOST_IPUS else ""
    return join_markup([*bars, note, legend(PHASE_COLOURS)])


def _stacked(label: str, cycles: Mapping[str, int], colours: Mapping[str, str]) -> Markup:
    total = max(1, sum(cycles.values()))
    parts = []
    for name, part in cycles.items():
        if part > 0:
            text = f"{name.replace('_', ' ')}: {part:,} cycles, {share(part, total).strip()}"
            shown = name.replace("_", " ") if part / total >= _NAMED_SHARE else ""
            style = f"width:{100 * part / total:.2f}%;background:{colours[name]}"
            parts.append(tag("span", shown, style=style, title=text))
    described = f"{label}: " + ", ".join(f"{name.replace('_', ' ')} {part:,}" for name, part in cycles.items())
    bar = tag("div", *parts, class_="stacked")
    return tag("div", tag("span", label), bar, class_="stack", role="img", aria_label=described)


def _used(colours: Mapping[str, str], cycles: Mapping[str, int]) -> dict[str, str]:
    return {name: colour for name, colour in colours.items() if name in cycles}
