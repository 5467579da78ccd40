"""Simulated figures against published measurements: each case, measured, simulated, error and bar.

    python benchmarks/fidelity.py                  every case; about half an hour
    python benchmarks/fidelity.py tutorial7 blur   some of them
    python benchmarks/fidelity.py memory           programs that fit on hardware or do not, and our verdicts
    python benchmarks/fidelity.py --plot           docs/images/fidelity.svg of docs/fidelity.md; nothing is compiled

Prints docs/fidelity.md: `python benchmarks/fidelity.py > docs/fidelity.md`. Exits with 1 when a bar is missed. Cases
are in `fidelity_cases/`, one file a source; nothing is run but the compiler and the machine model. The errors
at an earlier commit are in `tests/data/fidelity_3bd7578.csv`, made by these cases with the modules of that commit.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from fidelity_cases.case import EARLIER, Family, Row

CASES = (
    "peaks",
    "amp",
    "triad",
    "fused",
    "tutorial7",
    "blur",
    "blur_scaling",
    "convolution",
    "gemm",
    "popsparse",
    "static_sparse",
    "networks",
)
ON_REQUEST = ("memory",)  # takes as long as all others: plans are tried until a program fits; not on the page
DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "fidelity.md"
PICTURE = DOCS / "images" / "fidelity.svg"
_HEAD = f"""# Fidelity: the simulated machine against published measurements

This page is the output of `python benchmarks/fidelity.py`. A positive error means that the simulated figure is larger
than the measured one. [machine.md](machine.md) explains references such as "reference A1", and lists the limits of the
model. The error at an earlier commit, {EARLIER}, at which rearranged operands had no cost, stands beside today's. The
90 % interval ([studies.md](studies.md#how-sure)) is that of the simulated figure where it is one of a run. In brackets
it is that of another program than the measured one, with another mapping of operands, or planned for more memory where
a plan fits: these rows are not counted as inside or outside.

![Predicted cycles against measured ones, and the error of every row; the grey band is ± 20 %](images/fidelity.svg)
"""


def page(families: Sequence[Family]) -> str:
    """The page: which bars are met, then every family."""
    lines = ["| case | bars |", "| --- | --- |"]
    for family in families:
        missed = ", ".join(figure.name for figure in (*family.rows, *family.bars) if not figure.is_met)
        lines.append(f"| {family.title} | {'missed: ' + missed if missed else 'all met'} |")
    return "\n".join([_HEAD, *lines, "", *_inside(families), "", *(family.markdown() for family in families)])


def _inside(families: Sequence[Family]) -> list[str]:
    """How many rows of measured programs are inside their intervals, and how wide these are, by family."""
    lines = ["| case | rows with an interval | inside | median half-width |", "| --- | ---: | ---: | ---: |"]
    of_all: list[Row] = []
    for family in families:
        rows = [row for row in family.rows if row.interval is not None and row.is_of_measured_program]
        if rows:
            lines.append(_inside_row(family.title, rows))
            of_all += rows
    return [*lines, _inside_row("**all**", of_all)] if of_all else []


def _inside_row(title: str, rows: Sequence[Row]) -> str:
    inside = sum(row.is_inside for row in rows)
    half_width = median((row.interval[-1] - row.interval[0]) / 2 for row in rows if row.interval is not None)
    return f"| {title} | {len(rows)} | {inside} ({inside / len(rows):.0%}) | {half_width:.0%} |"


def main() -> int:
    """Runs the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="case",
        help=f"some of {', '.join((*CASES, *ON_REQUEST))}; all but the last when none is named",
    )
    parser.add_argument("--plot", action="store_true", help="draw the picture of the page, and nothing else")
    args = parser.parse_args()
    if args.plot:
        if args.cases:
            parser.error("the picture is of the whole page: name no case with --plot")
        plot = importlib.import_module("fidelity_cases.plot")  # needs Matplotlib, the cases do not
        PICTURE.write_text(plot.picture(plot.points(PAGE.read_text(encoding="utf-8"))), encoding="utf-8")
        return 0
    names = args.cases or list(CASES)
    known = (*CASES, *ON_REQUEST)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no case is called {', '.join(unknown)}; known: {', '.join(known)}")
    families = [importlib.import_module(f"fidelity_cases.{name}").family() for name in names]
    sys.stdout.write(page(families))
    return 0 if all(family.is_met for family in families) else 1


if __name__ == "__main__":
    sys.exit(main())
