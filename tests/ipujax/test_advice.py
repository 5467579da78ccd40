"""`ipu.advise`: the ways that are tried, their order, the best of them, the table, and refusals."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.advice.changed_functions import donating, kept_arguments, offloading
from tests.lowering.recomputation.training_steps import array, chain_of, gelu_block, trained

STEP = trained(chain_of(gelu_block))
ARGS = [array(16, 16, seed=n) for n in range(4)], array(1024, 16)
NONE, ALL, STANDARD, AUTO = (
    f'options=ipu.Options(byte_cost=0.5, recompute="{mode}")' for mode in ("none", "all", "standard", "auto")
)
OWN = "as it is"
HALF = "half of the batch, twice"
DONATED = "donate_argnums=(0,)"
OFFLOADED = "offload_argnums=(0,)"
FLOAT16 = "float16 arguments in place of float32"


def fitted(share: float | None = None, **options: Any) -> Any:
    """The step for a chip with a share of the memory that it takes as it is; plenty of it when None."""
    have = {} if share is None else {"bytes_per_tile": int(share * most_bytes())}
    device = ipu.IPUModel(tiles_per_ipu=16, interleaved_offset_bytes=20_000, **have)
    return ipu.jit(STEP, device=device, options=ipu.Options(byte_cost=0.5, **options))


@cache
def most_bytes() -> int:
    return fitted().lower(*ARGS).compile().memory_analysis().max_tile_bytes


def compiled(row: ipu.AdviceRow, share: float) -> ipu.Profile:
    """The profile of a row's settings, for a chip of that share, with nothing refused if the row does not fit."""
    names = {"options": ipu.Options, "ipu": ipu}
    written = row.change.removeprefix(HALF).removeprefix(", ")
    if written == FLOAT16:
        halves = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, np.float16), ARGS)
        return fitted(share).lower(*halves).compile().profile
    settings = eval(f"dict({written})", names) if written != OWN else {}
    ws, x = ARGS
    x = x[: len(x) // 2] if row.change.startswith(HALF) else x
    return fitted(share).with_options(**settings).lower(ws, x).compile().profile


@cache
def advice() -> ipu.Advice:
    return ipu.advise(fitted(0.8), *ARGS, batch_argnums=1, show=False)


def test_each_change_has_a_row_with_its_cost() -> None:
    rows = {row.change: row for row in advice()}
    assert rows.keys() == {OWN, ALL, STANDARD, AUTO, HALF, DONATED, OFFLOADED, FLOAT16} and len(advice()) == len(rows)
    assert rows[AUTO].fits and rows[HALF].fits and not rows[OWN].fits
    for row in advice():
        assert row.refused is None
        if row.fits:
            profile = compiled(row, 0.8)
            times = 2 if row.change.startswith(HALF) else 1
            assert row.cycles == times * profile.cycles
            assert row.worst_tile_bytes == profile.memory.max_tile_bytes <= 0.8 * most_bytes()
        else:
            assert row.cycles == 0 and row.worst_tile_bytes > 0.8 * most_bytes()
    with pytest.raises(ipu.TileMemoryError) as error:
        compiled(rows[OWN], 0.8)
    assert rows[OWN].worst_tile_bytes == error.value.needed_bytes


def test_rows_that_fit_come_first_by_cycles_then_others_by_memory() -> None:
    fits = [row for row in advice() if row.fits]
    others = [row for row in advice() if not row.fits]
    assert [*fits, *others] == list(advice()) and len(fits) > 1 and len(others) > 1
    assert [row.cycles for row in fits] == sorted(row.cycles for row in fits)
    assert [row.worst_tile_bytes for row in others] == sorted(row.worst_tile_bytes for row in others)
    assert advice().best() == fits[0] and fits[0].change == FLOAT16 and fits[1].change == AUTO


def test_the_table() -> None:
    head, *lines = str(advice()).splitlines()
    assert head.split() == ["change", "cycles", "saves", "worst", "tile"] and len(lines) == len(advice())
    for line, row in zip(lines, advice(), strict=True):
        kib = f"{row.worst_tile_bytes / 1024:,.1f} KiB"
        end = kib if row.fits else f"-  {kib}, does not fit"
        assert line.startswith(f"{row.change} ") and line.endswith(f" {end}")
        assert not row.fits or f" {row.cycles:,} " in line
    assert len({line.index(" KiB") - len(line.split(" KiB")[0].split()[-1]) for line in lines}) == 1  # one column


def test_prints_the_table_or_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    small = ipu.jit(lambda x: (x @ x.T).sum(), device=ipu.IPUModel(tiles_per_ipu=4))
    displayed = ipu.advise(small, jax.ShapeDtypeStruct((4, 4), np.float32))
    assert capsys.readouterr().out == f"{displayed}\n"
    assert ipu.advise(small, array(4, 4), show=False) == displayed
    assert capsys.readouterr().out == ""
    assert {row.change for row in displayed} == {OWN, FLOAT16}  # without a gradient nothing is computed again


def test_options_are_written_as_they_are_given() -> None:
    def until(x: jax.Array) -> jax.Array:
        x = jax.grad(lambda x: jnp.sin(x).sum())(x)
        return jax.lax.while_loop(lambda x: x.sum() < 10, lambda x: x * 2, x)

    fun = ipu.jit(until, device=ipu.IPUModel(tiles_per_ipu=4))
    x = array(8)
    with pytest.raises(ipu.ProfileError, match="trip count"):  # which its cycles depend on
        ipu.advise(fun, x)
    options = ipu.Options(trip_counts={"while[0]": 5}, partials="float16", allow_out_of_memory=True)
    rows = ipu.advise(fun.with_options(options), x, show=False)
    assert all(row.fits and row.cycles for row in rows)
    written = "options=ipu.Options(trip_counts={'while[0]': 5}, partials='float16', recompute=\"auto\")"
    assert written in {row.change for row in rows}


def test_the_function_s_own_option_is_not_tried_twice() -> None:
    rows = ipu.advise(fitted(recompute="auto"), *ARGS, batch_argnums=-1, show=False)
    assert {row.change for row in rows} == {OWN, NONE, ALL, STANDARD, HALF, DONATED, FLOAT16}


def test_names_that_nothing_fits() -> None:
    actual = ipu.advise(fitted(0.2), *ARGS, show=False)
    assert not any(row.fits or row.refused for row in actual)
    with pytest.raises(ipu.ArgumentError, match="no change that was tried fits the machine") as error:
        actual.best()
    assert f"{min(row.worst_tile_bytes for row in actual):,} bytes" in str(error.value)


def test_other_ways_have_to_fit_where_nothing_has_to() -> None:
    """Else `auto` would keep all."""
    rows = {row.change: row for row in ipu.advise(fitted(0.8, allow_out_of_memory=True), *ARGS, show=False)}
    assert not rows[OWN].fits and rows[OWN].cycles == 0 and rows[OWN].worst_tile_bytes > 0.8 * most_bytes()
    others = {row.change: row for row in advice()}
    assert all(rows[change] == others[change] for change in (ALL, STANDARD, AUTO))


def test_memory_for_code_counts() -> None:
    code = int(fitted().lower(*ARGS).compile().memory_analysis().code_bytes.max())
    device = ipu.IPUModel(tiles_per_ipu=16, interleaved_offset_bytes=code - 100)
    fun = ipu.jit(STEP, device=device, options=ipu.Options(allow_out_of_memory=True, byte_cost=0.5))
    row = next(row for row in ipu.advise(fun, *ARGS, show=False) if row.change == OWN)
    assert not row.fits and row.worst_tile_bytes <= device.target.bytes_per_tile


def test_a_change_that_cannot_be_compiled_is_a_row_with_the_reason() -> None:
    """Half of the batch is too little for four micro-batches of two replicas."""
    settings: Any = {"replicas": 2, "in_specs": (jax.P(), jax.P("replica")), "out_specs": jax.P()}

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        value = ipu.pipeline(lambda w, x: ((x @ w) ** 2).mean(), micro_batches=4)(w, x)
        return jax.lax.pmean(value, "replica")

    fun = ipu.jit(loss, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=4), **settings)
    actual = ipu.advise(fun, array(4, 4), array(8, 4), batch_argnums=1, show=False)
    refused = [row for row in actual if row.refused is not None]
    assert refused == list(actual)[-1:] and refused[0].change == HALF
    assert all("cannot be split into 4 micro-batches" in str(row.refused) for row in refused)
    table = str(actual).partition("\n\nnot tried")[0]
    assert table.endswith(str(refused[-1].refused)) and actual.best().change in (OWN, FLOAT16)


def test_the_best_row_has_the_reason_if_nothing_can_be_compiled() -> None:
    actual = ipu.advise(ipu.jit(STEP, device=ipu.CPU()), *ARGS, show=False)
    assert all(row.refused for row in actual)
    with pytest.raises(ipu.ArgumentError, match="no change that was tried can be compiled") as error:
        actual.best()
    assert "runs on ipu.CPU()" in str(error.value)


def test_refuses_invalid_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is compiled."""
    monkeypatch.setattr(ipu.jit(STEP).__class__, "lower", None)
    ws, x = ARGS
    for fun, args, batch, text in (
        (STEP, (ws, x), 1, "ipu.advise needs a function of ipu.jit"),
        (jax.jit(STEP), (ws, x), 1, "ipu.advise needs a function of ipu.jit"),
        (fitted(), (ws, x[:1023]), 1, "the batch of ipu.advise must have an even size"),
        (fitted(), (ws, np.float32(3)), 1, "the batch of ipu.advise must have an even size"),
        (fitted(), (ws, {"x": x, "y": x[:5]}), -1, "the batch of ipu.advise must have an even size"),
        (fitted(), (ws, x), 2, "names an argument that the call lacks"),
        (fitted(), (ws, x), (1, -3), "names an argument that the call lacks"),
        (fitted(), (ws, x), "x", "batch_argnums of ipu.advise cannot be 'x'"),
    ):
        with pytest.raises(ipu.ArgumentError, match=text):
            ipu.advise(fun, *args, batch_argnums=batch)


def test_state_goes_off_chip_first_and_then_all_that_is_donated() -> None:
    def step(w: jax.Array, m: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        m = 0.9 * m + jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
        return w - 0.1 * m, m

    fun = ipu.jit(step, donate_argnums=(0, 1), device=ipu.IPUModel(tiles_per_ipu=4))
    actual = {row.change: row for row in ipu.advise(fun, array(32, 32), array(32, 32), array(4, 32), show=False)}
    for chosen in ((1,), (0, 1)):
        repeated = fun.with_options(offload_argnums=chosen).lower(array(32, 32), array(32, 32), array(4, 32)).compile()
        assert actual[f"offload_argnums={chosen}"].cycles == repeated.profile.cycles


def test_arguments_that_are_donated_by_name_count() -> None:
    fun = ipu.jit(lambda w, m: (w + 1, m * 2), donate_argnames="m", device=ipu.IPUModel(tiles_per_ipu=4))
    args = array(4), array(5)
    assert [variant.change for variant in offloading(fun, args, ())] == ["offload_argnums=(1,)"]
    (variant,) = donating(fun, args, kept_arguments(fun, args))
    assert variant.change == "donate_argnums=(0, 1)"
    assert variant.fun.trace(*args).donate_argnums == (0, 1)


def test_a_large_table_is_offloaded_and_a_small_one_or_a_batch_is_not() -> None:
    def look_up(bias: Any, table: Any, ids: Any) -> Any:
        return table[ids].sum(1) + bias

    fun = ipu.jit(look_up, device=ipu.IPUModel(tiles_per_ipu=64))
    table, ids = jax.ShapeDtypeStruct((4_000, 16), np.float32), jax.ShapeDtypeStruct((8, 4), np.int32)
    args = array(16), table, ids
    rows = {row.change: row.cycles for row in ipu.advise(fun, *args, show=False)}
    assert rows.keys() == {OWN, FLOAT16, "offload_argnums=(1,)"}
    assert rows["offload_argnums=(1,)"] == fun.with_options(offload_argnums=(1,)).profile(*args).cycles < rows[OWN]

    def step(table: Any, ids: Any, wanted: Any) -> Any:
        grads = jax.grad(lambda table: ((table[ids].sum(1) - wanted) ** 2).sum())(table)
        return table - 0.1 * grads

    trained = ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=64))
    assert [each.number for each in kept_arguments(trained, (table, ids, array(8, 16)))] == [0]  # others are a batch
    assert [each.number for each in kept_arguments(fun, args, (-1,))] == [0, 1]


def test_arguments_of_several_arrays_are_told_from_batches() -> None:
    def step(batch: dict[str, Any], weights: dict[str, Any], scale: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda w: ((batch["x"] @ w["a"] + w["b"] - batch["y"]) ** 2).mean())(weights)
        return jax.tree.map(lambda w, g: w - scale * g, weights, grads), loss

    batch = {"x": array(8, 4), "y": array(8, 4)}
    kept = kept_arguments(ipu.jit(step), (batch, {"a": array(4, 4), "b": array(4)}, np.float32(0.1)))
    assert [argument.number for argument in kept] == [1]


def test_arguments_that_are_offloaded_already_stay_so() -> None:
    device = ipu.IPUModel(tiles_per_ipu=16)
    updated = ipu.jit(lambda x, y, z: (x, y + 1, z), device=device, donate_argnums=(0, 1), offload_argnums=(2,))
    args = (array(64), array(64), array(1024))
    changes = [variant.change for variant in offloading(updated, args, kept_arguments(updated, args))]
    assert changes == ["offload_argnums=(1, 2)", "offload_argnums=(0, 1, 2)"]


def test_refuses_a_call_without_an_offloaded_argument() -> None:
    fun = ipu.jit(lambda: jnp.ones(4), device=ipu.IPUModel(tiles_per_ipu=4), offload_argnums=0)
    with pytest.raises(ipu.ArgumentError, match="offload_argnums"):
        ipu.advise(fun, show=False)


def test_recomputation_is_tried_with_half_batches_if_nothing_fits() -> None:
    actual = ipu.advise(fitted(0.1), *ARGS, batch_argnums=1, show=False)
    assert f"{HALF}, {AUTO}" in {row.change for row in actual} and not any(row.fits for row in actual)


def test_pipelines_that_find_their_stages_are_tried_on_twice_the_ipus() -> None:
    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2).mean()

    def step(ws: jax.Array, x: jax.Array) -> jax.Array:
        value: jax.Array = ipu.pipeline(loss, micro_batches=4, stages="auto")(ws, x)
        return value

    fun = ipu.jit(step, device=ipu.IPUModel(2, tiles_per_ipu=4))
    changes = [row.change for row in ipu.advise(fun, array(4, 16, 16), array(8, 16), show=False)]
    assert 'device=ipu.IPUModel(num_ipus=4, arch="mk2", tiles_per_ipu=4)' in changes


def test_donation_saves_what_the_cause_says() -> None:
    def update(weights: Any, x: Any) -> Any:
        return jax.tree.map(lambda w: w * 0.9 + x.sum(), weights), x.sum()

    fun = ipu.jit(update, device=ipu.IPUModel(tiles_per_ipu=16))
    args = {"w": array(256, 64), "b": array(64)}, array(16)
    rows = {row.change: row.cycles for row in ipu.advise(fun, *args, show=False)}
    cause = next(each for each in fun.profile(*args).causes if each.name == "state that is not donated")
    assert rows[OWN] - rows[DONATED] == pytest.approx(cause.alone_cycles, rel=0.05)
    donated = ipu.jit(update, device=ipu.IPUModel(tiles_per_ipu=16), donate_argnums=0)
    assert DONATED not in {row.change for row in ipu.advise(donated, *args, show=False)}


def test_gains_are_those_of_the_rows_and_reports_show_them(tmp_path: Any) -> None:
    def update(weights: Any, x: Any) -> Any:
        return jax.tree.map(lambda w: w * 0.9 + x.sum(), weights), x.sum()

    fun = ipu.jit(update, device=ipu.IPUModel(tiles_per_ipu=16))
    actual = ipu.advise(fun, {"w": array(256, 64)}, array(16), show=False)
    rows = {row.change: row for row in actual}
    assert rows[DONATED].saved_cycles == rows[OWN].cycles - rows[DONATED].cycles > 0
    assert rows[DONATED].saved_bytes == rows[OWN].worst_tile_bytes - rows[DONATED].worst_tile_bytes
    assert all(not hint.tried and hint.saved_cycles > 0 for hint in actual.hints)
    figures = actual.profile
    assert figures is not None and figures.advice == (*actual.rows, *actual.hints)
    gain = f"saves {rows[DONATED].saved_cycles:,} cycles"
    assert gain in figures.summary() and gain not in fun.profile({"w": array(256, 64)}, array(16)).summary()
    figures.to_html(tmp_path / "page.html")
    assert gain in (tmp_path / "page.html").read_text(encoding="utf-8")
    figures.save(tmp_path / "saved.profile")
    assert ipu.Profile.load(tmp_path / "saved.profile").advice == figures.advice
    actual.to_csv(tmp_path / "table.csv")
    lines = (tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + len(actual.rows) + len(actual.hints) and lines[0].startswith("change,cycles,")
    with pytest.raises(ipu.ArgumentError, match="cannot write"):
        actual.to_csv(tmp_path / "none" / "table.csv")
    with pytest.raises(ipu.ArgumentError, match="needs a path"):
        actual.to_csv(1)


def test_pipelines_are_tried_with_other_schedules_and_micro_batches() -> None:
    def loss(ws: Any, x: Any) -> Any:
        for number, w in enumerate(ws):
            with ipu.stage(number):
                x = jnp.tanh(x @ w)
        return (x**2).mean()

    def step(micro_batches: int, schedule: Any, ws: Any, x: Any) -> Any:
        return ipu.pipeline(jax.value_and_grad(loss), micro_batches=micro_batches, schedule=schedule)(ws, x)

    args = [array(16, 16)] * 2, array(16, 16)
    device = ipu.IPUModel(2, tiles_per_ipu=4)
    actual = ipu.advise(ipu.jit(partial(step, 4, "1f1b"), device=device), *args, show=False)
    rows = {row.change: row.cycles for row in actual}
    for change, changed in (
        ("micro_batches=8 of ipu.pipeline", partial(step, 8, "1f1b")),
        ("micro_batches=2 of ipu.pipeline", partial(step, 2, "1f1b")),
        ('schedule="gpipe" of ipu.pipeline', partial(step, 4, "gpipe")),
    ):
        assert rows[change] == ipu.jit(changed, device=device).profile(*args).cycles
    assert ipu.jit(partial(step, 4, "1f1b"), device=device).profile(*args).cycles == rows[OWN]
    hidden = ipu.advise(ipu.jit(jax.jit(partial(step, 4, "1f1b")), device=device), *args, show=False)
    assert any("keeps its settings" in str(row.refused) for row in hidden)
