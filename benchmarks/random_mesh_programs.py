"""Random programs over meshes, with loops and branches that data decide, against plain JAX.

    python benchmarks/random_mesh_programs.py [--count N] [--seed S] [--first K]

Measured: numbers of `ipu.jit` against those of plain JAX on one device, and programs that are refused. A program is
over a mesh of one, two or three axes, by `jax.shard_map` or by shardings, alone, on two replicas, or in a pipeline
whose stages are named or searched for; one in three has a gradient. `random_mesh_cases` has the grammar. By
construction `jax.jit` runs every program on several devices, and every IPU that takes part in a collective reaches it:
no refusal is right. Plain JAX computes `jax.shard_map` by `jax.vmap` over named axes: XLA's runtime for CPUs ends the
process where collectives of several groups of devices wait for threads too long.

Prints every program that fails, and a summary; exits 1 unless all numbers are right and no program is refused. Where
JAX fails on the form by `jax.vmap`, a program is without oracle.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu

sys.path.insert(0, str(Path(__file__).resolve().parent))

from random_mesh_cases import ROWS, WIDTH, Axes, Drawing, Step, World, run

_MESHES: tuple[dict[str, int], ...] = (
    {"x": 2},
    {"x": 4},
    {"x": 2, "y": 2},
    {"y": 2, "x": 2},
    {"x": 4, "y": 2},
    {"x": 2, "y": 2, "z": 2},
)
_FORMS = ("alone", "replicas", "stages", "automatic stages")
_REPLICAS = 2
_STAGES = 2
_MICRO_BATCHES = 2
_TILES = 4
_TOLERANCE = 2e-4
_PROGRAMS_A_CACHE = 25  # after which compiled programs are dropped: XLA's memory of each adds up


@dataclass(frozen=True)
class Program:
    """A random program.

    Args:
        sizes: axes of the mesh.
        form: one of `_FORMS`.
        is_manual: whether it is by `jax.shard_map`.
        has_gradient: whether its gradient is computed, too.
        u_axes: axes that split u.
        parts: steps of each stage.
        seed: of its arguments.
    """

    sizes: dict[str, int]
    form: str
    is_manual: bool
    has_gradient: bool
    u_axes: Axes
    parts: tuple[tuple[Step, ...], ...]
    seed: int

    @property
    def axes(self) -> Axes:
        """Names of the axes."""
        return tuple(self.sizes)

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return _REPLICAS if self.form == "replicas" else 1

    @property
    def is_pipeline(self) -> bool:
        """True for a pipeline."""
        return self.form in ("stages", "automatic stages")

    def __str__(self) -> str:
        """Describe the program in one line."""
        words = ["manual" if self.is_manual else "automatic", self.form, str(self.sizes), f"u over {self.u_axes}"]
        words += ["gradient"] if self.has_gradient else []
        steps = [f"{step.op}{list(step.axes)}" for part in self.parts for first in part for step in first.walk()]
        return f"{', '.join(words)}: {', '.join(steps)}"


def draw(seed: int, number: int) -> Program:
    """Draw a program."""
    rng = np.random.default_rng([seed, number])
    sizes = _MESHES[int(rng.integers(len(_MESHES)))]
    form = _FORMS[number % len(_FORMS)]
    is_manual = bool(rng.integers(2))
    axes = tuple(sizes)
    u_axes = tuple(axis for axis in axes if rng.integers(2))
    # The blocks of replicas meet in collectives, too.
    all_axes = ("replica", *axes) if is_manual and form == "replicas" else axes
    drawing = Drawing(rng, all_axes, is_manual)
    equal = tuple(axis for axis in axes if axis not in u_axes)
    parts = []
    for _ in range(_STAGES if form in ("stages", "automatic stages") else 1):
        part, equal = drawing.steps(int(rng.integers(1, 4)), all_axes, equal)
        # An automatic program states one sharding at least.
        split = () if is_manual else (Step("split x", float(rng.uniform()), axes),)
        parts.append((*split, *part))
    return Program(sizes, form, is_manual, bool(rng.uniform() < 0.35), u_axes, tuple(parts), int(rng.integers(1 << 30)))


def arguments(program: Program) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weights, x and u of a program, of all replicas and micro-batches."""
    rng = np.random.default_rng(program.seed)
    blocks = int(np.prod(list(program.sizes.values())))
    copies = program.replicas * (_MICRO_BATCHES if program.is_pipeline else 1)
    weights = rng.uniform(0.5, 1.5, (_STAGES, WIDTH)).astype(np.float32)
    x = rng.uniform(-1.5, 1.5, (copies * blocks * ROWS, WIDTH)).astype(np.float32)
    return weights, x, rng.uniform(-1.5, 1.5, x.shape).astype(np.float32)


def stage_function(program: Program, mesh: AbstractMesh | None, number: int) -> Callable[..., Any]:
    """Return the function of one stage, from weights, x and u to x and u, over a mesh, or on one device for None."""
    axes = ("replica", *program.axes) if program.is_manual and program.replicas > 1 else program.axes
    world = World(axes, mesh, program.is_manual, program.has_gradient)

    def compute(weights: Any, x: Any, u: Any) -> Any:
        # A block of u is larger than one of x where fewer axes split it.
        u = u[:ROWS] if program.is_manual else u
        return run(program.parts[number], (x * weights[number], u), world)

    if not program.is_manual:
        return compute
    # u has a block of its own on each IPU from the first stage on: which of them are equal is for the analysis.
    u_axes = program.u_axes if number == 0 else program.axes
    if mesh is None:
        return over_blocks(compute, program.sizes, u_axes)
    over_all = P(program.axes)
    u_spec = P(u_axes or None)
    return jax.shard_map(
        compute, mesh=mesh, in_specs=(P(), over_all, u_spec), out_specs=(over_all, over_all), check_vma=False
    )


def over_blocks(compute: Callable[..., Any], sizes: dict[str, int], u_axes: Axes) -> Callable[..., Any]:
    """Return what `jax.shard_map` makes of a function of blocks, on one device."""
    axes = tuple(sizes)
    grid = tuple(sizes.values())

    def on_one_device(weights: Any, x: Any, u: Any) -> Any:
        blocks_of_u = u.reshape(*(sizes[axis] if axis in u_axes else 1 for axis in axes), -1, WIDTH)
        blocks_of_u = jnp.broadcast_to(blocks_of_u, (*grid, *blocks_of_u.shape[len(axes) :]))
        mapped = compute
        for axis in reversed(axes):
            mapped = jax.vmap(mapped, (None, 0, 0), axis_name=axis)
        return tuple(y.reshape(-1, WIDTH) for y in mapped(weights, x.reshape(*grid, -1, WIDTH), blocks_of_u))

    return on_one_device


def function_of(program: Program, mesh: AbstractMesh | None) -> Callable[..., Any]:
    """Return the function of weights, x and u of one replica; its results are the mean of all replicas."""
    stages = [stage_function(program, mesh, number) for number in range(len(program.parts))]

    def values(weights: Any, x: Any, u: Any) -> Any:
        for number, stage in enumerate(stages):
            if program.form == "stages":
                with ipu.stage(number):
                    x, u = stage(weights, x, u)
            else:
                x, u = stage(weights, x, u)
        return x, u

    def loss(weights: Any, x: Any, u: Any) -> Any:
        x, u = values(weights, x, u)
        scale = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
        return (x * scale).mean() + 0.5 * (u**2).mean()

    fun = jax.value_and_grad(loss) if program.has_gradient else (loss if program.is_pipeline else values)
    if program.is_pipeline:
        stages_argument = {"stages": _STAGES} if program.form == "automatic stages" else {}
        return ipu.pipeline(fun, micro_batches=_MICRO_BATCHES, batch_argnums=(1, 2), **stages_argument)
    if program.replicas == 1:
        return fun

    def replica(weights: Any, x: Any, u: Any) -> Any:
        return lax.pmean(fun(weights, x, u), "replica")

    return replica


def expected_of(program: Program, args: Any) -> Any:
    """Compute a program by plain JAX."""
    fun = function_of(program, None)
    if program.replicas == 1:
        return jax.jit(fun)(*args)
    weights, x, u = args
    rows = (program.replicas, -1, WIDTH)
    mapped = jax.jit(jax.vmap(fun, (None, 0, 0), axis_name="replica"))
    return jax.tree.map(lambda results: results[0], mapped(weights, x.reshape(rows), u.reshape(rows)))


def computed_of(program: Program, args: Any) -> Any:
    """Compute a program by `ipu.jit`."""
    mesh = ipu.make_mesh(tuple(program.sizes.values()), program.axes, axis_types=(AxisType.Auto,) * len(program.axes))
    num_ipus = int(np.prod(list(program.sizes.values()))) * program.replicas * len(program.parts)
    settings: dict[str, Any] = {"device": ipu.IPUModel(num_ipus=num_ipus, tiles_per_ipu=_TILES)}
    if program.replicas > 1:
        settings |= {"replicas": program.replicas, "in_specs": (P(), P("replica"), P("replica")), "out_specs": P()}
    elif not program.is_manual and not program.is_pipeline:
        split_u = NamedSharding(mesh, P(program.u_axes or None))
        settings |= {"in_shardings": (None, NamedSharding(mesh, P(program.axes)), split_u)}
    return ipu.jit(function_of(program, mesh), **settings)(*args)


def outcome_of(program: Program) -> tuple[str, str]:
    """Return the outcome of a program, and its text where it fails."""
    args = arguments(program)
    try:
        expected = expected_of(program, args)
    except AssertionError:  # of JAX itself: `vmap` over named axes has no rule for some loops and branches
        return "without oracle", ""
    try:
        computed = computed_of(program, args)
    except ipu.IpuError as error:
        return "wrongly refused", f"{type(error).__name__}: {error}"
    except Exception:  # any failure is an outcome, and the next program is tried
        return "failed", traceback.format_exc(limit=-6)
    pairs = zip(jax.tree.leaves(computed), jax.tree.leaves(expected), strict=True)
    errors = [_relative_error(np.asarray(a), np.asarray(b)) for a, b in pairs]
    largest = max(errors)
    return ("right", "") if largest <= _TOLERANCE else ("wrong numbers", f"relative errors {errors}")


def _relative_error(computed: np.ndarray, expected: np.ndarray) -> float:
    if computed.shape != expected.shape:
        return float("inf")
    return float(np.abs(computed - expected).max(initial=0) / max(1.0, np.abs(expected).max(initial=0)))


def main() -> int:
    """Compare random programs; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=600, help="programs (default 600)")
    parser.add_argument("--seed", type=int, default=0, help="of all programs (default 0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first program (default 0)")
    options = parser.parse_args()
    outcomes = Counter[str]()
    start_seconds = time.monotonic()
    for number in range(options.first, options.first + options.count):
        program = draw(options.seed, number)
        outcome, text = outcome_of(program)
        outcomes[outcome] += 1
        if sum(outcomes.values()) % 50 == 0:
            print(dict(outcomes), flush=True)
        if text:
            print(f"{outcome}: program {number}: {program}\n{text}\n", flush=True)
        if number % _PROGRAMS_A_CACHE == _PROGRAMS_A_CACHE - 1:
            jax.clear_caches()
            ipu.clear_caches()
    seconds = time.monotonic() - start_seconds
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"{options.count:,} programs in {seconds:,.0f} s: {counts}")
    return 0 if outcomes["right"] + outcomes["without oracle"] == options.count else 1


if __name__ == "__main__":
    sys.exit(main())
