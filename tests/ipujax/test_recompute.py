"""`ipu.Options(recompute=…)` and `ipu.pipeline(recompute=…)`, compiled: numbers, memory, cost, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax import fit
from ipujax.fit import BYTE_COSTS
from ipujax.lowering.recomputation import Recomputation
from ipujax.runtime.memory import fits
from ipujax.runtime.options import RECOMPUTATIONS
from tests.lowering.helpers import quick_jit
from tests.lowering.recomputation.training_steps import accumulated, array, chain_of, gelu_block, trained, weights

CODE_BYTES = 20 * 1024
FIRST = BYTE_COSTS[0]
# so many rows that what is kept fills most of a tile
WS = weights(4)
X = array(2048, 4)


def dropout(ws: Any, key: jax.Array, x: jax.Array) -> jax.Array:
    """Residual blocks with masks."""
    for number, w in enumerate(ws):
        x = gelu_block(w, x) * jax.random.bernoulli(jax.random.fold_in(key, number), 0.7, x.shape)
    return (x**2).mean()


def every_other_in_a_checkpoint(ws: Any, x: jax.Array) -> jax.Array:
    for number, w in enumerate(ws):
        x = (jax.checkpoint(gelu_block) if number % 2 else gelu_block)(w, x)
    return (x**2).mean()


STEPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "residual": (trained(chain_of(gelu_block)), (WS, X)),
    "dropout": (trained(dropout), (WS[:2], jax.random.key(3), X)),
    "checkpoint": (trained(every_other_in_a_checkpoint), (WS, X)),
    "all in a checkpoint": (trained(jax.checkpoint(every_other_in_a_checkpoint)), (WS, X)),
    "micro-batches": (accumulated, (WS, array(2, 2048, 4))),
}


def compiled(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    recompute: str,
    bytes_per_tile: int | None = None,
    num_ipus: int = 1,
    **options: Any,
) -> ipu.Compiled:
    memory = {} if bytes_per_tile is None else {"bytes_per_tile": bytes_per_tile}
    code = {"interleaved_offset_bytes": min(CODE_BYTES, bytes_per_tile or CODE_BYTES)}
    device = ipu.IPUModel(arch="mk2", num_ipus=num_ipus, tiles_per_ipu=16, **memory, **code)
    return ipu.jit(fun, device=device, options=ipu.Options(recompute=recompute, **options)).lower(*args).compile()


@cache
def as_it_is(name: str) -> ipu.Profile:
    """Without recomputation, and with room for it."""
    return compiled(*STEPS[name], "none", byte_cost=FIRST).profile


def bytes_of(profile: ipu.Profile) -> int:
    return profile.memory.max_tile_bytes


def shares(done: ipu.Compiled) -> tuple[float, ...]:
    return done.lowered.choice.recomputation.shares


def run(done: ipu.Compiled, args: tuple[Any, ...]) -> Any:
    return quick_jit(done.lowered.evaluate)(*jax.tree.leaves(args))


def assert_close(got: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max(initial=1e-3))


# --- numbers ----------------------------------------------------------------------------------------------------------

FITTED = {"residual": 0.9, "dropout": 0.9, "checkpoint": 0.92, "micro-batches": 0.95}


@pytest.mark.parametrize("name", FITTED)
def test_the_numbers_are_those_of_plain_jax(name: str) -> None:
    """Of each way, of "auto" on a chip that has too little memory to keep all. Masks of dropout are drawn again."""
    fun, args = STEPS[name]
    room = int(FITTED[name] * bytes_of(as_it_is(name)))
    expected = quick_jit(fun)(*args)
    ways = {mode: compiled(fun, args, mode) for mode in (("all", "standard") if name == "residual" else ("all",))}
    ways["auto"] = compiled(fun, args, "auto", room, byte_cost=FIRST)
    assert shares(ways["auto"]) and bytes_of(ways["auto"].profile) <= room
    for way in ways.values():
        assert_close(run(way, args), expected)
    assert ways["all"].profile.cycles > as_it_is(name).cycles


def test_donated_state_is_trained() -> None:
    """By the function itself, for steps in a row."""
    fun, (ws, x) = STEPS["residual"]
    room = int(0.9 * bytes_of(as_it_is("residual")))
    device = ipu.IPUModel(tiles_per_ipu=16, bytes_per_tile=room, interleaved_offset_bytes=CODE_BYTES)
    step = ipu.jit(fun, device=device, options=ipu.Options(recompute="auto"), donate_argnums=0)
    mine = jax.tree.map(jnp.asarray, ws)
    theirs = ws
    for _ in range(2):
        mine, value = step(mine, x)
        theirs, expected = quick_jit(fun)(theirs, x)
        assert_close(value, expected)
    assert_close(mine, theirs)


def test_stages_outside_of_a_pipeline() -> None:
    """Each stage computes again on its own IPU."""

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for number, w in enumerate(ws):
            with ipu.stage(number // 2):
                x = gelu_block(w, x)
        with ipu.stage(1):
            return (x**2).mean()

    args = WS, array(256, 4)
    expected = quick_jit(trained(loss))(*args)
    for mode in ("none", "all"):
        done = compiled(trained(loss), args, mode, num_ipus=2)
        assert_close(run(done, args), expected)
        sets = [each for each in done.lowered.graph.groups if "rematted_computation" in each.name]
        tiles = {int(t) // 16 for each in sets for g in done.lowered.graph.groups[each] for t in g.tile.ravel()}
        assert tiles == ({0, 1} if mode == "all" else set())


# --- what stays as it is ----------------------------------------------------------------------------------------------


def forward(ws: Any, x: jax.Array) -> jax.Array:
    for w in ws:
        x = gelu_block(w, x)
    return x.sum()


@pytest.mark.parametrize("mode", RECOMPUTATIONS)
def test_without_a_gradient_nothing_changes(mode: str) -> None:
    args = WS, X
    way = compiled(forward, args, mode)
    none = compiled(forward, args, "none")
    assert way.lowered.as_text("recompute") == way.lowered.as_text("dce") == none.lowered.as_text("dce")
    assert way.lowered.as_text() == none.lowered.as_text() and way.profile.execution() == none.profile.execution()


@pytest.mark.parametrize("mode", ["all", "standard"])
def test_checkpoints_of_the_user_are_not_changed(mode: str) -> None:
    """All of the network is in one, with others inside."""
    way, none = (compiled(*STEPS["all in a checkpoint"], each) for each in (mode, "none"))
    assert way.lowered.as_text("recompute") == none.lowered.as_text("recompute")
    assert way.profile.cycles == none.profile.cycles


def test_auto_keeps_all_where_there_is_room() -> None:
    fun, args = STEPS["residual"]
    roomy = compiled(fun, args, "auto")
    assert shares(roomy) == () and roomy.profile.cycles == as_it_is("residual").cycles
    short = bytes_of(as_it_is("residual")) * 3 // 4
    unlimited = compiled(fun, args, "auto", short, allow_out_of_memory=True)
    assert shares(unlimited) == () and unlimited.profile.memory.lacking()


# --- what fits --------------------------------------------------------------------------------------------------------


def test_auto_fits_a_chip_that_keeping_all_does_not() -> None:
    (fun, args) = STEPS["residual"]
    name = "residual"
    for share in (0.95, 0.85):
        room = int(share * bytes_of(as_it_is(name)))
        with pytest.raises(ipu.TileMemoryError):
            compiled(fun, args, "none", room, byte_cost=FIRST)
        done = compiled(fun, args, "auto", room, byte_cost=FIRST)
        assert bytes_of(done.profile) <= room and 0 <= min(shares(done)) < 1
        assert done.profile.cycles > as_it_is(name).cycles and done.profile.byte_cost == FIRST


def test_auto_takes_hardly_more_cycles_than_standard_in_the_same_bytes() -> None:
    """None by its own count, which does not know which copies of function calls either way saves."""
    fun = trained(chain_of(gelu_block))
    args = (weights(8), X)
    standard = compiled(fun, args, "standard", byte_cost=FIRST).profile
    room = bytes_of(standard) + 8
    with pytest.raises(ipu.TileMemoryError):
        compiled(fun, args, "none", room, byte_cost=FIRST)
    auto = compiled(fun, args, "auto", room, byte_cost=FIRST).profile
    assert auto.cycles <= 1.01 * standard.cycles and bytes_of(auto) <= room


def test_drops_a_byte_cost_that_frees_nothing() -> None:
    """Otherwise recomputation would cost more at that cost per byte, too."""
    fun = trained(chain_of(gelu_block))
    args = ([array(16, 16, seed=n) for n in range(4)], array(1024, 16))
    room = int(0.7 * bytes_of(compiled(fun, args, "none", byte_cost=FIRST).profile))
    free = compiled(fun, args, "auto", room).profile
    fixed = compiled(fun, args, "auto", room, byte_cost=FIRST).profile
    assert len(free.byte_costs) > 1 and free.byte_cost == FIRST
    assert free.cycles == fixed.cycles


@pytest.mark.parametrize(("excess_bytes", "share"), [(20, 0.475), (90, 1 - 1.05 * 90 / 160)])
def test_less_is_kept_than_the_fullest_tile_lacks(excess_bytes: int, share: float) -> None:
    """On all tiles of two as on that one; where that is more than there is, as great a part as that one lacks."""
    planned = SimpleNamespace(peak_bytes=80)
    trade = SimpleNamespace(ipu=0, planned=planned, all_bytes=80, least_bytes=10)
    machine = SimpleNamespace(graph=SimpleNamespace(target=SimpleNamespace(tiles_per_ipu=2)))
    choice = fit.Choice(FIRST, fit.TILE_BYTES[0], Recomputation("auto"))
    attempt = fit._Attempt(SimpleNamespace(choice=choice, trades=[trade]), machine)  # type: ignore[arg-type, type-var]
    vars(attempt).update(ipu_bytes=np.array([160]))
    recomputation = attempt.storing(160 - excess_bytes)
    assert recomputation is not None
    np.testing.assert_allclose(recomputation.shares, share)


def test_fits_without_a_byte_cost_if_it_fits_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search comes back to the first cost per byte; here higher ones are said to fit nothing."""
    fun, args = STEPS["residual"]
    monkeypatch.setattr(fit, "fits", lambda report: report.occupancy.graph.byte_cost_cycles == FIRST and fits(report))
    room = int(0.85 * bytes_of(as_it_is("residual")))
    free, fixed = (compiled(fun, args, "auto", room, byte_cost=byte_cost) for byte_cost in (None, FIRST))
    assert free.profile.cycles == fixed.profile.cycles and shares(free) == shares(fixed)
    assert free.profile.byte_cost == FIRST


def test_two_compilations_are_the_same() -> None:
    fun, args = STEPS["residual"]
    room = int(0.85 * bytes_of(as_it_is("residual")))
    figures = list[Any]()
    for _ in range(2):
        ipu.clear_caches()
        done = compiled(fun, args, "auto", room, byte_cost=FIRST)
        figures.append((done.lowered.as_text(), shares(done), done.profile.execution()))
    assert figures[0] == figures[1]


# --- pipelines --------------------------------------------------------------------------------------------------------


def piped(staged: bool, **settings: Any) -> Callable[..., Any]:
    """A training step of four residual blocks, two in each of two stages."""

    def stage(number: int) -> Any:
        return ipu.stage(number) if staged else nullcontext()

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for number, w in enumerate(ws):
            with stage(number // 2):
                x = gelu_block(w, x)
        with stage(1):
            return (x**2).mean()

    def run(ws: Any, x: jax.Array) -> Any:
        value, grads = ipu.pipeline(jax.value_and_grad(loss), micro_batches=4, **settings)(ws, x)
        return jax.tree.map(lambda w, g: w - g / 8, ws, grads), value

    return run


ON_TWO: dict[str, Any] = {"num_ipus": 2, "byte_cost": FIRST}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipelines(schedule: str) -> None:
    """Numbers of each way; with "gpipe" all four micro-batches wait, and less is kept of each."""
    fun = partial(piped, True, schedule=schedule)
    args = (WS, X)
    none = compiled(fun(), args, "none", **ON_TWO)
    room = int(0.9 * bytes_of(none.profile))
    ways = {"all": compiled(fun(recompute="all"), args, "none", **ON_TWO)}
    with pytest.raises(ipu.TileMemoryError):
        compiled(fun(), args, "none", room, **ON_TWO)
    ways["auto"] = compiled(fun(recompute="auto"), args, "none", room, **ON_TWO)
    assert min(shares(ways["auto"])) < 1 and bytes_of(ways["auto"].profile) <= room
    assert ways["all"].profile.cycles > none.profile.cycles
    if schedule == "gpipe":
        assert bytes_of(ways["all"].profile) < 0.75 * bytes_of(none.profile)
    expected = quick_jit(fun())(*args)
    for way in ways.values():
        assert_close(run(way, args), expected)


def test_stages_that_are_found() -> None:
    args = WS[:2], X
    done = {mode: compiled(piped(False, stages=2), args, mode, **ON_TWO) for mode in ("none", "all")}
    assert bytes_of(done["all"].profile) < bytes_of(done["none"].profile)
    assert_close(run(done["all"], args), quick_jit(piped(False, stages=2))(*args))


def test_stages_are_found_for_more_than_can_be_kept() -> None:
    """Values that wait for gradients of all micro-batches are more than an IPU; "auto" keeps less of them."""
    args = WS[:3], X
    fun = piped(False, stages=2, schedule="gpipe")
    room = int(0.85 * bytes_of(compiled(fun, args, "none", **ON_TWO).profile))
    with pytest.raises(ipu.TileMemoryError, match="recompute"):
        compiled(fun, args, "none", room, **ON_TWO)
    done = compiled(fun, args, "auto", room, **ON_TWO)
    assert min(shares(done)) < 1 and bytes_of(done.profile) <= room and len(done.lowered.choice.cuts) == 1
    assert_close(run(done, args), quick_jit(fun)(*args))


def test_a_pipeline_says_more_than_the_options() -> None:
    def cycles(own: str | None, options: str) -> int:
        return compiled(piped(True, recompute=own), (WS, X), options, **ON_TWO).profile.cycles

    assert cycles("none", "all") == cycles(None, "none") < cycles("all", "none") == cycles(None, "all")


@jax.custom_vjp
def swing(x: jax.Array) -> jax.Array:
    return jnp.exp(jnp.sin(x))


def _swing_forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return swing(x), (x, swing(x))


def _swing_backward(kept: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array]:
    return (jnp.clip(g * kept[1] * jnp.cos(kept[0]), -1, 1),)


swing.defvjp(_swing_forward, _swing_backward)


def test_recomputes_nothing_where_a_higher_byte_cost_fits_in_fewer_cycles() -> None:
    """One cost per byte frees little, higher ones enough; recomputation, which comes first then, takes more cycles."""

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = swing(x @ w)
        return x.mean()

    device = ipu.IPUModel(tiles_per_ipu=16, bytes_per_tile=21_000, interleaved_offset_bytes=21_000)
    args = [np.zeros((32, 32), np.float32)] * 4, np.zeros((64, 32), np.float32)
    none, auto = (
        ipu.jit(jax.value_and_grad(loss), device=device, options=ipu.Options(recompute=mode)).lower(*args).compile()
        for mode in ("none", "auto")
    )
    assert none.lowered.choice.byte_cost > 2 and auto.profile.cycles <= none.profile.cycles


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("byte_cost", [FIRST, None])
def test_the_error_of_a_program_that_cannot_fit_names_the_attempts(byte_cost: float | None) -> None:
    fun, args = STEPS["residual"]
    with pytest.raises(ipu.TileMemoryError) as error:
        compiled(fun, args, "auto", 20_000, byte_cost=byte_cost)
    text = str(error.value)
    listed = text.split("  plans that were tried, gaps not counted:\n")[1].split("  at: ")[0].splitlines()
    trades = compiled(fun, args, "auto", 20_000, allow_out_of_memory=True).lowered.trades
    least = min(trade.least_bytes / trade.all_bytes for trade in trades)
    (displayed,) = [line for line in listed if "as shown" in line]
    kept = re.search(r"tiles of \d+ KiB, (\d+) % of what gradients need kept, the rest recomputed", displayed)
    assert kept is not None and 100 > int(kept[1]) >= round(100 * least) > 0
    assert any(line.endswith("0.5 cycles per byte, planned for tiles of 624 KiB (does not fit)") for line in listed)
    assert "offload_argnums of ipu.jit" in text and "ipu.advise(fun, *args)" in text
    assert "out of memory on 16 of 16 tiles, worst on tile" in text and "largest on that tile:" in text
    assert f"{error.value.needed_bytes - 20_000:,} bytes, while running" in text


def test_no_share_is_named_if_nothing_can_be_recomputed() -> None:
    for fun, args in (STEPS["all in a checkpoint"], (forward, (WS, X))):
        with pytest.raises(ipu.TileMemoryError) as error:
            compiled(fun, args, "auto", 14_000, byte_cost=FIRST)
        assert "what gradients need" not in str(error.value) and "largest on that tile" in str(error.value)


@pytest.mark.parametrize("inputs", ["stndard", "Auto", "al", True, 1, ["all"]])
def test_refuses_an_unknown_recomputation(inputs: Any) -> None:
    for use in (
        lambda: ipu.Options(recompute=inputs),
        lambda: ipu.pipeline(forward, micro_batches=2, recompute=inputs),
    ):
        with pytest.raises(ipu.ArgumentError, match="must be a way of recomputation") as error:
            use()
        assert "expected: one of 'none', 'all', 'standard', 'auto'" in str(error.value)
        hint = (
            {"stndard": "'standard'", "Auto": "'auto'", "al": "'all'"}.get(inputs) if isinstance(inputs, str) else None
        )
        assert (f"try: {hint}" in str(error.value)) if hint else "try:" not in str(error.value)
