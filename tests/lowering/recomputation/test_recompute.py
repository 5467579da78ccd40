"""Pass `recompute`: training steps of every kind give the same bits, and compute again what they say."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    DropVar,
    JaxprEqn,
    Literal,
    Var,
    check_jaxpr,
    eval_equation,
    eval_jaxpr,
)
from ipujax.lowering.jaxpr import VIEWS, equations, phase_of, stage_name, variables_read
from ipujax.lowering.passes import run_passes
from ipujax.lowering.recomputation import KEEP_ALL, ChainTrade, Recomputation, recompute
from tests.lowering.recomputation.training_steps import STEPS
from tests.marks import slow_but

SHARES = (0.9, 0.6, 0.3, 0.0)
NOT_COMPUTED = VIEWS | {"slice", "split", "unstack"}
WAYS = [Recomputation("all"), Recomputation("standard"), *(Recomputation("auto", (share,)) for share in SHARES)]
MUCH_LIKE_OTHERS = {"two networks", "dropout", "batch norm", "mlp", "products saved", "checkpoint", "residual", "skips"}
CHECKPOINTED = ("checkpoint", "nested checkpoint", "products saved", "names saved", "names offloaded")


@cache
def before(name: str) -> ClosedJaxpr:
    """A step as the pass finds it."""
    step = STEPS[name]
    args = (*step.args[:-1], step.args[-1][0]) if step.replicas else step.args
    axes = [("replica", step.replicas)] if step.replicas else []
    return run_passes(jax.make_jaxpr(step.fun, axis_env=axes)(*args))["dce"]


@cache
def after(name: str, way: Recomputation) -> tuple[ClosedJaxpr, tuple[ChainTrade, ...]]:
    """A step behind the pass, and its trades."""
    trades = list[ChainTrade]()
    return recompute(before(name), way, trades), tuple(trades)


def new_ones(name: str, way: Recomputation) -> list[JaxprEqn]:
    """The equations, however deep, that the pass has added, but for views."""
    made = {var for eqn in equations(before(name).jaxpr) for var in eqn.outvars if not isinstance(var, DropVar)}
    found = (eqn for eqn in equations(after(name, way)[0].jaxpr) if eqn.primitive.name not in NOT_COMPUTED)
    return [eqn for eqn in found if {v for v in eqn.outvars if not isinstance(v, DropVar)} - made]


# --- numbers ----------------------------------------------------------------------------------------------------------


def run(jaxpr: ClosedJaxpr, leaves: list[Any], values: dict[Var, Any] | None = None) -> list[Any]:
    """The results, one equation after the other, in loops and branches too; `values` takes those of all variables."""

    def equation(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        results = list(eval_equation(eqn, *operands))
        if values is not None:
            values.update(zip(eqn.outvars, results, strict=True))
        return results

    return eval_jaxpr(jaxpr, leaves, equation, jax.numpy.asarray)


def evaluated(name: str, jaxpr: ClosedJaxpr) -> list[np.ndarray]:
    """The results of a step, over its replicas if it has some."""
    step = STEPS[name]
    with jax.disable_jit():
        if not step.replicas:
            return [np.asarray(x) for x in run(jaxpr, jax.tree.leaves(step.args))]
        *shared, split = step.args
        leaves = [*jax.tree.leaves(shared), jax.numpy.asarray(split)]
        axes = [*(None for _ in leaves[1:]), 0]
        each = jax.vmap(lambda *xs: run(jaxpr, list(xs)), in_axes=axes, axis_name="replica")
        return [np.asarray(x) for x in each(*leaves)]


@pytest.mark.parametrize("name", slow_but(STEPS.keys() - MUCH_LIKE_OTHERS, STEPS))
def test_the_numbers_stay_to_the_bit(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """And what is printed stays."""
    expected = evaluated(name, before(name))
    jax.effects_barrier()
    printed, seen = capfd.readouterr().out, {str(before(name))}
    assert ("mean" in printed) == (name == "printing")
    for way in WAYS:
        jaxpr, _ = after(name, way)
        if not STEPS[name].replicas:
            check_jaxpr(jaxpr.jaxpr)
        if str(jaxpr) in seen:
            continue
        seen.add(str(jaxpr))
        for got, want in zip(evaluated(name, jaxpr), expected, strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            assert got.tobytes() == want.tobytes(), way
        jax.effects_barrier()
        assert capfd.readouterr().out == printed


# --- what is computed again -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_none_changes_nothing(name: str) -> None:
    for share in (1.0, 0.0):
        assert recompute(before(name), Recomputation("none", (share,))) is before(name)
    assert recompute(before(name)) is before(name) is recompute(before(name), KEEP_ALL)


@pytest.mark.parametrize("name", STEPS)
def test_less_is_kept_for_more_cycles_the_smaller_the_share(name: str) -> None:
    left = STEPS[name].left
    trades = [after(name, Recomputation("auto", (share,)))[1] for share in (1.0, *SHARES)]
    peaks = [sum(trade.planned.peak_bytes for trade in each) for each in trades]
    cycles = [sum(trade.planned.cycles for trade in each) for each in trades]
    counts = [len(new_ones(name, Recomputation("auto", (share,)))) for share in (1.0, *SHARES)]
    for numbers, way in ((peaks, operator.ge), (cycles, operator.le), (counts, operator.le)):
        assert all(way(few, many) for few, many in pairwise(numbers)), numbers
    assert counts[0] == 0
    assert (counts[-1] > 0) == (peaks[-1] < peaks[0]) == (cycles[-1] > cycles[0]) == ("auto" not in left)
    for mode in ("all", "standard"):
        assert bool(new_ones(name, Recomputation(mode))) == (mode not in left)
    for share, each in zip(SHARES, trades[1:], strict=True):
        for trade in each:
            assert trade.planned.peak_bytes <= max(trade.least_bytes, share * trade.all_bytes)


@pytest.mark.parametrize("name", STEPS)
def test_copies_are_named_and_the_other_equations_stay(name: str) -> None:
    for way in WAYS:
        for eqn in new_ones(name, way):
            found = stage_name(eqn)
            assert found.is_recomputed and found.is_backward, eqn
        top = {id(eqn.primitive): eqn.primitive for eqn in equations(after(name, way)[0].jaxpr)}
        assert top.keys() == {id(eqn.primitive) for eqn in equations(before(name).jaxpr)}
        stay = {v for eqn in before(name).jaxpr.eqns for v in eqn.outvars if eqn.primitive.name not in NOT_COMPUTED}
        assert stay <= {v for eqn in after(name, way)[0].jaxpr.eqns for v in eqn.outvars}


def gradient(jaxpr: ClosedJaxpr) -> Iterator[JaxprEqn]:
    """The equations from the first of a gradient on."""
    first = next(n for n, eqn in enumerate(jaxpr.jaxpr.eqns) if stage_name(eqn).is_backward)
    return iter(jaxpr.jaxpr.eqns[first:])


def of_values(name: str, jaxpr: ClosedJaxpr) -> dict[Var, bytes]:
    """The value of each variable of a step."""
    values: dict[Var, Any] = {}
    with jax.disable_jit():
        run(jaxpr, jax.tree.leaves(STEPS[name].args), values)
    return {var: np.asarray(x).tobytes() for var, x in values.items() if not isinstance(var, DropVar) and x.ndim}


def kept(jaxpr: ClosedJaxpr, values: dict[Var, bytes]) -> set[bytes]:
    """What is made before the gradient and read in it."""
    behind = list(gradient(jaxpr))
    inside = {var for eqn in behind for var in eqn.outvars}
    read = {atom for eqn in behind for atom in eqn.invars if not isinstance(atom, Literal)}
    return {values[var] for var in read - inside if var in values}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_what_a_checkpoint_computes_again_is_never_kept(name: str) -> None:
    jaxpr = before(name)
    values = of_values(name, jaxpr)
    early, late = set[bytes](), set[bytes]()
    for eqn in jaxpr.jaxpr.eqns:
        made = late if stage_name(eqn).is_recomputed else early if not stage_name(eqn).is_backward else set[bytes]()
        made.update(values[var] for var in eqn.outvars if var in values)
    again = early & late - kept(jaxpr, values)
    assert len(again) >= 5
    for way in WAYS:
        jaxpr, _ = after(name, way)
        assert again.isdisjoint(kept(jaxpr, of_values(name, jaxpr))), way


@pytest.mark.parametrize("name", ["products saved", "names saved", "names offloaded"])
def test_what_a_policy_saves_is_never_computed_again(name: str) -> None:
    values = of_values(name, before(name))
    mark = "host_put" if name == "names offloaded" else "reduce_precision"  # so JAX marks it
    eqns = before(name).jaxpr.eqns
    marked = [eqn for eqn in eqns if eqn.primitive.name == mark and not stage_name(eqn).is_backward]
    saved = {values[var] for eqn in marked for var in eqn.outvars}
    assert len(saved) == len(STEPS[name].args[0])
    for way in WAYS:
        again = of_values(name, after(name, way)[0])
        assert saved.isdisjoint(again[var] for eqn in new_ones(name, way) for var in eqn.outvars if var in again)
        assert saved <= kept(after(name, way)[0], again)
    assert new_ones(name, Recomputation("all"))


@pytest.mark.parametrize("name", ["metrics", "batch norm", "printing"])
def test_what_is_needed_behind_the_gradient_is_kept(name: str) -> None:
    """A result, or what is printed, is there already; the rest is computed to what it was."""
    first = before(name)
    values = of_values(name, first)
    given = {atom for eqn in first.jaxpr.eqns if eqn.primitive.name == "debug_callback" for atom in eqn.invars}
    forward = {v for eqn in first.jaxpr.eqns if not stage_name(eqn).is_backward for v in eqn.outvars}
    wanted = {values[var] for var in {*first.jaxpr.outvars, *given} & forward if var in values}
    assert wanted or name == "printing"
    for way in WAYS:
        jaxpr, _ = after(name, way)
        again = of_values(name, jaxpr)
        for eqn in new_ones(name, way):
            made = {again[var] for var in eqn.outvars if var in again}
            assert made <= set(values.values()) and made.isdisjoint(wanted), way


def test_a_scope_of_the_users_says_more_than_the_options() -> None:
    def step(ws: Any, x: Any) -> Any:
        with jax.named_scope("ipu_recompute_all"):
            return STEPS["mlp"].fun(ws, x)

    jaxpr = run_passes(jax.make_jaxpr(step)(*STEPS["mlp"].args))["dce"]
    assert len(recompute(jaxpr).eqns) == len(after("mlp", Recomputation("all"))[0].eqns) > len(jaxpr.eqns)


@pytest.mark.parametrize("mode", ["all", "standard"])
def test_gradients_read_what_is_computed_again_in_their_own_phase(mode: str) -> None:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for number, w in enumerate(ws):
            with ipu.phase(number):
                x = x + jax.numpy.tanh(jax.numpy.tanh(x @ w) @ w.T)
        return (x**2).mean()

    jaxpr = run_passes(jax.make_jaxpr(jax.grad(loss))(*STEPS["mlp"].args))["dce"]
    again = recompute(jaxpr, Recomputation(mode))
    copies = {v: phase_of(eqn) for eqn in again.eqns if stage_name(eqn).is_recomputed for v in eqn.outvars}
    readers = [(phase_of(eqn), v) for eqn in again.eqns if phase_of(eqn) is not None for v in variables_read(eqn)]
    assert {phase for phase, var in readers if var in copies} >= set(range(len(STEPS["mlp"].args[0]) - 1))
    assert all(copies[var] == phase for phase, var in readers if var in copies)
    for got, want in zip(
        run(again, jax.tree.leaves(STEPS["mlp"].args)), run(jaxpr, jax.tree.leaves(STEPS["mlp"].args)), strict=True
    ):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_effects_in_the_gradient_keep_their_order(capfd: pytest.CaptureFixture[str]) -> None:
    """Where another order would be seen, nothing is computed again."""

    @jax.custom_vjp
    def told(x: jax.Array) -> jax.Array:
        return x * 2

    def forward(x: jax.Array) -> Any:
        return x * 2, None

    def backward(_: None, g: jax.Array) -> Any:
        jax.debug.print("gradient {}", g.sum(), ordered=True)
        return (g * 2,)

    told.defvjp(forward, backward)

    def step(w: jax.Array, x: jax.Array) -> Any:
        grad = jax.grad(lambda w: (jax.numpy.tanh(told(jax.numpy.tanh(x @ w))) ** 2).sum())(w)
        jax.debug.print("outside {}", x.sum(), ordered=True)
        return grad

    args = STEPS["mlp"].args[0][0], STEPS["mlp"].args[1]
    jaxpr = run_passes(jax.make_jaxpr(step)(*args))["dce"]
    texts = []
    for way in (Recomputation("none"), *WAYS):
        run(recompute(jaxpr, way), list(args))
        jax.effects_barrier()
        texts.append(capfd.readouterr().out)
    assert texts[0].count("gradient") == texts[0].count("outside") == 1 and set(texts) == {texts[0]}
