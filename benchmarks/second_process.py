"""Time to the first step in a second process with the cache on disk: `ipu.jit` beside `jax.jit`, for every model.

    python benchmarks/second_process.py
    python benchmarks/second_process.py --only mlp --runs 3
    python benchmarks/second_process.py --json second.json --write docs/speed.md

A first process of each compiler fills a directory of its own: the cache of ipujax, that of XLA
(`jax_compilation_cache_dir`), and byte code, which an installed package has too. Further processes of both compilers
then run alternately. Measured are the CPU seconds of all threads from the function to the results of its first call;
`import` of the packages and the arguments come before. Figures are medians. `requests` are the compilations by XLA in
the call, `hits` those that XLA's cache had.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from hlo_diff import Case
from models import MODELS
from speed import BASE, OURS, compilers, in_turn, machine, write_between

BEGIN, END = "<!-- second process: written by benchmarks/second_process.py -->\n", "<!-- end of second process -->"
EVENTS = {"requests": "compile_requests_use_cache", "hits": "cache_hits"}


def first_call(name: str, compiler: str, directory: Path) -> dict[str, float]:
    """Figures of the first call in this process, with the caches of a directory."""
    jax.config.update("jax_compilation_cache_dir", str(directory / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    model = MODELS[name]()
    args = jax.block_until_ready(Case(model.step, model.args, init=model.init).arrays())
    make = compilers(model, str(directory / "programs"))[compiler]
    events = Counter[str]()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
    start = time.process_time()
    jax.block_until_ready(make()(*args))
    seconds = time.process_time() - start
    return {"seconds": seconds, **{key: events[event] for key, event in EVENTS.items()}}


def in_process(name: str, compiler: str, directory: Path) -> dict[str, float]:
    """Figures of the first call in a new process."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(directory / "bytecode")}
    command = [sys.executable, __file__, "--child", name, compiler, str(directory)]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def measure(name: str, runs: int) -> dict[str, Any]:
    """Figures of a model by compiler: CPU seconds of second processes, events of XLA's cache."""
    with tempfile.TemporaryDirectory() as folder:
        # A directory for each: neither may profit from what the other has compiled.
        for compiler in (BASE, OURS):
            in_process(name, compiler, Path(folder) / compiler)
        later: dict[str, list[dict[str, float]]] = {BASE: [], OURS: []}
        for number in range(runs):
            for compiler in in_turn((BASE, OURS), number):
                later[compiler].append(in_process(name, compiler, Path(folder) / compiler))
    return {
        "second": {compiler: statistics.median(each["seconds"] for each in later[compiler]) for compiler in later},
        **{key: {compiler: later[compiler][-1][key] for compiler in later} for key in EVENTS},
    }


def row(name: str, figures: Mapping[str, Mapping[str, float]]) -> str:
    """Line of a model: base → ours, × ratio."""
    base, ours = figures["second"][BASE], figures["second"][OURS]
    events = [f"{figures['hits'][compiler]}/{figures['requests'][compiler]}" for compiler in (BASE, OURS)]
    return f"{name:<21}{f'{base:.2f} → {ours:.2f}  × {ours / base:.2f}':>25}{' → '.join(events):>18}"


def summary(all_figures: Mapping[str, Any]) -> str:
    """Geometric mean and worst of the ratios in second processes."""
    ratios = {name: figures["second"][OURS] / figures["second"][BASE] for name, figures in all_figures.items()}
    mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
    worst = max(ratios, key=lambda name: ratios[name])
    return f"second process: geometric mean × {mean:.2f}, worst × {ratios[worst]:.2f} ({worst})"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row a model as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MODELS), action="append", help="these models")
    parser.add_argument("--runs", type=int, default=5, help="second processes of each compiler")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    parser.add_argument("--write", type=Path, help="write the table into this page, docs/speed.md")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        name, compiler, directory = arguments.child
        print(json.dumps(first_call(name, compiler, Path(directory))))
        return 0
    header = f"{'':<21}{'first step CPU s':>25}{'hits/requests':>18}"
    print(header, flush=True)
    all_figures: dict[str, Any] = {}
    # A step of several chips takes minutes on a host.
    for name in arguments.only or [name for name in MODELS if MODELS[name]().num_ipus == 1]:
        all_figures[name] = measure(name, arguments.runs)
        print(row(name, all_figures[name]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(all_figures, indent=1), encoding="utf-8")
    print(summary(all_figures))
    if arguments.write:
        lines = [header, *(row(name, figures) for name, figures in all_figures.items()), summary(all_figures)]
        settings = f"{machine()}; `--runs {arguments.runs}`."
        write_between(arguments.write, BEGIN, END, [settings, "", "```text", *lines, "```"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
