"""Attribution of training steps: the update has the cycles outside of the pipeline, or of the accumulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax.runtime.profile.program_costs import ProgramNode
from tests.ipujax.random_steps import profile_of, random_step

SEEDS = (range(0, 3), range(3, 26), range(26, 50))  # the fast suite has the first
MOST = 0.01  # of busy cycles
W = jax.ShapeDtypeStruct((64, 64), jnp.float32)
X = jax.ShapeDtypeStruct((256, 64), jnp.float32)


def parts_of(profile: ipu.Profile) -> Counter[str]:
    parts = Counter[str]()
    for row in profile.layers:
        parts[row.part] += row.cycles
    return parts


def outside_of_loops(node: ProgramNode) -> int:
    """Cycles of a tree outside of its loops, without transfers."""
    if node.type == "Repeat":
        return 0
    return sum(map(outside_of_loops, node.children)) if node.children else node.cycles * (node.type != "StreamCopy")


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_attribution_of_random_updates(seeds: range) -> None:
    for case in map(random_step, seeds):
        profile = profile_of(case)
        outside = (
            sum(row.phases["outside"] for row in profile.stages)
            if case.stages > 1
            else outside_of_loops(profile.program_costs)
        )
        parts = parts_of(profile)
        assert parts[""] == 0, case
        assert abs(parts["update"] - outside) <= MOST * profile.busy_cycles, (case, parts, outside)


def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def returned(w: jax.Array, x: jax.Array) -> Any:
    return w - 0.1 * gradient(w, x), jnp.sort(x, 0)[:2]


def scaled(w: jax.Array, x: jax.Array) -> Any:
    return w - 0.1 * gradient(w, jnp.sort(x, 0))


def clipped(w: jax.Array, x: jax.Array) -> Any:
    g = gradient(w, x)
    return w - jnp.sort(g, 0)


def cast(w: jax.Array, x: jax.Array) -> Any:
    return w - 0.1 * gradient(jnp.sort(w, 0), x)


def in_epochs(w: jax.Array, x: jax.Array) -> Any:
    return jax.lax.scan(lambda w, rows: (w - jnp.sort(gradient(w, rows), 0), None), w, x.reshape(4, 64, 64))[0]


def accumulated(w: jax.Array, x: jax.Array) -> Any:
    total, _ = jax.lax.scan(
        lambda total, rows: (total + jnp.sort(gradient(w, rows), 0), None), jnp.zeros_like(w), x.reshape(4, 64, 64)
    )
    return w - 0.1 * total


def when_finite(w: jax.Array, x: jax.Array) -> Any:
    g = gradient(w, x)
    return jax.lax.cond(jnp.isfinite(g).all(), lambda: w - jnp.sort(g, 0), lambda: w)


@pytest.mark.parametrize(
    ("step", "part"),
    [
        (returned, ""),  # neither reads nor is read by anything of the training: no part, above all not the update
        (scaled, "forward"),
        (clipped, "update"),
        (cast, "update"),
        (in_epochs, "update"),
        (accumulated, "backward"),
        (when_finite, "update"),
    ],
)
def test_attribution_by_data_flow(step: Callable[..., Any], part: str) -> None:
    profile = ipu.jit(step).profile(W, X)
    sorts = {row.origin.part for row in profile.step_costs if row.cycles and "sort" in row.name}
    assert sorts == {part}


def test_attribution_of_a_loss_beside_its_gradient() -> None:
    """Both compute one forward part, which is that of the gradient."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def step(w: jax.Array, x: jax.Array) -> Any:
        before = loss(w, x)
        return w - 0.1 * jax.grad(loss)(w, x), before

    parts = parts_of(ipu.jit(step).profile(W, X))
    assert parts["forward"] > 0 and parts[""] == 0


def test_attribution_without_a_gradient() -> None:
    assert set(parts_of(ipu.jit(lambda w, x: jnp.sort(x @ w)).profile(W, X))) == {""}


def test_attribution_of_collectives_and_streams() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.lax.pmean(gradient(w, x), "replica")

    P = jax.sharding.PartitionSpec
    device = ipu.IPUModel(num_ipus=2)
    profile = ipu.jit(step, device=device, replicas=2, in_specs=(P(), P("replica")), out_specs=P()).profile(W, X)
    parts = parts_of(profile)
    # All exchange between IPUs is of the collective, all of the host of streams.
    phases = {part: Counter[str]() for part in parts}
    for row in profile.layers:
        phases[row.part].update(row.phases)
    assert [part for part, cycles in phases.items() if cycles["global_exchange"]] == ["collectives"]
    assert [part for part, cycles in phases.items() if cycles["host_exchange"]] == ["streams"]
    assert parts["forward"] and parts["backward"] and parts["update"] and not parts[""]
