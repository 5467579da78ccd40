"""Bounds of cycles: never above any plan, of any machine; closed forms of single terms."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from tests.lowering.random_plans import random_planners

# Machines on which transfers of the host take no time, so that a bound has to hold for the tiles alone.
NO_HOST = {"host_latency_seconds": 0.0, "host_bytes_per_second": 1e18}
Struct = jax.ShapeDtypeStruct


def array(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return Struct(shape, dtype)


def machine(tiles: int = 64, num_ipus: int = 1, **changes: Any) -> ipu.IPUModel:
    return ipu.IPUModel(num_ipus, "mk2", tiles_per_ipu=tiles, **changes)


def profile(fun: Callable[..., Any], *args: Any, device: ipu.IPUModel | None = None, **settings: Any) -> ipu.Profile:
    options = ipu.Options(allow_out_of_memory=True)
    return ipu.jit(fun, device=device or machine(**NO_HOST), options=options, **settings).profile(*args)


def recurrence(w: Any, x: Any) -> Any:
    return lax.scan(lambda h, row: (jnp.tanh(h @ w + row), h.sum()), x[0], x)


def backward_recurrence(w: Any, x: Any) -> Any:
    return jax.value_and_grad(lambda w: recurrence(w, jnp.sin(x) @ w)[0].sum())(w)


def added_products(x: Any, y: Any) -> Any:
    def step(total: Any, rows: Any) -> Any:
        return total + jnp.einsum("bm,bn->mn", rows[0], jnp.cos(rows[1])), None

    return lax.scan(step, jnp.zeros((x.shape[-1], y.shape[-1])), (x, y))[0]


def filtered(transition: Any, x: Any) -> Any:
    def observe(predicted: Any, row: Any) -> Any:
        joint = predicted + row
        return jax.nn.logsumexp(joint[:, None] + transition, 0), jax.nn.logsumexp(joint)

    return lax.scan(observe, x[0], x)


def trained(ws: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        h = x
        for w in ws:
            h = jax.nn.relu(h @ w)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))


def pooled(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        h = lax.conv_general_dilated(x, w, (2, 2), ((1, 2), (2, 2)), (2, 1), (1, 2))
        h = lax.reduce_window(jax.nn.relu(h), -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        return jnp.sum(jnp.sin(h))

    return jax.value_and_grad(loss)(w)


def normalised(x: Any, w: Any) -> Any:
    return jax.nn.softmax((x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1) @ w)


def branched(flag: Any, x: Any) -> Any:
    return lax.cond(flag, lambda x: jnp.exp(x).sum() + x, lambda x: x * 2, x)


def whole(i: Any, x: Any) -> Any:
    return jnp.where(i % 3 == 0, i * i, -i), lax.sort(x), jnp.cumsum(x, 1), jnp.argmax(x, 0), x.at[0].add(x[1])


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "recurrence": (recurrence, (array(12, 12), array(5, 3, 12))),
    "backward": (backward_recurrence, (array(12, 12), array(9, 3, 12))),
    "sums": (added_products, (array(12, 4, 24), array(12, 4, 9))),
    "filter": (filtered, (array(7, 7), array(6, 7))),
    "training": (trained, ([array(24, 24)] * 3, array(8, 24))),
    "half": (trained, ([array(16, 16, dtype=np.float16)] * 2, array(32, 16, dtype=np.float16))),
    "emulated": (trained, ([array(8, 8, dtype=jnp.bfloat16)], array(4, 8, dtype=jnp.bfloat16))),
    "convolution": (pooled, (array(4, 3, 3, 3), array(2, 3, 12, 12))),
    "rows": (normalised, (array(9, 16), array(16, 5))),
    "branch": (branched, (array(dtype=bool), array(33))),
    "integers": (whole, (array(40, dtype=np.int32), array(5, 8))),
    "matrices": (lambda a, b: (a.astype(np.int32) @ b.astype(np.int32)).T, (array(6, 9), array(9, 4))),
}


def random_machine(draw: random.Random) -> ipu.IPUModel:
    """A machine of few tiles on which some constants are extreme."""
    choices = {
        **{"exchange_bytes_per_cycle": [1, 4, 64], "fp32_amp_macs_per_cycle": [1, 16, 256]},
        **{"fp16_amp_macs_per_cycle": [2, 64, 512], "internal_sync_cycles": [0, 126, 2000]},
        **{"exchange_startup_cycles": [0, 115], "load_bytes_per_cycle": [8, 16, 128]},
        **{"store_bytes_per_cycle": [8, 64], "worker_contexts": [1, 3, 6, 9], "vector_width_bytes": [8, 16]},
        **{"supervisor_overhead_cycles": [0, 11, 50], "worker_issue_period_cycles": [1, 6]},
    }
    changes = {name: draw.choice(values) for name, values in choices.items() if draw.random() < 0.4}
    return machine(draw.choice([1, 2, 5, 16, 64]), **NO_HOST, **(changes if draw.random() < 0.6 else {}))


@pytest.mark.parametrize("part", range(20))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_random_plan_is_below(name: str, part: int) -> None:
    draw = random.Random(f"{name} {part}")
    fun, args = FUNCTIONS[name]
    with random_planners(draw):
        figures = profile(fun, *args, device=random_machine(draw))
        bound = figures.bound
    assert 0 < bound.cycles <= figures.cycles
    assert 0 < bound.own_steps_cycles <= figures.cycles
    assert bound.cycles == bound.host_cycles + bound.exchange_cycles + bound.sync_cycles + bound.compute_cycles


@pytest.mark.parametrize(("dtype", "rate"), [(np.float32, 16), (np.float16, 64)])  # published, multiply-adds a cycle
def test_a_large_product_on_one_tile_takes_the_peak_rate(dtype: Any, rate: int) -> None:
    operands = array(6000, 512, dtype=dtype), array(512, 32, dtype=dtype)
    figures = profile(jnp.matmul, *operands, device=machine(1, **NO_HOST), donate_argnums=(0, 1))
    least = 6000 * 512 * 32 / rate
    assert least < figures.bound.compute_cycles < 1.05 * least
    assert figures.bound.sync_cycles == 126
    few_rows = profile(jnp.matmul, array(6, 512, dtype=dtype), operands[1], device=machine(1, **NO_HOST))
    assert few_rows.bound.compute_cycles > 1.2 * least / 1000  # passes of few rows do not reach it


def test_the_host_takes_two_latencies_and_all_bytes() -> None:
    figures = profile(lambda x: x + 1, array(1 << 16), device=machine())
    target = figures.target
    seconds = 2 * target.host_latency_seconds + 2 * 4 * (1 << 16) / target.host_bytes_per_second
    assert figures.bound.host_cycles == int(seconds * target.clock_hz)
    donated = profile(lambda x: x + 1, array(1 << 16), device=machine(), donate_argnums=0)
    assert donated.bound.host_cycles == 0


@pytest.mark.parametrize("length", [5, 16])
def test_each_iteration_of_a_recurrence_takes_its_compute_sets(length: int) -> None:
    def steps(w: Any, h: Any) -> Any:
        return lax.fori_loop(0, length, lambda _, h: jnp.tanh(h @ w), h)

    bound = profile(steps, array(8, 8), array(4, 8)).bound
    assert bound.sync_cycles == 2 * length * 126  # a product, and the hyperbolic tangent of its result


def test_independent_iterations_take_one_path() -> None:
    bound = profile(lambda x: lax.map(jnp.tanh, x), array(16, 8)).bound
    assert bound.sync_cycles <= 2 * 126


def test_a_row_is_no_later_than_that_of_another_iteration() -> None:
    def of_rows(w: Any, x: Any) -> Any:
        late = jnp.tanh(jnp.tanh(jnp.tanh(x[0] @ w) @ w) @ w)
        _, rows = lax.scan(lambda h, row: (row, jnp.sin(h)), late, x)
        return jnp.cos(rows[1])  # of an argument, while the first row is that of the products

    def without(w: Any, x: Any) -> Any:
        late = jnp.tanh(jnp.tanh(jnp.tanh(x[0] @ w) @ w) @ w)
        return jnp.sin(late), jnp.cos(jnp.sin(x[0]))

    longer, shorter = (profile(fun, array(8, 8), array(4, 2, 8)).bound for fun in (of_rows, without))
    assert longer.sync_cycles <= shorter.sync_cycles + 126  # the loop has a vertex of its own


def two_stages(ws: Any, x: Any) -> Any:
    with ipu.stage(0):
        h = jnp.tanh(x @ ws[0])
    with ipu.stage(1):
        return jnp.mean(jnp.tanh(h @ ws[1]) ** 2)


def pipelined(ws: Any, x: Any) -> Any:
    return ipu.pipeline(jax.value_and_grad(two_stages), micro_batches=4)(ws, x)


def summed(x: Any) -> Any:
    return lax.psum(jnp.tanh(x @ x.T), "replica")


def streamed(state: Any, x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * 0.9 + x.sum(), state)


@pytest.mark.parametrize("host", [{}, NO_HOST])
def test_bounds_of_several_ipus_hold(host: dict[str, float]) -> None:
    profiles = [
        profile(pipelined, [array(64, 64)] * 2, array(32, 64), device=machine(16, 2, **host)),
        profile(
            pipelined, [array(64, 64)] * 2, array(32, 64), device=machine(16, 2, global_exchange="buffered", **host)
        ),
        profile(summed, array(24, 24), device=machine(16, 4, **host), replicas=4),
        profile(streamed, {"w": array(64, 64)}, array(64), device=machine(16, **host), offload_argnums=0),
    ]
    for figures in profiles:
        assert 0 < figures.bound.cycles <= figures.cycles
        assert 0 < figures.bound.own_steps_cycles <= figures.cycles


def test_a_recorded_run_has_a_bound() -> None:
    def grow(x: Any) -> Any:
        return lax.while_loop(lambda x: x.sum() < 100, lambda x: x * 2, x)

    compiled = ipu.jit(grow, device=machine()).lower(array(64)).compile()
    with pytest.raises(ipu.ProfileError, match="trip count"):
        _ = compiled.profile.bound
    _, figures = compiled.profile_call(jnp.ones(64))
    assert 0 < figures.bound.cycles <= figures.cycles


def test_a_saved_profile_has_its_bound(tmp_path: Any) -> None:
    figures = profile(trained, [array(24, 24)] * 2, array(8, 24))
    figures.save(tmp_path / "profile.json")
    assert ipu.Profile.load(tmp_path / "profile.json").bound == figures.bound


def test_the_bound_on_another_machine_is_that_of_it() -> None:
    compiled = ipu.jit(trained, device=machine(**NO_HOST)).lower([array(64, 64)] * 2, array(64, 64)).compile()
    fast = machine(**NO_HOST, fp32_amp_macs_per_cycle=256)
    again = ipu.jit(trained, device=fast).lower([array(64, 64)] * 2, array(64, 64)).compile()
    assert compiled.on(fast).profile.bound.cycles == again.profile.bound.cycles < compiled.profile.bound.cycles


@pytest.mark.parametrize("name", ["training", "filter"])
def test_the_gap_by_cause_adds_up(name: str) -> None:
    fun, args = FUNCTIONS[name]
    figures = profile(fun, *args, device=machine())
    bound = figures.bound
    assert sum(cause.least_cycles for cause in figures.causes) == bound.cycles
    assert sum(figures.gap.values()) == figures.cycles - bound.cycles
    assert all(0 <= cause.least_cycles <= max(0, cause.cycles) for cause in figures.causes)
    assert list(figures.gap)[-1] == "splitting of operations"
    least = {cause.name: cause.least_cycles for cause in figures.causes}
    assert least["unequal work of tiles"] == 0  # another plan may be even
    host = ("state that is not donated", "other transfers of the host")
    assert sum(least.get(cause, 0) for cause in host) == bound.host_cycles
    assert f"no plan on this machine takes less than {bound.cycles:,} cycles" in figures.summary()


def test_a_program_by_hand_has_the_bound_of_its_vertices() -> None:
    from ipujax import poplar, popops

    graph = poplar.Graph(machine(8, **NO_HOST).target)
    x = graph.add_variable(poplar.FLOAT, [64], "x")
    graph.set_tile_mapping(x, 0)
    sequence = poplar.program.Sequence()
    popops.add_in_place(graph, x, x, sequence, "twice")
    figures = poplar.Engine(graph, sequence).profile
    assert 126 < figures.bound.cycles <= figures.bound.own_steps_cycles <= figures.cycles
