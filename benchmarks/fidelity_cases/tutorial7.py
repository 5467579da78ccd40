"""Tutorial 7 of the user guide, a matrix of 10,000 × 1,000 floats by a vector: estimates, and simulated cycles."""

from __future__ import annotations

import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp

from fidelity_cases.case import Ends, Family, Row, compute_set_costs, interval_of, profile_of
from ipujax import poplar
from ipujax.poplar.program import Program

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "poplar"
_ROWS = 10_000
_COLUMNS = 1_000
# Split, total, compute, exchange, reduce exchange, reduce compute, worst: the guide for Mk1, tut6's README for Mk2.
_ESTIMATES = {"ipu1": (5, 4751, 4410, 200, 45, 96, 64373), "ipu2": (7, 3996, 3696, 143, 49, 108, 53807)}
_NAMES = ("split", "total", "compute", "exchange", "reduce exchange", "reduce compute", "worst total")


class DotProductVertex(poplar.Vertex):
    """The tutorial's C++ dot product: no estimate of its own, as a compiler makes it."""

    a: poplar.Input[poplar.Vector[poplar.FLOAT]]
    b: poplar.Input[poplar.Vector[poplar.FLOAT]]
    out: poplar.Output[poplar.FLOAT]

    def compute(a, b):
        return jnp.dot(a, b)


class ReduceVertex(poplar.Vertex):
    """The tutorial's C++ sum."""

    in_: poplar.Input[poplar.Vector[poplar.FLOAT]]
    out: poplar.Output[poplar.FLOAT]

    def compute(in_):
        return jnp.sum(in_)


@lru_cache(maxsize=1)
def _tutorial() -> ModuleType:
    """The example's module; it imports the tutorial before it, a file of the same folder."""
    name = "tut7_matrix_vector_opt"
    spec = importlib.util.spec_from_file_location(name, _EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up their annotations
    sys.path.insert(0, str(_EXAMPLES))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(_EXAMPLES))
    return module


def estimates(arch: str) -> tuple[int, ...]:
    """The tutorial's estimate of the best split of a machine, and the total of the worst."""
    target = poplar.IPUModel(arch).create_device().get_target()
    best, worst = _tutorial().best_and_worst_split(target, _ROWS, _COLUMNS)
    parts = (best.compute, best.exchange, best.reduce_exchange, best.reduce_compute)
    return (best.split, best.total, *parts, worst.total)


def program(target: poplar.Target, codelets: list[Any], split: int) -> tuple[poplar.Graph, Program]:
    """The tutorial's multiplication alone, with codelets of the names it uses."""
    graph = poplar.Graph(target)
    graph.add_codelets(codelets)
    matrix = graph.add_variable(poplar.FLOAT, [_ROWS, _COLUMNS], "matrix")
    vector = graph.add_variable(poplar.FLOAT, [_COLUMNS], "inputVector")
    out = graph.add_variable(poplar.FLOAT, [_ROWS], "outputVector")
    return graph, _tutorial().build_multiply_program(graph, matrix, vector, out, split)


def model_cycles() -> tuple[int, Ends]:
    """Cycles of the tutorial on Mk1 with its estimates, and their interval; syncs take none, as it sets up."""
    target = poplar.IPUModel("ipu1", min_ipu_sync_delay=0).create_device().get_target()
    codelets = [_tutorial().DotProductVertex, _tutorial().ReduceVertex]
    profile = profile_of(*program(target, codelets, _ESTIMATES["ipu1"][0]))
    return profile.cycles, interval_of(profile)


def mean_compute_cycles() -> tuple[float, Ends]:
    """Compute cycles, and their interval, of the mean tile of an Mk2 with codelets compiled from C++."""
    target = poplar.IPUModel("ipu2").create_device().get_target()
    graph, multiply = program(target, [DotProductVertex, ReduceVertex], _ESTIMATES["ipu2"][0])
    cycles = float(sum(cost.compute_cycles.mean() for cost in compute_set_costs(graph, multiply)))
    return cycles, interval_of(profile_of(graph, multiply), ("compute",))


def family() -> Family:
    """Estimates, simulated cycles, and the C++ codelet on hardware."""
    rows = [
        Row(f"{arch}: estimate, {name}", published, estimate, 0)
        for arch, figures in _ESTIMATES.items()
        for name, published, estimate in zip(_NAMES, figures, estimates(arch), strict=True)
    ]
    for name, published, bar, (simulated, interval) in (
        ("ipu1: simulated, all cycles", 5071, 0.03, model_cycles()),
        ("ipu2: C++ codelets, compute of the mean tile", 28300.3, 0.10, mean_compute_cycles()),
    ):
        rows.append(Row(name, published, simulated, bar, interval=interval))
    source = (
        "the user guide's tutorial 7 (IPU Model, Mk1); graphcore/examples tut6 for Mk2, model and hardware "
        "(reference B4)."
    )
    how = (
        "Cycles of `examples/poplar/tut7_matrix_vector_opt.py`, without host exchange. The simulated Mk1 has syncs "
        "that take no time, since the tutorial sets up the IPU Model with `minIPUSyncDelay = 0`; with the preset's 90 "
        "cycles a sync the program takes 180 more. The C++ codelets are those of the tutorial without its estimates: "
        "one instruction for each element that is read, computed or written."
    )
    return Family("Tutorial 7: matrix by vector, 10,000 × 1,000", source, how, rows)
