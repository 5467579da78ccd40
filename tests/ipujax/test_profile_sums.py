"""Figures of random programs add up and are the same in every view: stages × replicas × schedules × layers."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import Phase, given, settings, strategies as st

import ipujax as ipu
from ipujax.lowering.schedules import SCHEDULES
from tests.runtime.profile.sums import check_sums

Struct = jax.ShapeDtypeStruct
WIDTH = 8


@dataclass(frozen=True)
class Case:
    """A training step: layers of each stage, and how they are run."""

    layers: tuple[int, ...]
    replicas: int
    schedule: str
    micro_batches: int
    exchange: str
    is_scanned: bool
    is_recomputed: bool
    is_half: bool

    @property
    def stages(self) -> int:
        """Number of stages, one an IPU."""
        return len(self.layers)


CASES = st.builds(
    Case,
    layers=st.sampled_from([(2,), (1, 2), (1, 1, 2, 1)]),
    replicas=st.sampled_from([1, 2]),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    micro_batches=st.sampled_from([4, 8]),
    exchange=st.sampled_from(["lockstep", "buffered"]),
    is_scanned=st.booleans(),
    is_recomputed=st.booleans(),
    is_half=st.booleans(),
).filter(lambda case: case.micro_batches >= 2 * case.stages - 1)  # "grouped" needs as many to fill its stages


def dense(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def profile_of(case: Case) -> ipu.Profile:
    """The profile of a case, from shapes."""
    layer = jax.checkpoint(dense) if case.is_recomputed else dense

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for number, weights in enumerate(params):
            with ipu.stage(number):
                if case.is_scanned:
                    x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, weights)
                else:
                    for w in weights:
                        x = layer(w, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params: Any, x: jax.Array) -> Any:
        given_schedule: dict[str, Any] = {"schedule": case.schedule} if case.stages > 1 else {}  # one stage has none
        grad = ipu.pipeline(jax.value_and_grad(loss), micro_batches=case.micro_batches, **given_schedule)
        value, grads = grad(params, x)
        if case.replicas > 1:
            value, grads = jax.lax.pmean((value, grads), "replica")
        return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, grads), value

    dtype = jnp.float16 if case.is_half else jnp.float32
    params = [Struct((layers, WIDTH, WIDTH), dtype) for layers in case.layers]
    x = Struct((2 * case.micro_batches * case.replicas, WIDTH), dtype)
    num_ipus = case.stages * case.replicas
    device = ipu.IPUModel(num_ipus=num_ipus, tiles_per_ipu=4, global_exchange=case.exchange)
    specs: dict[str, Any] = {}
    if case.replicas > 1:
        specs = {"replicas": case.replicas, "in_specs": (jax.P(), jax.P("replica")), "out_specs": jax.P()}
    return ipu.jit(step, device=device, **specs).profile(params, x)


# No shrinking: cases are small, and each takes seconds.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
unshrunk = partial(settings, phases=PHASES)


@pytest.mark.filterwarnings("ignore:step uses")  # two chunks of a looped schedule share an IPU
@unshrunk(max_examples=2)
@given(CASES)
def test_figures_add_up_in_every_view(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_sums(profile_of(case), Path(folder))


@pytest.mark.filterwarnings("ignore:step uses")
@unshrunk(max_examples=60)
@given(CASES)
def test_figures_of_many_programs_and_of_their_files_add_up_in_every_view(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        profile = profile_of(case)
        check_sums(profile, Path(folder))
        profile.save(Path(folder) / "saved")
        check_sums(ipu.Profile.load(Path(folder) / "saved"), Path(folder))
