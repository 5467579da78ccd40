"""Division of the work of steps among lines, layers and operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st

import ipujax as ipu
from ipujax.runtime.profile.attribution import divide


@given(st.integers(0, 10**15), st.lists(st.integers(0, 10**9), min_size=1).filter(any))
def test_parts_add_up_and_are_in_proportion(total, weights):
    parts = divide(total, weights)
    assert sum(parts) == total
    full = sum(weights)
    assert all(abs(part * full - total * weight) < full for part, weight in zip(parts, weights, strict=True))


def test_the_largest_remainder_is_rounded_up():
    assert divide(10, [1, 1, 1]) == [4, 3, 3]
    assert divide(7, [3, 0, 4]) == [3, 0, 4]


def _layer(w, x):
    return jnp.tanh(x @ w)


def _loss(params, x):
    with ipu.stage(0):
        x = _layer(params[0], x)
    with ipu.stage(1):
        return (_layer(params[1], x) ** 2).mean()


@settings(max_examples=6)
@given(st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from(["1f1b", "gpipe"]), st.sampled_from([8, 24]))
def test_lines_layers_and_operations_add_up_to_busy_cycles(replicas, micro_batches, schedule, width):
    params = [jnp.ones((16, 16)), jnp.ones((16, 16))]

    def step(params, x):
        grad = ipu.pipeline(jax.value_and_grad(_loss), micro_batches=micro_batches, schedule=schedule)
        loss, grads = grad(params, x)
        if replicas > 1:
            loss, grads = jax.lax.pmean((loss, grads), "replica")
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    device = ipu.IPUModel(num_ipus=2 * replicas, tiles_per_ipu=8)
    specs = (jax.P(), jax.P("replica")) if replicas > 1 else None
    stepped = ipu.jit(step, device=device, replicas=replicas, in_specs=specs, out_specs=jax.P() if specs else None)
    x = jax.ShapeDtypeStruct((8 * replicas, 16), np.float32)
    profile = stepped.lower(params, x).compile().profile
    for rows in (profile.step_costs, profile.operations(), profile.operations(lines="library"), profile.layers):
        assert sum(row.cycles for row in rows) == profile.busy_cycles
        assert all(sum(row.phases.values()) == row.cycles for row in rows)
    limiting = profile.cycles - profile.phase_cycles["idle"]
    assert sum(row.limiting_cycles for row in profile.step_costs) == limiting
    for phases in profile.ipu_phase_cycles:
        assert sum(phases.values()) == profile.cycles


def test_the_equations_of_a_fused_vertex_have_their_lines():
    def fun(x):
        y = jnp.exp(x) * 2.0
        y = y + jnp.sin(x)
        return jnp.tanh(y)

    profile = ipu.jit(fun, device=ipu.IPUModel(tiles_per_ipu=16)).lower(jnp.ones(4096)).compile().profile
    first = fun.__code__.co_firstlineno
    here = {n: [row for row in profile.step_costs if f":{first + n} " in str(row.origin)] for n in (1, 2, 3)}
    assert all(any(row.cycles for row in rows) for rows in here.values())
    cycles = {n: sum(row.phases.get("compute", 0) for row in rows) for n, rows in here.items()}
    assert cycles[2] > cycles[1] and cycles[2] > cycles[3]  # a sine takes 25 to 2,304 cycles, the others a few


def test_a_slow_number_beside_a_product_does_not_count_as_the_product():
    """Both are one compute set: the power keeps one tile busy, the product all tiles for a fifth of the time."""

    def product(x, w):
        return x @ w

    def both(x, w, n):
        return product(x, w), jnp.float32(0.9) ** n.astype(jnp.float32)

    device = ipu.IPUModel(tiles_per_ipu=32)
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((8, 64), (64, 64))]
    alone = ipu.jit(product, device=device).profile(*shapes)
    beside = ipu.jit(both, device=device).profile(*shapes, jax.ShapeDtypeStruct((), np.int32))
    right, got = (
        sum(row.cycles for row in profile.step_costs if row.name.startswith("dot_general"))
        for profile in (alone, beside)
    )
    assert 0.7 * right < got <= right


def test_a_function_is_divided_among_its_calls():
    def layer(w, x):
        return jnp.tanh(jnp.sin(x @ w) @ w)

    def fun(w, x):
        for n in range(4):
            with jax.named_scope(f"layer{n}"):
                x = layer(w[n], x)
        return x

    device = ipu.IPUModel(tiles_per_ipu=64)
    profile = ipu.jit(fun, device=device).lower(jnp.ones((4, 256, 256)), jnp.ones((64, 256))).compile().profile
    assert sum(row.cycles for row in profile.layers) == profile.busy_cycles


def test_a_line_that_is_fused_with_another_does_not_call_it():
    def scaled(x):
        y = jnp.cos(x)
        return y * jnp.exp(x)

    rows = ipu.jit(scaled).profile(jnp.ones((64,))).operations()
    lines = {str(row.origin) for row in rows if "(scaled)" in str(row.origin)}
    assert len(lines) == 2
    assert lines.isdisjoint(caller for row in rows for caller in row.callers)
