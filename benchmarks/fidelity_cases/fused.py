"""Elementwise expressions that are one vertex, against the codelets that PopLibs has by hand for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import ipujax as ipu
from fidelity_cases.case import Ends, Family, Row, interval_of

_WORKERS = 6
_VECTOR = 4  # halves
_VECTORS = 64  # of each worker, and twice as many
_COUNTERS_CYCLES = 45  # of the cycles as read
_SCALED_ADD = {64: 375, 512: 1043}  # elements: cycles as read
_SCALE = 0.5


def relu(x: Any) -> Any:
    """The non-linearity."""
    return jax.nn.relu(x)


def relu_of_sum(x: Any, y: Any) -> Any:
    """The non-linearity of a sum, as behind a bias."""
    return jax.nn.relu(x + y)


def relu_grad(y: Any, dy: Any) -> Any:
    """Its gradient from its result, as PopNN has it."""
    return jnp.where(y > 0, dy, jnp.zeros((), dy.dtype))


def dropout(x: Any, mask: Any) -> Any:
    """Selects by a mask of bytes, and scales."""
    return jnp.where(mask, x * jnp.asarray(1 / _SCALE, x.dtype), jnp.zeros((), x.dtype))


def scaled_add(x: Any, y: Any, scale: Any) -> Any:
    """The scale is a tensor, as `popops::scaledAddTo` takes it."""
    return scale * x + y


def compute_profile(fun: Callable[..., Any], shapes: Sequence[tuple[tuple[int, ...], Any]]) -> ipu.Profile:
    """Profile of a function of arrays on one tile of an Mk2.

    Raises:
        ValueError: if the function is not one compute set of one vertex.
    """
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    lowered = ipu.jit(fun, device=ipu.IPUModel(arch="mk2", tiles_per_ipu=1)).lower(*structs)
    if [len(groups) for groups in lowered.graph.groups.values()] != [1]:
        raise ValueError(f"{fun.__name__} is not one vertex")
    return lowered.compile().profile


def cycles_per_vector(fun: Callable[..., Any], *dtypes: Any) -> float:
    """Cycles that a worker takes longer for another vector of four."""
    cycles_of_some, cycles_of_twice_as_many = (
        compute_profile(fun, [((times * _VECTORS * _VECTOR * _WORKERS,), dtype) for dtype in dtypes]).phase_cycles[
            "compute"
        ]
        for times in (1, 2)
    )
    return (cycles_of_twice_as_many - cycles_of_some) / _WORKERS / _VECTORS


def scaled_add_cycles(elements: int) -> tuple[int, Ends]:
    """Cycles of a scaled addition of floats, with those that the counters add, and their interval."""
    vector = ((elements,), jnp.float32)
    profile = compute_profile(scaled_add, [vector, vector, ((), jnp.float32)])
    cycles = profile.phase_cycles["compute"]
    with_counters = cycles + _COUNTERS_CYCLES
    low, high = ((end * cycles + _COUNTERS_CYCLES) / with_counters for end in interval_of(profile, ("compute",)))
    return with_counters, (low, high)


def family() -> Family:
    """All expressions."""
    half = jnp.float16
    unit = "a vector"
    behind_a_sum = cycles_per_vector(relu_of_sum, half, half) - cycles_per_vector(jnp.add, half, half)
    rows = [
        Row("ReLU by itself", 1, cycles_per_vector(relu, half), unit=unit),
        Row("ReLU behind a sum, what it adds", 1, behind_a_sum, unit=unit),
        Row("gradient of ReLU", 3, cycles_per_vector(relu_grad, half, half), unit=unit),
        Row("dropout, mask given", 2, cycles_per_vector(dropout, half, jnp.bool_), unit=unit),
        *(
            Row(f"scaled add, {elements} floats", cycles, simulated, 0.15, interval=interval)
            for elements, cycles in _SCALED_ADD.items()
            for simulated, interval in [scaled_add_cycles(elements)]
        ),
    ]
    source = (
        "PopLibs for cycles of a worker a vector of 4 halves (`popnn/PerformanceEstimation.hpp`, "
        "`poprand/poprandCycleEstimators.cpp`); a published reading of cycle counters for the scaled add of floats on "
        f"one Mk2 tile, of which the counters take {_COUNTERS_CYCLES} cycles."
    )
    how = (
        "The compute phase of JAX functions that are one vertex on one tile. PopLibs' codelets are hand-written "
        "assembly: a load or store is issued beside an arithmetic instruction, masks stay in registers, and dropout "
        "draws its own mask. The model issues one instruction at a time, and reads a mask as bytes."
    )
    return Family("Fused elementwise expressions", source, how, rows)
