"""Pass `recompute`: training steps of every kind give the same bits, and recompute the expected values."""

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
from ipujax.lowering.jaxpr import equations, phase_of, stage_name, variables_read
from ipujax.lowering.passes import run_passes
from ipujax.lowering.primitives import RECORDS
from ipujax.lowering.recomputation import KEEP_ALL, ChainTrade, Recomputation, recompute
from tests.lowering.recomputation.training_steps import STEPS

SHARES = (0.9, 0.6, 0.3, 0.0)
NOT_COMPUTED = {name for name, record in RECORDS.items() if record.cost in ("view", "part")}
RECOMPUTATIONS = [
    Recomputation("all"),
    Recomputation("standard"),
    *(Recomputation("auto", (share,)) for share in SHARES),
]
CHECKPOINTED = ("checkpoint", "nested checkpoint", "products saved", "names saved", "names offloaded")


@cache
def original_step(name: str) -> ClosedJaxpr:
    """A step before the pass."""
    step = STEPS[name]
    args = (*step.args[:-1], step.args[-1][0]) if step.replicas else step.args
    axes = [("replica", step.replicas)] if step.replicas else []
    return run_passes(jax.make_jaxpr(step.fun, axis_env=axes)(*args))["dce"]


@cache
def recomputed_step(name: str, recomputation: Recomputation) -> tuple[ClosedJaxpr, tuple[ChainTrade, ...]]:
    """A step after the pass, and its trade-offs."""
    trades = list[ChainTrade]()
    return recompute(original_step(name), recomputation, trades), tuple(trades)


def added_equations(name: str, recomputation: Recomputation) -> list[JaxprEqn]:
    """The equations, inner ones too, that the pass has added, without views."""
    original_vars = {
        var for eqn in equations(original_step(name).jaxpr) for var in eqn.outvars if not isinstance(var, DropVar)
    }
    candidates = (
        eqn
        for eqn in equations(recomputed_step(name, recomputation)[0].jaxpr)
        if eqn.primitive.name not in NOT_COMPUTED
    )
    return [eqn for eqn in candidates if {v for v in eqn.outvars if not isinstance(v, DropVar)} - original_vars]


def run(jaxpr: ClosedJaxpr, leaves: list[Any], values: dict[Var, Any] | None = None) -> list[Any]:
    """Evaluates equation by equation, in loops and branches too; `values` receives the value of each variable."""

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
        replicated = jax.vmap(lambda *xs: run(jaxpr, list(xs)), in_axes=axes, axis_name="replica")
        return [np.asarray(x) for x in replicated(*leaves)]


@pytest.mark.parametrize("name", STEPS)
def test_gives_the_same_bits(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Printed output stays too."""
    expected = evaluated(name, original_step(name))
    jax.effects_barrier()
    printed = capfd.readouterr().out
    checked_texts = {str(original_step(name))}
    assert ("mean" in printed) == (name == "printing")
    for recomputation in RECOMPUTATIONS:
        jaxpr, _ = recomputed_step(name, recomputation)
        if not STEPS[name].replicas:
            check_jaxpr(jaxpr.jaxpr)
        if str(jaxpr) in checked_texts:
            continue
        checked_texts.add(str(jaxpr))
        for got, expected_value in zip(evaluated(name, jaxpr), expected, strict=True):
            assert got.dtype == expected_value.dtype and got.shape == expected_value.shape
            assert got.tobytes() == expected_value.tobytes(), recomputation
        jax.effects_barrier()
        assert capfd.readouterr().out == printed


@pytest.mark.parametrize("name", STEPS)
def test_none_changes_nothing(name: str) -> None:
    for share in (1.0, 0.0):
        assert recompute(original_step(name), Recomputation("none", (share,))) is original_step(name)
    assert recompute(original_step(name)) is original_step(name) is recompute(original_step(name), KEEP_ALL)


@pytest.mark.parametrize("name", STEPS)
def test_smaller_shares_store_less_for_more_cycles(name: str) -> None:
    modes_without_effect = STEPS[name].modes_without_effect
    trades = [recomputed_step(name, Recomputation("auto", (share,)))[1] for share in (1.0, *SHARES)]
    peaks = [sum(trade.planned.peak_bytes for trade in trades_of_share) for trades_of_share in trades]
    cycles = [sum(trade.planned.cycles for trade in trades_of_share) for trades_of_share in trades]
    counts = [len(added_equations(name, Recomputation("auto", (share,)))) for share in (1.0, *SHARES)]
    for numbers, order in ((peaks, operator.ge), (cycles, operator.le), (counts, operator.le)):
        assert all(order(lower, higher) for lower, higher in pairwise(numbers)), numbers
    assert counts[0] == 0
    assert (
        (counts[-1] > 0) == (peaks[-1] < peaks[0]) == (cycles[-1] > cycles[0]) == ("auto" not in modes_without_effect)
    )
    for mode in ("all", "standard"):
        assert bool(added_equations(name, Recomputation(mode))) == (mode not in modes_without_effect)
    for share, trades_of_share in zip(SHARES, trades[1:], strict=True):
        for trade in trades_of_share:
            assert trade.planned.peak_bytes <= max(trade.least_bytes, share * trade.all_bytes)


@pytest.mark.parametrize("name", STEPS)
def test_names_copies_and_preserves_other_equations(name: str) -> None:
    for recomputation in RECOMPUTATIONS:
        for eqn in added_equations(name, recomputation):
            name_ = stage_name(eqn)
            assert name_.is_recomputed and name_.is_backward, eqn
        top = {id(eqn.primitive): eqn.primitive for eqn in equations(recomputed_step(name, recomputation)[0].jaxpr)}
        assert top.keys() == {id(eqn.primitive) for eqn in equations(original_step(name).jaxpr)}
        preserved = {
            v for eqn in original_step(name).jaxpr.eqns for v in eqn.outvars if eqn.primitive.name not in NOT_COMPUTED
        }
        assert preserved <= {v for eqn in recomputed_step(name, recomputation)[0].jaxpr.eqns for v in eqn.outvars}


def gradient(jaxpr: ClosedJaxpr) -> Iterator[JaxprEqn]:
    """The equations from the first of a gradient on."""
    first = next(n for n, eqn in enumerate(jaxpr.jaxpr.eqns) if stage_name(eqn).is_backward)
    return iter(jaxpr.jaxpr.eqns[first:])


def values_of(name: str, jaxpr: ClosedJaxpr) -> dict[Var, bytes]:
    """The value of each variable of a step."""
    values: dict[Var, Any] = {}
    with jax.disable_jit():
        run(jaxpr, jax.tree.leaves(STEPS[name].args), values)
    return {var: np.asarray(x).tobytes() for var, x in values.items() if not isinstance(var, DropVar) and x.ndim}


def stored_values(jaxpr: ClosedJaxpr, values: dict[Var, bytes]) -> set[bytes]:
    """Values that are defined before the gradient and read in it."""
    eqns = list(gradient(jaxpr))
    defined = {var for eqn in eqns for var in eqn.outvars}
    operands = {atom for eqn in eqns for atom in eqn.invars if not isinstance(atom, Literal)}
    return {values[var] for var in operands - defined if var in values}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_never_stores_values_that_a_checkpoint_recomputes(name: str) -> None:
    jaxpr = original_step(name)
    values = values_of(name, jaxpr)
    forward_values = set[bytes]()
    recomputed_values = set[bytes]()
    for eqn in jaxpr.jaxpr.eqns:
        defined = (
            recomputed_values
            if stage_name(eqn).is_recomputed
            else forward_values
            if not stage_name(eqn).is_backward
            else set[bytes]()
        )
        defined.update(values[var] for var in eqn.outvars if var in values)
    recomputed = forward_values & recomputed_values - stored_values(jaxpr, values)
    assert len(recomputed) >= 5
    for recomputation in RECOMPUTATIONS:
        jaxpr, _ = recomputed_step(name, recomputation)
        assert recomputed.isdisjoint(stored_values(jaxpr, values_of(name, jaxpr))), recomputation


@pytest.mark.parametrize("name", ["products saved", "names saved", "names offloaded"])
def test_never_recomputes_values_that_a_policy_saves(name: str) -> None:
    values = values_of(name, original_step(name))
    mark = "host_put" if name == "names offloaded" else "reduce_precision"  # JAX's mark of a saved value
    eqns = original_step(name).jaxpr.eqns
    marked = [eqn for eqn in eqns if eqn.primitive.name == mark and not stage_name(eqn).is_backward]
    saved = {values[var] for eqn in marked for var in eqn.outvars}
    assert len(saved) == len(STEPS[name].args[0])
    for recomputation in RECOMPUTATIONS:
        new_values = values_of(name, recomputed_step(name, recomputation)[0])
        assert saved.isdisjoint(
            new_values[var] for eqn in added_equations(name, recomputation) for var in eqn.outvars if var in new_values
        )
        assert saved <= stored_values(recomputed_step(name, recomputation)[0], new_values)
    assert added_equations(name, Recomputation("all"))


@pytest.mark.parametrize("name", ["metrics", "batch norm", "printing"])
def test_never_recomputes_results_of_the_program(name: str) -> None:
    """A result, or printed value, is stored already; other values are recomputed to the same bits."""
    original = original_step(name)
    values = values_of(name, original)
    printed = {atom for eqn in original.jaxpr.eqns if eqn.primitive.name == "debug_callback" for atom in eqn.invars}
    forward = {v for eqn in original.jaxpr.eqns if not stage_name(eqn).is_backward for v in eqn.outvars}
    needed_values = {values[var] for var in {*original.jaxpr.outvars, *printed} & forward if var in values}
    assert needed_values or name == "printing"
    for recomputation in RECOMPUTATIONS:
        jaxpr, _ = recomputed_step(name, recomputation)
        new_values = values_of(name, jaxpr)
        for eqn in added_equations(name, recomputation):
            copies = {new_values[var] for var in eqn.outvars if var in new_values}
            assert copies <= set(values.values()) and copies.isdisjoint(needed_values), recomputation


def test_user_scope_overrides_options() -> None:
    def step(ws: Any, x: Any) -> Any:
        with jax.named_scope("ipu_recompute_all"):
            return STEPS["mlp"].fun(ws, x)

    jaxpr = run_passes(jax.make_jaxpr(step)(*STEPS["mlp"].args))["dce"]
    assert len(recompute(jaxpr).eqns) == len(recomputed_step("mlp", Recomputation("all"))[0].eqns) > len(jaxpr.eqns)


@pytest.mark.parametrize("mode", ["all", "standard"])
def test_gradients_read_copies_of_their_phase(mode: str) -> None:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for number, w in enumerate(ws):
            with ipu.phase(number):
                x = x + jax.numpy.tanh(jax.numpy.tanh(x @ w) @ w.T)
        return (x**2).mean()

    jaxpr = run_passes(jax.make_jaxpr(jax.grad(loss))(*STEPS["mlp"].args))["dce"]
    recomputed = recompute(jaxpr, Recomputation(mode))
    copies = {v: phase_of(eqn) for eqn in recomputed.eqns if stage_name(eqn).is_recomputed for v in eqn.outvars}
    readers = [(phase_of(eqn), v) for eqn in recomputed.eqns if phase_of(eqn) is not None for v in variables_read(eqn)]
    assert {phase for phase, var in readers if var in copies} >= set(range(len(STEPS["mlp"].args[0]) - 1))
    assert all(copies[var] == phase for phase, var in readers if var in copies)
    for got, expected_value in zip(
        run(recomputed, jax.tree.leaves(STEPS["mlp"].args)), run(jaxpr, jax.tree.leaves(STEPS["mlp"].args)), strict=True
    ):
        assert np.asarray(got).tobytes() == np.asarray(expected_value).tobytes()


def test_preserves_the_order_of_effects(capfd: pytest.CaptureFixture[str]) -> None:
    """If another order would be visible, nothing is recomputed."""

    @jax.custom_vjp
    def printing_double(x: jax.Array) -> jax.Array:
        return x * 2

    def forward(x: jax.Array) -> Any:
        return x * 2, None

    def backward(_: None, g: jax.Array) -> Any:
        jax.debug.print("gradient {}", g.sum(), ordered=True)
        return (g * 2,)

    printing_double.defvjp(forward, backward)

    def step(w: jax.Array, x: jax.Array) -> Any:
        grad = jax.grad(lambda w: (jax.numpy.tanh(printing_double(jax.numpy.tanh(x @ w))) ** 2).sum())(w)
        jax.debug.print("outside {}", x.sum(), ordered=True)
        return grad

    args = STEPS["mlp"].args[0][0], STEPS["mlp"].args[1]
    jaxpr = run_passes(jax.make_jaxpr(step)(*args))["dce"]
    texts = []
    for recomputation in (Recomputation("none"), *RECOMPUTATIONS):
        run(recompute(jaxpr, recomputation), list(args))
        jax.effects_barrier()
        texts.append(capfd.readouterr().out)
    assert texts[0].count("gradient") == texts[0].count("outside") == 1 and set(texts) == {texts[0]}


@pytest.mark.parametrize("mode", ["all", "standard", "auto"])
@pytest.mark.parametrize("length", [0, 2])
def test_numbers_of_a_state_are_drawn_once(mode: str, length: int) -> None:
    """Drawn again, the gradient would have others than the loss; `length`: of a loop that draws them, 0 without."""

    def drawn(x: jax.Array) -> jax.Array:
        return jax.lax.rng_uniform(np.float32(0), np.float32(1), x.shape)

    def noise(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda y, _: (drawn(y), None), x, None, length)[0] if length else drawn(x)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return (jax.numpy.sin(jax.numpy.sin(x @ w) * noise(x)) ** 2).sum()

    jaxpr = run_passes(jax.make_jaxpr(jax.value_and_grad(loss))(np.ones((4, 4)), np.ones((8, 4))))["dce"]
    recomputed = recompute(jaxpr, Recomputation(mode, (0.1,)))
    assert [eqn.primitive.name for eqn in equations(recomputed.jaxpr)].count("rng_uniform") == 1
