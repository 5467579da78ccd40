"""`Compiled.on`: a program that is held over to another machine has the figures of one compiled there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.target import held_constants, program_constants

# Constants that no plan of this program depends on: it is compiled to the same program.
CHANGES: list[dict[str, Any]] = [
    {"internal_sync_cycles": 300},
    {"host_latency_seconds": 5e-5, "host_bytes_per_second": 1e9},
    {"clock_hz": 1e9},
    {"bytes_per_tile": 2**20},
    {"supervisor_overhead_cycles": 40},
    {"exchange_receive_instructions": 7},
]


def layer(weights: Any, x: Any) -> Any:
    return jnp.tanh(x @ weights).sum()


def compiled(device: ipu.IPUModel) -> ipu.Compiled:
    return ipu.jit(layer, device=device).lower(jnp.ones((64, 48)), jnp.ones((32, 64))).compile()


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: ", ".join(changes))
def test_a_held_program_equals_a_compiled_one(changes: dict[str, Any]) -> None:
    device = ipu.IPUModel(1, "mk2", tiles_per_ipu=16, **changes)
    held = compiled(ipu.IPUModel(1, "mk2", tiles_per_ipu=16)).on(device)
    anew = compiled(device)
    assert held.as_text() == anew.as_text()
    assert held.profile.cycles == anew.profile.cycles
    assert held.profile.phase_cycles == anew.profile.phase_cycles
    assert held.profile.seconds == anew.profile.seconds
    np.testing.assert_array_equal(held.profile.memory.tile_bytes, anew.profile.memory.tile_bytes)
    assert held.profile.target == anew.profile.target == held.lowered.graph.target == device.target


def test_it_runs_and_the_first_is_unchanged() -> None:
    first = compiled(ipu.IPUModel(1, "mk2", tiles_per_ipu=16))
    cycles = first.profile.cycles
    slow = first.on(ipu.IPUModel(1, "mk2", tiles_per_ipu=16, exchange_bytes_per_cycle=0.5))
    assert slow.profile.cycles > cycles == first.profile.cycles
    x = jax.random.normal(jax.random.key(0), (32, 64))
    weights = jax.random.normal(jax.random.key(1), (64, 48))
    np.testing.assert_allclose(slow(weights, x), layer(weights, x), rtol=1e-5)


def test_tiles_that_are_too_small() -> None:
    first = compiled(ipu.IPUModel(1, "mk2", tiles_per_ipu=16))
    fullest = first.profile.memory.max_tile_bytes
    small = first.on(ipu.IPUModel(1, "mk2", tiles_per_ipu=16, bytes_per_tile=fullest // 2))
    assert small.profile.memory.lacking()
    assert not first.profile.memory.lacking()
    assert small.profile.memory.max_tile_bytes > fullest // 2


@pytest.mark.parametrize("name", ["tiles_per_ipu", "worker_contexts", "vector_width_bytes", "conv_units_fp16"])
def test_constants_that_change_the_program(name: str) -> None:
    first = compiled(ipu.IPUModel(1, "mk2", tiles_per_ipu=16))
    changed: Any = {"tiles_per_ipu": 16, name: 4}
    with pytest.raises(ipu.TargetError, match=f"(?s)depends on {name}.*compile again"):
        first.on(ipu.IPUModel(1, "mk2", **changed))


def test_other_devices() -> None:
    with pytest.raises(ipu.ArgumentError, match="costed on a machine"):
        compiled(ipu.IPUModel(1, "mk2", tiles_per_ipu=16)).on(ipu.CPU())


def test_every_constant_is_held_or_not() -> None:
    assert not set(held_constants()) & set(program_constants())
    assert len(held_constants()) + len(program_constants()) + 1 == len(ipu.Target.__dataclass_fields__)
