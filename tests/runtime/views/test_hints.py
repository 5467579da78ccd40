"""Each hint is shown where its condition holds, and only there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax.runtime.profile import Figures
from ipujax.runtime.tensor.roles import INPUTS, OPTIMISER_STATE, PARTIALS, RECOMPUTED, STORED, WEIGHTS
from ipujax.runtime.views.answers import costliest_operation, fullest_tile, line_to_change, waiting_ipu
from ipujax.runtime.views.hints import MEMORY_HINTS, TIME_HINTS, WAIT_HINTS, hints
from ipujax.runtime.views.situation import Situation, part_situation, program_situation

DENSE = Situation(phase="compute", multiplies=True, precision="float16", peak_share=0.9)
FULL = Situation(fullness=0.9, cycles_per_byte=0.5)
OVER = replace(FULL, fullness=1.5, fits=False)
TABLES = {"time": TIME_HINTS, "memory": MEMORY_HINTS, "wait": WAIT_HINTS}
# For each hint, where it holds, and what else has to be so.
HOLDS: dict[tuple[str, str], tuple[Situation, dict[str, Any]]] = {
    ("time", "fallback"): (Situation(phase="compute", fallback="svd", tile_balance=0.01), {"fallback": ""}),
    ("time", "emulated"): (Situation(phase="compute", emulated="bfloat16"), {"emulated": ""}),
    ("time", "schedule"): (
        Situation(phase="compute", tile_balance=0.01, has_backward=True),
        {"has_backward": False, "tile_balance": 0.9, "fallback": "svd"},
    ),
    ("time", "few tiles"): (Situation(phase="compute", tile_balance=0.01), {"tile_balance": 0.9, "fallback": "svd"}),
    ("time", "uneven"): (Situation(phase="compute", tile_balance=0.6), {"tile_balance": 0.3, "splits_batches": True}),
    ("time", "micro-batches"): (Situation(phase="compute", splits_batches=True), {"splits_batches": False}),
    ("time", "half"): (
        replace(DENSE, precision="float32"),
        {"precision": "float16", "tile_balance": 0.01, "fallback": "svd", "phase": "exchange"},
    ),
    ("time", "less"): (DENSE, {"peak_share": 0.1, "multiplies": False, "phase": "exchange"}),
    ("time", "replicas"): (replace(DENSE, has_backward=True), {"has_backward": False, "peak_share": 0.1}),
    ("time", "larger"): (replace(DENSE, peak_share=0.1), {"peak_share": 0.9, "multiplies": False}),
    ("time", "move less"): (
        replace(DENSE, peak_share=0.1, is_exchange_bound=True),
        {"is_exchange_bound": False, "peak_share": 0.9},
    ),
    ("time", "merge"): (Situation(phase="exchange"), {"phase": "compute"}),
    ("time", "half exchange"): (Situation(phase="exchange", precision="float32"), {"precision": "float16"}),
    ("time", "cut"): (Situation(phase="global_exchange", num_ipus=2), {"num_ipus": 1}),
    ("time", "fewer replicas"): (Situation(phase="global_exchange", replicas=2), {"replicas": 1}),
    ("time", "donate"): (
        Situation(phase="host_exchange", updates_arguments=True),
        {"updates_arguments": False, "phase": "compute"},
    ),
    ("time", "scan"): (Situation(phase="host_exchange"), {"has_loop": True}),
    ("time", "overlap"): (Situation(phase="host_exchange", has_loop=True), {"has_loop": False, "overlaps_io": True}),
    ("time", "sync"): (Situation(phase="sync"), {"phase": "exchange"}),
    ("memory", "spread"): (replace(FULL, crowding="w", crowding_share=0.5), {"crowding": "", "fullness": 0.3}),
    ("memory", "shorter parts"): (replace(FULL, main_use=RECOMPUTED), {"main_use": STORED, "crowding": "w"}),
    ("memory", "shard"): (replace(FULL, main_use=OPTIMISER_STATE, replicas=2), {"replicas": 1, "main_use": WEIGHTS}),
    ("memory", "sums"): (replace(FULL, main_use=PARTIALS), {"cycles_per_byte": 16.0, "main_use": STORED}),
    ("memory", "recompute"): (
        replace(FULL, stores_activations=True, has_backward=True),
        {"has_backward": False, "recomputes": True, "fullness": 0.3, "crowding": "w", "stores_activations": False},
    ),
    ("memory", "batch"): (replace(FULL, main_use=INPUTS), {"main_use": WEIGHTS, "fullness": 0.3}),
    ("memory", "offload"): (replace(FULL, main_use=WEIGHTS), {"main_use": STORED}),
    ("memory", "stages"): (replace(OVER, main_use=WEIGHTS), {"fits": True, "main_use": STORED}),
    ("memory", "split operands"): (replace(FULL, main_use="message"), {"main_use": "stack", "cycles_per_byte": 16.0}),
    ("memory", "copies"): (replace(FULL, main_use="rearrangement"), {"main_use": "stack", "cycles_per_byte": 16.0}),
    ("memory", "split results"): (replace(FULL, main_use="outputEdge"), {"main_use": "stack", "cycles_per_byte": 16.0}),
    ("memory", "borrowed"): (replace(FULL, main_use="borrowed"), {"main_use": "stack", "fullness": 0.3}),
    ("memory", "vertices"): (replace(FULL, main_use="vertexInstanceState"), {"fullness": 0.3}),
    ("memory", "kinds"): (replace(FULL, main_use="vertexCode"), {"fullness": 0.3}),
    ("memory", "share code"): (replace(FULL, main_use="controlCode"), {"has_loop": True, "main_use": "vertexCode"}),
    ("memory", "shorter exchanges"): (
        replace(FULL, main_use="internalExchangeCode"),
        {"cycles_per_byte": 16.0, "main_use": "controlCode"},
    ),
    ("wait", "fill"): (Situation(wait="filling", has_pipeline=True), {"has_pipeline": False, "wait": "steady"}),
    ("wait", "pipeline"): (
        Situation(wait="draining", has_stages=True),
        {"has_pipeline": True, "has_stages": False, "wait": ""},
    ),
    ("wait", "balance"): (Situation(wait="steady"), {"waits_alike": True, "wait": "filling"}),
    ("wait", "schedule"): (
        Situation(wait="steady", waits_alike=True, has_pipeline=True),
        {"waits_alike": False, "has_pipeline": False},
    ),
}


def test_every_hint_has_a_case() -> None:
    assert set(HOLDS) == {(table, name) for table, rows in TABLES.items() for name in rows}


@pytest.mark.parametrize(("table", "name"), HOLDS)
def test_a_hint_needs_all_of_its_condition(table: str, name: str) -> None:
    hint = TABLES[table][name]
    (situation, others) = HOLDS[table, name]
    assert hint.holds(situation) and hints({name: hint}, situation) and "{" not in hints({name: hint}, situation)
    for field, value in others.items():
        assert not hint.holds(replace(situation, **{field: value})), field


def test_no_hint_for_an_empty_part() -> None:
    assert not any(hints(table, Situation()) for table in TABLES.values())


@pytest.mark.parametrize("table", TABLES)
def test_texts_use_the_words_of_the_field(table: str) -> None:
    wrong = re.compile(r"\b(price of|dearer|box|contender|turns?|jvp|lies?)\b")
    assert not [hint.text for hint in TABLES[table].values() if wrong.search(hint.text)]


# --- programs ---------------------------------------------------------------------------------------------------------


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def products(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(6):
        x = x @ w
    return x


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(jnp.sin(products(w, x))) ** 2)


def staged(w: jax.Array, x: jax.Array) -> Any:
    def layers(w: jax.Array, x: jax.Array) -> jax.Array:
        with ipu.stage(0):
            x = jnp.tanh(x @ w)
        with ipu.stage(1):
            return jnp.mean((x @ w) ** 2)

    return ipu.pipeline(layers, micro_batches=4)(w, x)


@cache
def profile(name: str) -> Figures:
    """The profile of a program, on eight tiles."""
    width = 256
    fun: Callable[..., Any]
    dtype = "float32"
    settings = {}
    ipus = 1
    tile = 624 * 1024
    options = {}
    match name:
        case "forward half":
            fun = products
            dtype = "float16"
            settings = {"donate_argnums": (0, 1)}
        case "forward":
            fun = products
            settings = {"donate_argnums": (0, 1)}
        case "crowded forward" | "crowded training":
            fun = products if name == "crowded forward" else jax.grad(loss)
            width = 128
            tile = 24 * 1024
            options = {"allow_out_of_memory": True}
        case "svd":
            width = 8

            def fun(w, x):
                return jnp.linalg.svd(w @ x, compute_uv=False).sum()

        case "pipeline":
            fun = staged
            ipus = 2
            width = 16
        case "loop":
            fun = lambda w, x: jax.lax.scan(lambda x, w: (jnp.sin(x * w), None), x, w)[0]  # noqa: E731
            width = 64
    device = ipu.IPUModel(num_ipus=ipus, tiles_per_ipu=8, bytes_per_tile=tile)
    x = array(width, width, dtype=dtype)
    jitted = ipu.jit(fun, device=device, options=ipu.Options(**options), **settings)  # type: ignore[arg-type, call-overload]
    return jitted.lower(x, x).compile().profile


def test_half_precision_is_not_recommended_to_half_precision() -> None:
    assert "half precision" in line_to_change(profile("forward")).hint
    answer = line_to_change(profile("forward half"))
    assert "compute" in answer.sentence and "half" not in answer.hint and "float16" not in answer.hint


def test_a_product_merged_with_casts_is_of_the_precision_of_its_products() -> None:
    """Sums that are cast in a step behind the product do not change its precision."""
    steps = profile("forward half").step_costs
    rows = [row for row in steps if "dot_general" in row.name and "cast" not in row.name and row.flops]
    assert rows and {row.precision for row in rows} == {"float16"}


def test_recomputation_is_for_gradients_that_keep_values() -> None:
    forward, training = (profile(f"crowded {name}") for name in ("forward", "training"))
    assert not program_situation(forward).has_backward and program_situation(training).has_backward
    assert "recompute" not in fullest_tile(forward).hint
    assert program_situation(training).fullness > 0.75
    assert program_situation(training).stores_activations and not program_situation(forward).stores_activations
    assert "recompute" in fullest_tile(training).hint


def test_a_fallback_is_not_taken_for_a_schedule() -> None:
    hint = line_to_change(profile("svd")).hint
    assert "no parallel rule and runs on one tile" in hint and "schedule" not in hint and "jax.vmap" in hint
    assert "no parallel rule" not in line_to_change(profile("forward")).hint


def test_the_line_of_a_pipeline_has_no_products_to_make_smaller() -> None:
    piped = profile("pipeline")
    rows = [row for row in piped.operations() if "(staged)" in str(row.origin)]
    assert rows and piped.operations() and program_situation(piped).has_pipeline
    answer = line_to_change(piped)
    assert "(staged)" not in answer.subject or "product" not in answer.hint
    assert not program_situation(profile("forward")).has_pipeline
    assert not waiting_ipu(piped).hint.startswith("ipu.pipeline")


def test_transfers_are_overlapped_in_loops_only() -> None:
    loop = profile("loop")
    straight = profile("svd")
    assert program_situation(loop).has_loop and not program_situation(straight).has_loop
    assert "io_tiles" not in costliest_operation(straight).hint


def test_the_situation_of_no_operations_is_that_of_the_program() -> None:
    forward = profile("forward")
    assert part_situation(forward, [], "") == program_situation(forward)
