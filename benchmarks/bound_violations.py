"""Looks for plans that take fewer cycles than the bound of their function: there must be none.

    python benchmarks/bound_violations.py [--programs 1000] [--plans 10] [--machines 10] [--seed 0] [--models]

Programs are those of the interpreter's grammar (`tests/lowering/random_programs.py`), and those of the tests of bounds;
each is lowered by planners that take any of their candidates, on random machines whose host takes no time. A plan is
costed on `--machines` of them: the first is the one that it is made for, on the others it is held, which takes less.
With `--models` the models of `models/` are compared as they are planned. Prints each violation with its seed, then the
number of plans and of costs, and the largest ratio of bound and cycles. The exit status is 1 if there is a violation.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from hypothesis import HealthCheck, Phase, given, seed, settings
from models import MODELS

import ipujax as ipu
from ipujax.device import device_of
from ipujax.runtime.target import held_over

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.ipujax.causes.test_bounds import FUNCTIONS, random_machine
from tests.lowering.random_plans import random_planners
from tests.lowering.random_programs import Program, programs

Case = tuple[str, Callable[..., Any], tuple[Any, ...]]
OPTIONS = ipu.Options(allow_out_of_memory=True)


def random_cases(count: int, first_seed: int) -> list[Case]:
    """Programs of the grammar, half of them with their gradients."""
    cases: list[Case] = []

    @seed(first_seed)
    @settings(
        database=None,
        deadline=None,
        max_examples=count,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(2, 7))
    def draw(program: Program) -> None:
        def fun(*args: Any) -> Any:
            return program(*args), program.gradient(*args) if program.differentiable else ()

        cases.append((f"program {len(cases)}", fun, program.arguments()))

    draw()
    return cases


def figures_of(case: Case, plans: int, machines: int, first_seed: int) -> Iterator[tuple[str, ipu.Profile]]:
    """Profiles of random plans of a function on random machines; none where JAX or a machine refuses it."""
    name, fun, args = case
    for number in range(plans):
        label = f"{first_seed} {name} {number}"
        draw = random.Random(label)
        try:
            with random_planners(draw):
                compiled = ipu.jit(fun, device=random_machine(draw), options=OPTIONS).lower(*args).compile()
                _ = compiled.profile.cycles
        except (ipu.IpuError, NotImplementedError, TypeError, ValueError):
            continue
        yield label, compiled.profile
        made_for = compiled.profile.target
        for machine in range(1, machines):
            held = held_over(made_for, random_machine(draw).target)
            yield f"{label} on {machine}", compiled.on(device_of(held)).profile


def model_figures() -> Iterator[tuple[str, ipu.Profile]]:
    """Profiles of the models, as they are planned."""
    for name, make in MODELS.items():
        model = make()
        options = ipu.Options(**model.options)
        step = ipu.jit(
            model.step, device=model.device(), donate_argnums=model.donate_argnums, options=options, **model.jit
        )
        yield name, step.profile(*model.args)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--plans", type=int, default=10)
    parser.add_argument("--machines", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", action="store_true")
    settings_of_run = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = [*((name, *case) for name, case in FUNCTIONS.items())]
    if settings_of_run.programs > 0:
        cases += random_cases(settings_of_run.programs, settings_of_run.seed)
    count = plans = violations = 0
    largest = 0.0
    for number, case in enumerate([None, *cases]):
        if case is None:
            rows = model_figures() if settings_of_run.models else iter(())
        else:
            rows = figures_of(case, settings_of_run.plans, settings_of_run.machines, settings_of_run.seed)
        for label, figures in rows:
            count += 1
            plans += " on " not in label
            bound = figures.bound
            smallest_ratio = max(bound.cycles, bound.own_steps_cycles)
            largest = max(largest, bound.cycles / max(1, figures.cycles))
            if case is None:
                ratios = [figures.cycles / max(1, x) for x in (bound.cycles, bound.own_steps_cycles)]
                print(f"{label:<24}{figures.cycles:>14,}{ratios[0]:>8.2f}{ratios[1]:>8.2f}", flush=True)
            if smallest_ratio > figures.cycles:
                violations += 1
                print(f"violation: {label}: {figures.cycles:,} cycles, {bound}", flush=True)
        if number % 5 == 0:
            print(
                f"{number:,} of {len(cases):,} programs, {plans:,} plans, {count:,} costs", file=sys.stderr, flush=True
            )
            jax.clear_caches()
    print(f"{plans:,} plans on {count:,} machines, {violations:,} below a bound; largest bound ÷ cycles {largest:.3f}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
