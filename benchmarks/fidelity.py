"""How close the simulated machine comes to published measurements: each case, measured, simulated, error and bar.

    python benchmarks/fidelity.py                  every case; about three minutes
    python benchmarks/fidelity.py tutorial7 blur   some of them

Prints docs/fidelity.md: `python benchmarks/fidelity.py > docs/fidelity.md`. Exits with 1 when a bar is missed. Cases
are in `fidelity_cases/`, one file a source; nothing is run but the compiler and the machine model.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from fidelity_cases.case import Family

CASES = ("peaks", "amp", "triad", "fused", "tutorial7", "blur", "gemm", "networks")
_HEAD = """# Fidelity: the simulated machine against published measurements

The output of `python benchmarks/fidelity.py`. An error above 0 says that the simulation takes more than was measured.
"Reference" and a section are explained in [machine.md](machine.md), as is what the model leaves out.
"""


def page(families: Sequence[Family]) -> str:
    """The page: which bars are met, then every family."""
    lines = ["| case | bars |", "| --- | --- |"]
    for family in families:
        missed = ", ".join(one.name for one in (*family.rows, *family.bars) if not one.is_met)
        lines.append(f"| {family.title} | {'missed: ' + missed if missed else 'all met'} |")
    return "\n".join([_HEAD, *lines, "", *(family.markdown() for family in families)])


def main() -> int:
    """Runs the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"some of {', '.join(CASES)}; all when none is named")
    names = parser.parse_args().cases or list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"no case is called {', '.join(unknown)}; known: {', '.join(CASES)}")
    families = [importlib.import_module(f"fidelity_cases.{name}").family() for name in names]
    sys.stdout.write(page(families))
    return 0 if all(family.is_met for family in families) else 1


if __name__ == "__main__":
    sys.exit(main())
