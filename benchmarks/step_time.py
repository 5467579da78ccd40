"""How much slower `ipu.jit` is than `jax.jit` of the same function, for the models of `examples/digits.py`.

    python benchmarks/step_time.py

Three ratios with their bars, each of medians of runs that alternate within this process, since absolute times depend on
the machine and on what else it does:
- a training step, warm, with donated state;
- the first step of a function nobody has called: tracing, lowering, XLA's compilation and one run;
- lowering and compiling, without tracing and XLA, for 1,472 tiles to that for 64.
Each repetition of the second and third builds its functions anew; imports and what JAX does once in a process come
before. Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from models.digits import load_example

import ipujax as ipu

BATCH = 64
# Bars of the project: a step, time to the first step, lowering for 1,472 tiles to 64.
STEP_BAR, FIRST_BAR, LOWERING_BAR = 3.0, 5.0, 2.0

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
    """How long a call takes until its results are there, and the results."""
    start = time.perf_counter()
    results = jax.block_until_ready(run())
    return time.perf_counter() - start, results


def median_times(runs: dict[str, Callable[[], float]], repetitions: int) -> dict[str, float]:
    """Medians of measurements that alternate, each in turn the first."""
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


def step_times(case: Case, device: ipu.IPUModel, repetitions: int, steps: int = 20) -> dict[str, float]:
    """Seconds of one warm step; each measurement runs `steps` of them."""

    def measured(step: Step) -> Callable[[], float]:
        params, opt_state, _ = step(*case.state(), *case.batch)
        state = [params, opt_state]

        def run() -> Any:
            for _ in range(steps):
                *state[:], loss = step(*state, *case.batch)
            return state, loss

        return lambda: seconds(run)[0] / steps

    return median_times({name: measured(wrap(case.step())) for name, wrap in jitters(device).items()}, repetitions)


def first_times(case: Case, device: ipu.IPUModel, repetitions: int) -> dict[str, float]:
    """Seconds to the results of the first call of a new function."""

    def measured(wrap: Callable[[Step], Step]) -> Callable[[], float]:
        def run() -> float:
            step, state = wrap(case.step()), case.state()
            return seconds(lambda: step(*state, *case.batch))[0]

        return run

    runs = {name: measured(wrap) for name, wrap in jitters(device).items()}
    for run in runs.values():
        run()  # what happens once in a process is not what is compared
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


def row(what: str, model: str, base: float, other: float, bar: float) -> bool:
    """Prints one line of the table; returns whether the bar is held."""
    ratio = other / base
    verdict = "ok" if ratio <= bar else "MISSED"
    print(f"{what:<26} {model:<5} {base * 1e3:>10.2f} {other * 1e3:>10.2f} {ratio:>7.2f} {bar:>6.1f}  {verdict}")
    return ratio <= bar


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints the table; returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    repetitions = parser.parse_args(argv).repetitions
    digits, device, held = load_example(), ipu.IPUModel(num_ipus=1, arch="mk2"), []
    print(f"{'':<26} {'':<5} {'base ms':>10} {'other ms':>10} {'ratio':>7} {'bar':>6}")
    for name in digits.MODELS:
        case = Case(digits, name)
        times = step_times(case, device, repetitions)
        held.append(row("step, ipu.jit / jax.jit", name, times["jax.jit"], times["ipu.jit"], STEP_BAR))
        times = first_times(case, device, repetitions)
        held.append(row("first step, same", name, times["jax.jit"], times["ipu.jit"], FIRST_BAR))
        times = lowering_times(case, (64, 1472), repetitions)
        held.append(row("lowering, 1472 / 64 tiles", name, times["64"], times["1472"], LOWERING_BAR))
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
