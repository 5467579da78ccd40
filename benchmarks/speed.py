"""Time and memory of `ipu.jit` beside `jax.jit`, for every model of `models/`: steps, first steps, and their parts.

    python benchmarks/speed.py
    python benchmarks/speed.py --only mlp --only gpt-4 --runs 5
    python benchmarks/speed.py --json speed.json --write docs/speed.md

Both compilers run alternately in one process; figures are medians. For each model, with donated state:

    step          wall and CPU seconds of a warm step
    first step    CPU seconds of the first call of a function, with JAX's and ipujax's caches cleared: tracing,
                  lowering, XLA's compilation and one run
    lower         CPU seconds of `.lower(shapes)` of a new function: tracing, passes, graph and program
    compile       CPU seconds of `.compile()` after it: checks, costs, memory, timeline; nothing of XLA
    memory        peak MiB of the process during a first step, over the bytes before it (Linux)

CPU seconds are of all threads, and hardly depend on other load of the machine; wall seconds do. No measurement begins
after `--seconds` of its kind and model, so `runs` (of warm steps, first steps, and lower with compile) may be fewer for
large models. Of models for several chips only lower and compile are measured, unless `--run-all`: a step of them takes
minutes on a host. In place of `jax.jit` of a step of several replicas, `ipu.jit` for `ipu.CPU()` is measured, which is
plain JAX for all of them. Imports and other work done once in a process come first. Files are written after each model.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hlo_diff import Case
from models import COMPARED, LARGE, MODELS, STEPS, Model

import ipujax as ipu

ALL = {**MODELS, **STEPS, **LARGE}
BASE, OURS = "jax.jit", "ipu.jit"
BEGIN, END = "<!-- speed: written by benchmarks/speed.py -->\n", "<!-- end of speed -->"
MIB = 1 << 20
SHORT_SECONDS = 1e-3  # steps below are compared by their difference: a call takes some microseconds

# Steps of `Compiled.timings` by their kind, for the table of the division of time; all other steps are passes.
PARTS = {
    "trace": ("trace",),
    "graph and program": ("lower",),
    "checks": ("verify",),
    "costs": ("cost",),
    "tile memory": ("memory",),
    "timeline": ("clocks",),
}


@dataclass
class Figures:
    """Figures of a model.

    Args:
        runs: number of measurements by their kind.
        step: wall seconds of a warm step, by compiler.
        step_cpu: CPU seconds of it, of all threads, by compiler.
        first: CPU seconds of a first step, by compiler.
        peak_mib: MiB of the process during a first step over those before, by compiler.
        lower: CPU seconds of `.lower()`.
        compile: CPU seconds of `.compile()`.
        parts: wall seconds of each part of lower and compile.
    """

    runs: dict[str, int] = field(default_factory=dict)
    step: dict[str, float] = field(default_factory=dict)
    step_cpu: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    lower: float = 0.0
    compile: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)


# --- one model --------------------------------------------------------------------------------------------------------


def compilers(model: Model, cache_dir: str = "") -> dict[str, Callable[[], Callable[..., Any]]]:
    """Makers of a new function by compiler; none has seen the others'. Programs are stored in `cache_dir`, if given."""

    def new_step() -> Callable[..., Any]:
        return lambda *args: model.step(*args)

    options = ipu.Options(**{"allow_out_of_memory": True, "progress": False, "cache_dir": cache_dir, **model.options})
    settings = {"donate_argnums": model.donate_argnums, "options": options, **model.jit}
    plain = jax.jit
    if model.jit:
        return {
            BASE: lambda: ipu.jit(new_step(), device=ipu.CPU(), **settings),
            OURS: lambda: ipu.jit(new_step(), device=model.device(), **settings),
        }
    return {
        BASE: lambda: plain(new_step(), donate_argnums=model.donate_argnums),
        OURS: lambda: ipu.jit(new_step(), device=model.device(), **settings),
    }


def rounds(most: int, limit_seconds: float) -> Any:
    """Numbers of measurements, until the limit; one at least."""
    start = time.perf_counter()
    for number in range(most):
        if number and time.perf_counter() - start > limit_seconds:
            return
        yield number


def medians(samples: dict[str, list[float]]) -> dict[str, float]:
    """Median of each list."""
    return {name: statistics.median(values) for name, values in samples.items()}


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """Names in another order each time: each is the first as often."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def clear() -> None:
    """Forget what JAX and ipujax remember of programs."""
    jax.clear_caches()
    ipu.clear_caches()
    gc.collect()


def status_mib(name: str) -> float:
    """Size of this process in MiB, by its name in `/proc/self/status`; NaN where there is none."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), math.nan)


def restart_peak() -> None:
    """Reset the peak of this process, where the system can."""
    peak = Path("/proc/self/clear_refs")
    if peak.exists():
        peak.write_text("5")


def lowering(make: Callable[[], Any], model: Model, figures: Figures, most: int, limit_seconds: float) -> None:
    """Measure lower and compile."""
    samples: dict[str, list[float]] = {"lower": [], "compile": []}
    parts: dict[str, list[float]] = {}
    for _ in rounds(most, limit_seconds):
        clear()
        start = time.process_time()
        lowered = make().lower(*model.args)
        between = time.process_time()
        compiled = lowered.compile()
        end = time.process_time()
        samples["lower"].append(between - start)
        samples["compile"].append(end - between)
        for name, seconds in by_part(compiled.timings).items():
            parts.setdefault(name, []).append(seconds)
    figures.lower, figures.compile = medians(samples).values()
    figures.parts = medians(parts)
    figures.runs["lower"] = len(samples["lower"])


def by_part(timings: Any) -> dict[str, float]:
    """Seconds of each part."""
    part_of = {step: part for part, steps in PARTS.items() for step in steps}
    seconds = Counter({part: 0.0 for part in (*PARTS, "passes")})  # type: ignore[call-overload]
    for step, spent in timings.items():
        seconds[part_of.get(step, "passes")] += spent
    return dict(seconds)


def first_steps(makers: dict[str, Any], arrays: Callable[[], Any], figures: Figures, most: int, limit: float) -> None:
    """Measure first steps: CPU seconds, and the peak of memory."""
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    peaks: dict[str, list[float]] = {name: [] for name in makers}
    for number in rounds(most, limit):
        for name in in_turn(list(makers), number):
            args = jax.block_until_ready(arrays())
            clear()
            restart_peak()
            before = status_mib("VmRSS")
            start = time.process_time()
            jax.block_until_ready(makers[name]()(*args))
            seconds[name].append(time.process_time() - start)
            peaks[name].append(status_mib("VmHWM") - before)
    figures.first, figures.peak_mib = medians(seconds), medians(peaks)
    figures.runs["first"] = len(seconds[OURS])


def warm_steps(
    makers: dict[str, Any], arrays: Callable[[], Any], num_state: int, figures: Figures, most: int, limit: float
) -> None:
    """Measure warm steps, each on the state that the one before it returned."""
    steps = {name: make() for name, make in makers.items()}
    args = {name: list(arrays()) for name in steps}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    cpu_samples: dict[str, list[float]] = {name: [] for name in steps}

    def run(name: str) -> tuple[float, float]:
        start = time.perf_counter()
        cpu_start = time.process_time()
        results = jax.block_until_ready(steps[name](*args[name]))
        cpu_spent = time.process_time() - cpu_start
        spent = time.perf_counter() - start
        if num_state:
            args[name][:num_state] = results[:num_state]
        return spent, cpu_spent

    for name in steps:
        run(name)
        run(name)
    for number in rounds(most, limit):
        for name in in_turn(list(steps), number):
            spent, cpu_spent = run(name)
            samples[name].append(spent)
            cpu_samples[name].append(cpu_spent)
    figures.step = medians(samples)
    figures.step_cpu = medians(cpu_samples)
    figures.runs["step"] = len(samples[OURS])


def measure(model: Model, runs: int, limit_seconds: float, is_run: bool) -> Figures:
    """Figures of a model."""
    figures = Figures()
    makers = compilers(model)
    lowering(makers[OURS], model, figures, runs, limit_seconds)
    if is_run:
        arrays = Case(model.step, model.args, init=model.init).arrays
        first_steps(makers, arrays, figures, runs, limit_seconds)
        # Many steps: those of small models take less than what disturbs them.
        warm_steps(makers, arrays, len(model.donate_argnums), figures, 10 * runs, limit_seconds)
    return figures


def warm_up() -> None:
    """Work that is done once in a process, as imports inside functions."""
    x = np.ones((8, 8), np.float32)
    for compile in (jax.jit, ipu.jit):
        jax.block_until_ready(compile(lambda x: jax.numpy.tanh(x @ x))(x))


# --- tables -----------------------------------------------------------------------------------------------------------


def machine() -> str:
    """The host and the versions, in a line."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return (
        f"{models[0] if models else platform.processor()}, {os.cpu_count()} cores, {platform.system()},"
        f" Python {platform.python_version()}, jax {jax.__version__}, ipujax {ipu.__version__}"
    )


def header() -> str:
    """First line of the table."""
    pairs = [f"{name:>28}" for name in ("step ms", "step CPU ms", "first step CPU s", "peak MiB")]
    return f"{'':<21}{''.join(pairs)}{'lower':>9}{'compile':>9}{'runs':>13}"


def row(name: str, figures: Figures) -> str:
    """Line of a model: base → ours, × ratio."""
    cells = [
        pair(figures.step, 1e3, 2),
        pair(figures.step_cpu, 1e3, 2),
        pair(figures.first, 1, 2),
        pair(figures.peak_mib, 1, 0),
    ]
    runs = "/".join(str(figures.runs.get(kind, 0)) for kind in ("step", "first", "lower"))
    return f"{name:<21}{''.join(f'{cell:>28}' for cell in cells)}{figures.lower:>9.2f}{figures.compile:>9.2f}{runs:>13}"


def pair(values: dict[str, float], factor: float, digits: int) -> str:
    """Both values and their ratio."""
    if not values:
        return "–"
    base, ours = factor * values[BASE], factor * values[OURS]
    return f"{base:.{digits}f} → {ours:.{digits}f} {f'× {ours / base:.2f}' if base > 0 else '':>7}"


def summary(all_figures: dict[str, Figures]) -> list[str]:
    """Geometric mean and worst of the ratios; of steps those that take a millisecond or more."""
    lines = []
    readings: tuple[tuple[str, Callable[[Figures], dict[str, float]], float], ...] = (
        ("step", lambda f: f.step, SHORT_SECONDS),
        ("step CPU", lambda f: f.step_cpu, SHORT_SECONDS),
        ("first step", lambda f: f.first, 0.0),
        ("peak", lambda f: f.peak_mib, 0.0),
    )
    for what, read, least in readings:
        measured = {name: read(f) for name, f in all_figures.items() if read(f) and read(f)[BASE] > least}
        ratios = {name: seconds[OURS] / seconds[BASE] for name, seconds in measured.items()}
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
            worst = max(ratios, key=lambda name: ratios[name])
            lines.append(f"{what}: geometric mean × {mean:.2f}, worst × {ratios[worst]:.2f} ({worst})")
    return lines


def shares(all_figures: dict[str, Figures]) -> list[str]:
    """Lines of where the compiler's time goes: percent of lower and compile by part, and their wall seconds."""
    names = ["trace", "passes", *list(PARTS)[1:]]
    widths = {name: max(len(name), 5) + 2 for name in names}
    lines = [f"{'% of lower and compile':<23}{''.join(f'{name:>{widths[name]}}' for name in names)}{'wall s':>9}"]
    for model, figures in all_figures.items():
        total = sum(figures.parts.values())
        cells = "".join(f"{100 * figures.parts[name] / total:>{widths[name]}.1f}" for name in names)
        lines.append(f"{model:<23}{cells}{total:>9.2f}")
    return lines


def block(all_figures: dict[str, Figures], settings: str) -> list[str]:
    """Lines of the page: the machine, the settings of the run, and both tables."""
    table = [header(), *(row(name, figures) for name, figures in all_figures.items()), *summary(all_figures)]
    load = f"{os.getloadavg()[0]:.1f} runnable processes in the last minute"
    return [
        f"{machine()}; {load}; {settings}.",
        "",
        "```text",
        *table,
        "```",
        "",
        "```text",
        *shares(all_figures),
        "```",
    ]


def write_between(page: Path, begin: str, end: str, lines: Sequence[str]) -> None:
    """Put lines between two lines of a page.

    Raises:
        SystemExit: the page has no block.
    """
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise SystemExit(f"{page} has no block {begin.strip()} … {end}")
    before, rest = text.split(begin, 1)
    page.write_text(before + begin + "\n".join(lines) + "\n" + end + rest.split(end, 1)[1], encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row a model as soon as it is measured; returns 1 if one could not be compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = ["compared", *ALL]
    parser.add_argument("--only", choices=choices, action="append", help="these models; `compared`: those of `fit.py`")
    parser.add_argument("--runs", type=int, default=15, help="measurements of each kind; ten times as many warm steps")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no measurement of a kind begins")
    parser.add_argument("--run-all", action="store_true", help="run steps of models for several chips too")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    parser.add_argument("--write", type=Path, help="write the tables into this page, docs/speed.md")
    given = parser.parse_args(argv)
    chosen = set(MODELS if given.only is None else given.only)
    chosen |= set(COMPARED) if "compared" in chosen else set()
    warm_up()
    print(header(), flush=True)
    all_figures: dict[str, Figures] = {}
    failed = False
    for name in (name for name in ALL if name in chosen):
        model = ALL[name]()
        try:
            all_figures[name] = measure(model, given.runs, given.seconds, given.run_all or model.num_ipus == 1)
        except Exception as error:  # one model must not keep the others from being measured
            failed = True
            print(f"{name:<21}  failed: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        print(row(name, all_figures[name]), flush=True)
        if given.json:
            data = {name: asdict(figures) for name, figures in all_figures.items()}
            given.json.write_text(json.dumps({"machine": machine(), "models": data}, indent=1) + "\n")
        if given.write:
            write_between(
                given.write, BEGIN, END, block(all_figures, f"`--runs {given.runs} --seconds {given.seconds:g}`")
            )
    print("\n".join([*summary(all_figures), "", *shares(all_figures)]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
