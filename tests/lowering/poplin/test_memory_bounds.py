"""Plans that exceed the available memory: logged, in the profile and its summary, with line, bound and need."""

from __future__ import annotations

import inspect
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax import poplar, poplin
from ipujax.lowering.poplin import plan_matmul
from ipujax.lowering.poplin.spec import FIELD, OUT_CHANNELS
from ipujax.poplar.program import Sequence
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.target.presets import preset

FLOAT = np.float32


def dot(a, b):
    return a @ b


def windows(x, w):
    return lax.conv(x, w, (1, 1), "SAME")


CALLS = {
    "matmul": (dot, [(64, 64), (64, 64)]),
    "convolution": (windows, [(2, 8, 12, 12), (8, 8, 3, 3)]),
}


def profile_of(name: str, share: float, tiles: int = 4) -> Profile:
    fun, shapes = CALLS[name]
    device = ipu.IPUModel(tiles_per_ipu=tiles, available_memory_proportion=share)
    args = [jax.ShapeDtypeStruct(shape, FLOAT) for shape in shapes]
    return ipu.jit(fun, device=device).lower(*args).compile().profile


@pytest.mark.parametrize("name", CALLS)
def test_reports_an_unmet_bound_with_its_line(name, caplog):
    with caplog.at_level(logging.WARNING, "ipujax.poplin"):
        profile = profile_of(name, 0.001)
    (unmet,) = profile.unmet_bounds
    line = inspect.getsourcelines(CALLS[name][0])[1] + 1
    assert unmet.bound_bytes == int(0.001 * 638_976) < unmet.needed_bytes
    assert f"test_memory_bounds.py:{line}" in str(unmet.origin)
    message = f"needs {unmet.needed_bytes:,} bytes of a tile, of 638 that planners may use"
    (record,) = caplog.records
    assert message in record.message and f"test_memory_bounds.py:{line}" in record.message
    text = profile.summary()
    assert message in text and "Planned with more memory than the available proportion" in text


@pytest.mark.parametrize("name", CALLS)
def test_least_memory_counts_code(name):
    """The steps of a loop, and the parts that small blocks receive, may take more code than they free of data."""
    least, some = (profile_of(name, share, tiles=64) for share in (0, 0.05))
    assert least.memory.max_tile_bytes <= some.memory.max_tile_bytes


def test_reports_unmet_bounds_of_stages():
    def stages(w, x):
        with ipu.stage(0):
            y = dot(x, w)
        with ipu.stage(1):
            return dot(y, w.T)

    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=4, available_memory_proportion=0.001)
    shape = jax.ShapeDtypeStruct((64, 64), FLOAT)
    assert len(ipu.jit(stages, device=device).lower(shape, shape).compile().profile.unmet_bounds) == 2


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("share", [0.6, 0])
def test_does_not_report_a_met_bound_or_least_memory(name, share, caplog):
    profile = profile_of(name, share)
    assert not profile.unmet_bounds and not caplog.records
    assert "available proportion" not in profile.summary()


def test_warns_once_a_line_and_only_for_the_final_program(caplog):
    def layers(x, w):
        for _ in range(3):
            x = x @ w
        return x

    def compiled(kib: int):
        device = ipu.IPUModel(tiles_per_ipu=1, bytes_per_tile=kib * 1024, available_memory_proportion=0.01)
        args = [jax.ShapeDtypeStruct((32, 64), FLOAT), jax.ShapeDtypeStruct((64, 64), FLOAT)]
        return ipu.jit(layers, device=device).lower(*args).compile()

    with pytest.raises(
        ipu.TileMemoryError, match="plans that were tried"
    ):  # at every cost per byte, and never warned of
        compiled(32)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(compiled(64).profile.unmet_bounds) == 3
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_reports_the_bytes_of_operands_and_results(caplog):
    """On one tile steps save nothing: both operands and the result."""
    (unmet,) = profile_of("matmul", 0.001, tiles=1).unmet_bounds
    assert unmet.needed_bytes == 3 * 64 * 64 * 4


def test_reports_an_option_of_one_product_of_a_poplar_program(caplog):
    graph = poplar.Graph(poplar.IPUModel(tiles_per_ipu=2).create_device())
    a, b = (poplin.create_mat_mul_input_lhs(graph, poplar.FLOAT, [32, 32], [32, 32], name) for name in "ab")
    program = Sequence()
    poplin.mat_mul(graph, a, b, program, options={"availableMemoryProportion": 0.001})
    poplin.mat_mul(graph, a, b, program)
    (unmet,) = poplar.Engine(graph, program).profile.unmet_bounds
    assert unmet.bound_bytes == 638


@pytest.mark.parametrize(("layers", "batch"), [(4, 2048), (2, 4096)])
def test_program_that_fits_fits_in_more_memory(layers, batch):
    """Planners use more code where there is more memory: the region for code grows with it."""

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jnp.maximum(y @ w, 0)
            return jnp.mean(y.astype(FLOAT) ** 2)

        return [w - jnp.float16(0.01) * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]

    weights = [jax.ShapeDtypeStruct((512, 512), np.float16)] * layers
    x = jax.ShapeDtypeStruct((batch, 512), np.float16)

    def fits(kib: int) -> bool:
        try:
            ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=64, bytes_per_tile=kib * 1024)).lower(weights, x).compile()
        except ipu.TileMemoryError:
            return False
        return True

    results = [fits(kib) for kib in (512, 1024, 1536)]
    assert results == sorted(results) and results[-1], results


def test_partial_results_are_within_the_bound_twice():
    """A tile receives as many bytes of them as it has, to combine them."""
    target = preset("bow", 1)
    plan = plan_matmul(1, 256, 50_257, 768, np.float16, target)
    assert plan.slots > 1
    longest = [int(np.diff(cut).max()) for cut in plan.grid().cuts]
    num_bytes = 4 * longest[OUT_CHANNELS] * longest[FIELD]
    assert 2 * num_bytes <= plan.temp_bytes <= target.available_memory_proportion * target.bytes_per_tile
