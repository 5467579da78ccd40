"""Peak memory of steps in a process of its own: `ipu.jit` beside `jax.jit`, for every model.

    python benchmarks/step_memory.py
    python benchmarks/step_memory.py --only mlp --only gcn
    python benchmarks/step_memory.py --write docs/speed.md

Each compiler has a process of its own, as allocators keep memory that another measurement has freed. Figures are MiB of
the process (`VmHWM` of Linux) over its size after imports and a small compilation, the arguments included:

    first step    the peak until the first step has ended: tracing, lowering, XLA's compilation and one run
    warm steps    the peak of three steps after it, whose compiled computation and constants are there
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from hlo_diff import Case
from models import MODELS
from speed import BASE, OURS, compilers, machine, restart_peak, status_mib, warm_up, write_between

BEGIN, END = "<!-- step memory: written by benchmarks/step_memory.py -->\n", "<!-- end of step memory -->"
KINDS = ("first step", "warm steps")
WARM_STEPS = 3


def peaks(name: str, compiler: str) -> dict[str, float]:
    """Peaks of this process, in MiB over its size before the arguments are made."""
    warm_up()
    model = MODELS[name]()
    make = compilers(model)[compiler]
    before = status_mib("VmRSS")
    restart_peak()
    args = list(jax.block_until_ready(Case(model.step, model.args, init=model.init).arrays()))
    step = make()
    num_state = len(model.donate_argnums)
    figures = {}
    for kind, count in zip(KINDS, (1, WARM_STEPS), strict=True):
        for _ in range(count):
            args[:num_state] = jax.block_until_ready(step(*args))[:num_state]
        figures[kind] = status_mib("VmHWM") - before
        restart_peak()
    return figures


def in_process(name: str, compiler: str) -> dict[str, float]:
    """Peaks in a new process."""
    command = [sys.executable, __file__, "--child", name, compiler]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def row(name: str, figures: Mapping[str, Mapping[str, float]]) -> str:
    """Line of a model: base → ours, × ratio."""
    pairs = [(figures[BASE][kind], figures[OURS][kind]) for kind in KINDS]
    cells = [f"{f'{base:.0f} → {ours:.0f}  × {ours / base:.2f}':>25}" for base, ours in pairs]
    return f"{name:<21}{''.join(cells)}"


def summary(all_figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Geometric mean and worst of the ratios."""
    lines = []
    for kind in KINDS:
        ratios = {name: figures[OURS][kind] / figures[BASE][kind] for name, figures in all_figures.items()}
        mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
        worst = max(ratios, key=lambda name: ratios[name])
        lines.append(f"{kind}: geometric mean × {mean:.2f}, worst × {ratios[worst]:.2f} ({worst})")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row a model as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MODELS), action="append", help="these models")
    parser.add_argument("--write", type=Path, help="write the table into this page, docs/speed.md")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.child:
        print(json.dumps(peaks(*given.child)))
        return 0
    header = " " * 21 + "".join(f"{kind + ' MiB':>25}" for kind in KINDS)
    print(header, flush=True)
    all_figures: dict[str, dict[str, dict[str, float]]] = {}
    # A step of several chips takes minutes on a host.
    for name in given.only or [name for name in MODELS if MODELS[name]().num_ipus == 1]:
        all_figures[name] = {compiler: in_process(name, compiler) for compiler in (BASE, OURS)}
        print(row(name, all_figures[name]), flush=True)
        if given.write:
            table = [header, *(row(*item) for item in all_figures.items()), *summary(all_figures)]
            write_between(given.write, BEGIN, END, [f"{machine()}.", "", "```text", *table, "```"])
    print("\n".join(summary(all_figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
