"""Time of `ipu.jit` over that of `jax.jit` of the same function.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --warm --only argsort --only digits-mlp

Ratios with their bars, each of medians of runs that alternate within this process, since absolute times depend on the
machine and its other load. For the cases of `hlo_diff.py`, with `--warm` alone:
- a step, warm, with donated state, and the geometric mean over all cases.

For the models of `examples/digits.py`:
- the first step of a function nobody has called: tracing, lowering, XLA's compilation and one run;
- lowering and compiling, without tracing and XLA, for 1,472 tiles to that for 64.
Each repetition of the second and third makes new functions; imports, and JAX's work that is done once in a process,
come before. Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from hlo_diff import CASES, Case as Compared
from models.digits import load_example

import ipujax as ipu

BATCH = 64
# Bars of the project: a step, the geometric mean over all, time to the first step, lowering for 1,472 tiles to 64.
STEP_BAR = 1.1
MEAN_BAR = 1.03
FIRST_BAR = 5.0
LOWERING_BAR = 2.0
LOOSE_BAR = 1.2  # of cases whose times vary by themselves
LOOSE = ("argsort", "permutation", "pruning", "recogniser")
ROUND_SECONDS = 0.01  # a round runs as many steps as fit, so that a disturbance hits one of many rounds
ROUNDS = 9, 201  # least and most; between them, as many as fit in the seconds of a case

Step = Callable[..., tuple[Any, Any, jax.Array]]


def new_step(
    model: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    mean: Callable[[Any], Any] = lambda loss_and_grads: loss_and_grads,
) -> Step:
    """The example's training step as a function no cache has seen; `mean` is applied to the loss and the gradients."""

    def train_step(params: Any, opt_state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            logits = model(params, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = mean(jax.value_and_grad(loss)(params))
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    return train_step


class Case:
    """One model of the example, with its batch."""

    def __init__(self, digits: ModuleType, name: str) -> None:
        self.name = name
        self.model, shapes = digits.MODELS[name]
        self.optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, 440))
        self._params = digits.init(shapes)
        images, _, labels, _ = digits.load()
        self.batch = images[:BATCH], labels[:BATCH]

    def step(self) -> Step:
        """A new function."""
        return new_step(self.model, self.optimizer)

    def state(self) -> tuple[Any, Any]:
        """Parameters and optimizer state, in buffers of their own, to be donated."""
        params = jax.tree.map(jnp.copy, self._params)
        return params, self.optimizer.init(params)


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call until its results are there, and the results."""
    start = time.perf_counter()
    results = jax.block_until_ready(run())
    return time.perf_counter() - start, results


def median_times(runs: dict[str, Callable[[], float]], repetitions: int) -> dict[str, float]:
    """Medians of measurements that alternate; each is first equally often."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for repetition in range(repetitions):
        for number in range(len(names)):
            name = names[(number + repetition) % len(names)]
            times[name].append(runs[name]())
    return {name: statistics.median(values) for name, values in times.items()}


def jitters(device: ipu.IPUModel) -> dict[str, Callable[[Step], Step]]:
    """The two ways to compile a step."""
    return {
        "jax.jit": lambda step: jax.jit(step, donate_argnums=(0, 1)),
        "ipu.jit": lambda step: ipu.jit(step, device=device, donate_argnums=(0, 1)),
    }


def warm_times(case: Compared, case_seconds: float) -> dict[str, float]:
    """Seconds of one warm step."""
    jits = {
        "jax.jit": jax.jit(case.fun, donate_argnums=case.donate_argnums),
        "ipu.jit": ipu.jit(
            case.fun,
            device=case.device,
            donate_argnums=case.donate_argnums,
            options=ipu.Options(allow_out_of_memory=True, progress=False),
        ),
    }

    def stepper(step: Callable[..., Any]) -> Callable[[int], Any]:
        args = list(case.arrays())

        def run(steps: int) -> Any:
            for _ in range(steps):
                results = step(*args)
                for n in case.donate_argnums:
                    args[n] = results[n]
            return results

        return run

    runs = {name: stepper(step) for name, step in jits.items()}
    for run in runs.values():
        seconds(lambda run=run: run(2))
    once = min(seconds(lambda: runs["jax.jit"](1))[0] for _ in range(3))
    steps = max(1, round(ROUND_SECONDS / once))
    rounds = max(ROUNDS[0], min(ROUNDS[1], round(case_seconds / (2 * steps * once))))
    rows = {name: lambda run=run: seconds(lambda: run(steps))[0] / steps for name, run in runs.items()}
    return median_times(rows, rounds)


def first_times(case: Case, device: ipu.IPUModel, repetitions: int) -> dict[str, float]:
    """Seconds to the results of the first call of a new function."""

    def measured(wrap: Callable[[Step], Step]) -> Callable[[], float]:
        def run() -> float:
            step = wrap(case.step())
            state = case.state()
            return seconds(lambda: step(*state, *case.batch))[0]

        return run

    runs = {name: measured(wrap) for name, wrap in jitters(device).items()}
    for run in runs.values():
        run()  # work done once in a process is not compared
    return median_times(runs, repetitions)


def lowering_times(case: Case, tiles: Sequence[int], repetitions: int) -> dict[str, float]:
    """Seconds of lowering and compiling to an executable, without tracing and without XLA, by number of tiles."""

    def measured(count: int) -> Callable[[], float]:
        def run() -> float:
            device = ipu.IPUModel(tiles_per_ipu=count)
            compiled = ipu.jit(case.step(), device=device).lower(*case.state(), *case.batch).compile()
            return sum(spent for name, spent in compiled.timings.items() if name != "trace")

        run()
        return run

    return median_times({str(count): measured(count) for count in tiles}, repetitions)


def row(title: str, model: str, base: float, other: float, bar: float) -> bool:
    """Prints one line of the table; returns whether the bar is held."""
    ratio = other / base
    verdict = "ok" if ratio <= bar else "MISSED"
    print(
        f"{title:<26} {model:<20} {base * 1e3:>10.3f} {other * 1e3:>10.3f} {ratio:>7.3f} {bar:>6.2f}  {verdict}",
        flush=True,
    )
    return ratio <= bar


def warm_rows(names: Sequence[str], case_seconds: float) -> list[bool]:
    """Prints a row a case and the geometric mean; returns which bars are held."""
    are_met = []
    ratios = []
    for name in names:
        times = warm_times(CASES[name](), case_seconds)
        ratios.append(times["ipu.jit"] / times["jax.jit"])
        bar = LOOSE_BAR if name in LOOSE else STEP_BAR
        are_met.append(row("step, ipu.jit / jax.jit", name, times["jax.jit"], times["ipu.jit"], bar))
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    are_met.append(mean <= MEAN_BAR)
    verdict = "ok" if are_met[-1] else "MISSED"
    print(f"{'step, geometric mean':<69} {mean:>7.3f} {MEAN_BAR:>6.2f}  {verdict}", flush=True)
    return are_met


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints the table; returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7, help="of first steps and lowerings")
    parser.add_argument("--warm", action="store_true", help="warm steps alone")
    parser.add_argument("--only", choices=list(CASES), action="append", help="these cases of warm steps")
    parser.add_argument("--seconds", type=float, default=6.0, help="in which a case's warm steps are measured")
    chosen = parser.parse_args(argv)
    print(f"{'':<26} {'':<20} {'base ms':>10} {'other ms':>10} {'ratio':>7} {'bar':>6}")
    are_met = warm_rows(chosen.only or list(CASES), chosen.seconds)
    digits = load_example()
    device = ipu.IPUModel(num_ipus=1, arch="mk2")
    for name in () if chosen.warm else digits.MODELS:
        case = Case(digits, name)
        times = first_times(case, device, chosen.repetitions)
        are_met.append(row("first step, same", name, times["jax.jit"], times["ipu.jit"], FIRST_BAR))
        times = lowering_times(case, (64, 1472), chosen.repetitions)
        are_met.append(row("lowering, 1472 / 64 tiles", name, times["64"], times["1472"], LOWERING_BAR))
    return 0 if all(are_met) else 1


if __name__ == "__main__":
    sys.exit(main())
