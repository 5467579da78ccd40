"""Stage i runs on IPU i, whichever numbers there are: numbers of plain JAX, and the figures of each IPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu

TILES = 8
NUM_IPUS = 4
KEY = np.random.default_rng(0)
PARAMS = [KEY.normal(size=(8, 8)).astype(np.float32) / 3 for _ in range(2)]
BATCH = KEY.normal(size=(8, 8)).astype(np.float32)


def forward(stages: tuple[int, int]) -> Callable:
    """Return two layers, each in its stage, with equations around them that are in none."""

    def run(params: Any, batch: Any) -> Any:
        h = batch * 2 + jnp.arange(8.0)
        for number, w in zip(stages, params, strict=True):
            with ipu.stage(number):
                h = jnp.tanh(h @ w)
        return h - 1

    return run


def loss(stages: tuple[int, int]) -> Callable:
    def run(params: Any, batch: Any) -> Any:
        h = forward(stages)(params, batch)
        with ipu.stage(stages[1]):
            return (h**2).mean()

    return run


def training(stages: tuple[int, int], *, replicated: bool = False) -> Callable:
    def step(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss(stages))(params, batch)
        if replicated:
            value, gradients = lax.pmean((value, gradients), "replica")
        return value, [w - 0.1 * g for w, g in zip(params, gradients, strict=True)]

    return step


def pipelined(stages: tuple[int, int], **settings: Any) -> Callable:
    def step(params: Any, batch: Any) -> Any:
        step_of = ipu.pipeline(jax.value_and_grad(loss(stages)), micro_batches=4, **settings)
        value, gradients = step_of(params, batch)
        return value, [w - 0.1 * g for w, g in zip(params, gradients, strict=True)]

    return step


def loop(number: int) -> Callable:
    """Return a loop, a branch and an unused argument in one stage, and a result that is an argument."""

    def run(params: Any, batch: Any) -> Any:
        with ipu.stage(number):
            h = lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), batch, jnp.stack(params))
            return lax.cond(h[1][0] > 0, jnp.sin, jnp.cos, h[0]), batch

    return run


@dataclass(frozen=True)
class Case:
    """A function, the IPUs of a replica that work, and settings of `ipu.jit`."""

    function: Callable
    ipus: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


DONATED = {"donate_argnums": 0}
CASES: dict[str, Case] = {
    "one": Case(forward((1, 1)), (1,)),
    "nothing in stage 0": Case(forward((1, 2)), (1, 2)),
    "gap": Case(forward((1, 3)), (1, 3)),
    "gap after stage 0": Case(forward((0, 2)), (0, 2)),
    "last": Case(forward((3, 3)), (3,), {"options": ipu.Options(io_tiles=2)}),
    "loop and branch": Case(loop(2), (2,)),
    "gradient": Case(training((1, 1)), (1,), DONATED),
    "gradients of a gap": Case(training((1, 3)), (1, 3), DONATED),
    "offloaded": Case(training((1, 2)), (1, 2), {**DONATED, "offload_argnums": 0}),
    "pipeline": Case(pipelined((1, 2)), (1, 2), DONATED),
    "pipeline of a gap": Case(pipelined((1, 3), schedule="gpipe"), (1, 3), DONATED),
    "pipeline of one stage": Case(pipelined((2, 2)), (2,), DONATED),
    "mapping": Case(pipelined((0, 1), device_mapping=[3, 1]), (1, 3), DONATED),
    "mapping of a gap": Case(pipelined((1, 2), device_mapping=[0, 3, 3]), (3,), DONATED),
    "sequential": Case(pipelined((0, 1), device_mapping=[2, 1], schedule="sequential"), (1, 2), DONATED),
}


def by_ipu(tiles: Any) -> np.ndarray:
    """Return the sums of a figure of each tile over each IPU."""
    return np.asarray(tiles).reshape(-1, TILES).sum(1)


def compute_cycles(profile: ipu.Profile) -> np.ndarray:
    cycles = np.array(profile.graph()["computeSets"]["cycleEstimates"]["cyclesByTile"])
    return by_ipu(cycles.sum(0))


def check_ipus(profile: ipu.Profile, ipus: tuple[int, ...], replicas: int = 1) -> None:
    """Require that compute cycles, variables, exchanged data and code are on some IPUs of each replica and no other."""
    is_used = np.isin(np.arange(NUM_IPUS), ipus)
    np.testing.assert_array_equal(compute_cycles(profile) > 0, is_used)
    figures = profile.memory.by_category
    for category in ("variable", "vertexCode", "vertexInstanceState", "message", "hostExchangeCode"):
        assert not by_ipu(figures[category])[~is_used].any(), category
    assert by_ipu(figures["variable"])[is_used].all()
    assert by_ipu(figures["vertexCode"])[is_used].all()


PARAMETERS = [pytest.param(case, id=name) for name, case in CASES.items()]


@pytest.mark.parametrize("case", PARAMETERS)
def test_stages_stay_on_the_ipus_of_their_numbers(case: Case) -> None:
    device = ipu.IPUModel(NUM_IPUS, tiles_per_ipu=TILES)
    expected = jax.jit(case.function)(PARAMS, BATCH)
    compiled = ipu.jit(case.function, device=device, **case.settings).lower(PARAMS, BATCH).compile()
    check_ipus(compiled.profile, case.ipus)
    results = compiled(PARAMS, BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), results, expected)


@pytest.mark.parametrize("stages", [(1, 1), (1, 3)])
def test_stages_of_replicas(stages: tuple[int, int]) -> None:
    function = ipu.jit(
        training(stages, replicated=True),
        device=ipu.IPUModel(2 * NUM_IPUS, tiles_per_ipu=TILES),
        replicas=2,
        in_specs=(P(), P("replica")),
        out_specs=P(),
    )
    compiled = function.lower(PARAMS, BATCH).compile()
    check_ipus(compiled.profile, tuple(sorted(set(stages))))
    expected = jax.jit(training(stages))(PARAMS, BATCH)
    results = compiled(PARAMS, BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), results, expected)


def test_numbers_of_stages_do_not_change_the_cycles() -> None:
    device = ipu.IPUModel(NUM_IPUS, tiles_per_ipu=TILES)
    cases = [pipelined((0, 1)), pipelined((1, 2)), pipelined((0, 1), device_mapping=[1, 2])]
    profiles = [ipu.jit(f, device=device).lower(PARAMS, BATCH).compile().profile for f in cases]
    # IPUs 0 and 1 have more links than 1 and 2.
    own_cycles = [profile.cycles - profile.phase_cycles["global_exchange"] for profile in profiles]
    assert len(set(own_cycles)) == 1 and profiles[1].cycles == profiles[2].cycles
    assert [[(row.stage, row.ipu) for row in profile.stages] for profile in profiles] == [
        [(0, 0), (1, 1)],
        [(1, 1), (2, 2)],
        [(0, 1), (1, 2)],
    ]


TOO_HIGH: dict[str, tuple[Callable, str]] = {
    "alone": (forward((7, 7)), r"stage 7 has no IPU\n.*test_ipus_of_stages.py.*\n.*8 IPUs, stage i on.*\n.*4 for each"),
    "gap": (forward((1, 4)), r"stage 4 has no IPU\n.*\n.*5 IPUs.*\n.*4 for each replica"),
    "loop": (loop(5), r"stage 5 has no IPU\n.*\n.*6 IPUs"),
    "pipeline": (pipelined((1, 4)), r"stage 4 of .* has no IPU 4\n.*\n.*5 IPUs\n.*4 for each replica"),
    "mapping": (pipelined((1, 2), device_mapping=[0, 1, 6]), r"stage 2 of .* has no IPU 6\n.*\n.*7 IPUs"),
    "short mapping": (pipelined((1, 2), device_mapping=[1, 2]), r"does not fit its stages\n.*\n.*each of 3 stages"),
}


@pytest.mark.parametrize(("function", "text"), TOO_HIGH.values(), ids=TOO_HIGH.keys())
def test_stages_without_an_ipu_are_refused(function: Callable, text: str) -> None:
    device = ipu.IPUModel(NUM_IPUS, tiles_per_ipu=TILES)
    with pytest.raises(ipu.IpuError, match=text):
        ipu.jit(function, device=device).lower(PARAMS, BATCH)
