"""The pass `memory_spaces`, and `offload` after it: jaxprs without the host, equal after each pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.jax_compat import ClosedJaxpr, check_jaxpr, is_on_host, jaxpr_as_fun
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.offload import Offloading, memory_spaces, offload
from ipujax.lowering.passes import PassSettings, run_passes
from ipujax.lowering.passes.inline import inline
from tests.ipujax.memory_kind_cases import CASES, copied, double, get, is_key, put

NAMES = [name for name, case in CASES.items() if not any(map(is_key, jax.tree.leaves(jax.eval_shape(case.args))))]


def traced(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    return jax.jit(fun).trace(*args).jaxpr


def values(jaxpr: ClosedJaxpr) -> list[Any]:
    """All variables of a jaxpr and of its inner ones."""
    body = jaxpr.jaxpr
    return [*body.invars, *body.constvars, *(var for eqn in equations(body) for var in (*eqn.invars, *eqn.outvars))]


@pytest.mark.parametrize("name", NAMES)
def test_moves_jaxprs_to_the_device_and_preserves_results(name: str) -> None:
    case = CASES[name]
    args = CASES[name].args()
    expected = jax.tree.leaves(jax.jit(case.fun)(*copied(args)))
    jaxpr = traced(case.fun, *args)
    hosted = tuple(is_on_host(aval) and aval.size > 1 for aval in jaxpr.in_avals)
    offloading = Offloading(hosted, (None,) * len(jaxpr.out_avals), hosted=hosted)
    passed = run_passes(jaxpr, PassSettings(offloading=offloading))
    for step, rewritten in list(passed.items())[list(passed).index("memory_spaces") :]:
        check_jaxpr(rewritten.jaxpr)
        assert not [var for var in values(rewritten) if is_on_host(var.aval)], step
        results = jaxpr_as_fun(rewritten)(*map(get, jax.tree.leaves(args)))
        for x, y in zip(results, expected, strict=True):
            np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-5, atol=1e-6)


def test_preserves_a_jaxpr_without_the_host() -> None:
    jaxpr = inline(traced(lambda x: jnp.tanh(x) * 2, jnp.ones(4)))
    assert memory_spaces(jaxpr) is jaxpr and offload(jaxpr) is jaxpr


def test_replaces_a_fetched_value_by_the_value() -> None:
    jaxpr = memory_spaces(inline(traced(lambda h: get(h) * 2, put(jnp.ones(4)))))
    (eqn,) = jaxpr.jaxpr.eqns
    assert eqn.primitive.name == "mul" and eqn.invars[0] is jaxpr.jaxpr.invars[0]


def test_adds_a_put_for_each_result_on_the_host() -> None:
    jaxpr = memory_spaces(inline(traced(lambda w, h: (put(w), put(w), h, h * 2), jnp.ones(4), put(jnp.ones(4)))))
    puts = [eqn.outvars[0] for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "host_put"]
    assert len(puts) == 4 and set(puts) == set(jaxpr.jaxpr.outvars)


def test_stores_a_state_in_the_memory_of_its_argument() -> None:
    def fun(h: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (double(c), None), h, None, length=3)[0]

    body = ipu.jit(fun, donate_argnums=0).lower(put(jnp.ones((4, 3)))).jaxpr.jaxpr
    (loop,) = body.eqns
    names = [eqn.primitive.name for eqn in loop.params["jaxpr"].jaxpr.eqns]
    assert loop.invars == body.invars and names == ["remote_load", "mul", "remote_store"]
    assert body.outvars == loop.outvars


def test_stores_come_before_loops_that_read_them() -> None:
    def fun(w: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (double(c), None), put(w + 1), None, length=3)[0]

    eqns = ipu.jit(fun).lower(jnp.ones((4, 3))).jaxpr.jaxpr.eqns
    assert [eqn.primitive.name for eqn in eqns] == ["add", "remote_put", "scan"]
