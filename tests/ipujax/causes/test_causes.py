"""Causes of cycles: their sums, and their gains beside those of programs without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.runtime.causes import COMPUTATION, Cause, removable_cycles
from ipujax.runtime.causes.removals import CAUSES, EMULATION, SINGLE_TILES, Removals
from ipujax.runtime.timeline.clocks import COMPUTE
from ipujax.runtime.views import verdict
from ipujax.runtime.views.verdict import remedy

TILES = 64


def machine(num_ipus: int = 1, **changes: Any) -> ipu.IPUModel:
    return ipu.IPUModel(num_ipus, "mk2", tiles_per_ipu=TILES, **changes)


def profile(fun: Callable[..., Any], *args: Any, num_ipus: int = 1, **settings: Any) -> ipu.Profile:
    return ipu.jit(fun, device=machine(num_ipus), **settings).profile(*args)


def by_name(figures: ipu.Profile) -> Mapping[str, Cause]:
    return {cause.name: cause for cause in figures.causes}


def array(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def update(state: Any, x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * 0.9 + x.sum(), state)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def two_stages(ws: Any, x: Any, width: int = 64) -> Any:
    with ipu.stage(0):
        h = layer(ws[0], x)
    with ipu.stage(1):
        for w in ws[1:]:
            h = layer(w, h)
        return jnp.mean(h**2)


def train(ws: Any, x: Any) -> Any:
    grad = ipu.pipeline(jax.value_and_grad(two_stages), micro_batches=4)
    return grad(ws, x)


PROGRAMS: dict[str, Callable[[], ipu.Profile]] = {
    "layer": lambda: profile(layer, array(128, 128), array(64, 128)),
    "pipeline": lambda: profile(train, [array(64, 64)] * 3, array(32, 64), num_ipus=2),
    "scan": lambda: profile(lambda x: lax.scan(lambda c, _: (c * 1.5, c[0]), x, length=9), array(4096)),
    "branch": lambda: profile(lambda p, x: lax.cond(p, jnp.sin, lambda x: x + 1, x), array(dtype=bool), array(512)),
    "replicas": lambda: profile(lambda x: lax.psum(jnp.tanh(x), "replica"), array(256), num_ipus=4, replicas=4),
    "nothing": lambda: profile(lambda x: x, array(8), donate_argnums=0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_waterfall_adds_up_to_the_cycles(name: str) -> None:
    figures = PROGRAMS[name]()
    assert sum(cause.cycles for cause in figures.causes) == figures.cycles
    names = [cause.name for cause in figures.causes]
    assert set(names) <= {*CAUSES, COMPUTATION} and names[-1] == COMPUTATION
    computing_cycles = figures.causes[-1].cycles
    saved = [removable_cycles(cause.name, cause.alone_cycles, computing_cycles) for cause in figures.causes[:-1]]
    assert saved == sorted(saved, reverse=True)
    assert figures.causes[0].cycles == figures.causes[0].alone_cycles  # the longest part is as long as is promised
    assert all(cause.alone_cycles <= figures.cycles for cause in figures.causes)


def test_state_that_is_not_donated_costs_what_donation_saves() -> None:
    args = {"w": array(256, 256), "v": array(256, 256)}, array(64)
    before = profile(update, *args)
    after = profile(update, *args, donate_argnums=0)
    saved = by_name(before)["state that is not donated"].alone_cycles
    assert saved == pytest.approx(before.cycles - after.cycles, rel=0.01)
    assert "state that is not donated" not in by_name(after)
    assert verdict(before).sentence.startswith("State that is not donated")


def test_no_exchange_equals_an_endless_one() -> None:
    figures = profile(layer, array(128, 128), array(64, 128))
    fast = machine(exchange_bytes_per_cycle=1e12, exchange_startup_cycles=0, exchange_receive_cycles=0)
    compiled = ipu.jit(layer, device=machine()).lower(array(128, 128), array(64, 128)).compile()
    saved = figures.cycles - compiled.on(fast).profile.cycles
    alone = by_name(figures)["exchange of products"].alone_cycles
    assert saved <= alone
    assert saved == pytest.approx(alone, rel=0.2)  # a cycle of each exchange is left of the endless one


def test_syncs_and_starts_that_take_no_time() -> None:
    """Nearly all of a chain of steps of few elements is their start."""

    def chain(x: Any) -> Any:
        for _ in range(9):
            x = lax.optimization_barrier(x * 2)
        return x

    figures = profile(chain, array(64), donate_argnums=0)
    chained = ipu.jit(chain, device=machine(), donate_argnums=0).lower(array(64)).compile()
    without_sync = chained.on(machine(internal_sync_cycles=0, global_sync_cycles=0)).profile.cycles
    alone = by_name(figures)["sync and start of supersteps"].alone_cycles
    assert figures.cycles - without_sync < alone <= figures.cycles
    assert alone > 0.8 * figures.cycles


def test_a_fallback_is_named() -> None:
    figures = profile(jnp.linalg.svd, array(24, 24))
    assert figures.fallbacks
    assert verdict(figures).sentence.startswith("Operations without a parallel rule")


def test_scalars_on_one_tile() -> None:
    def schedule(x: Any, step: Any) -> Any:
        rate = step
        for _ in range(30):
            rate = lax.optimization_barrier(jnp.sin(rate))
        return x * rate

    figures = profile(schedule, array(64), array(), donate_argnums=(0, 1))
    assert verdict(figures).sentence.startswith("Steps on a single tile")


def test_a_scalar_that_is_computed_beside_an_array() -> None:
    def schedule(x: Any, step: Any) -> Any:
        y = jnp.tanh(x)
        return y, jnp.cos(step)

    figures = profile(schedule, array(TILES * 64), array(), donate_argnums=(0, 1))
    assert len(figures.executable.graph.groups) == 1  # one compute set has both
    cause = by_name(figures)["steps on a single tile"]
    with_less = profile(lambda x, step: (jnp.tanh(x), -step), array(TILES * 64), array(), donate_argnums=(0, 1))
    assert cause.alone_cycles == pytest.approx(figures.cycles - with_less.cycles, rel=0.02)
    assert [operation.origin.line for operation in figures.operations() if "cos" in operation.names] == [
        cause.origin.line
    ]


def test_the_start_of_a_superstep_has_no_work_of_an_element() -> None:
    figures = profile(lambda x: jnp.cos(x), array(TILES), donate_argnums=0)  # an element on each tile
    cycles = by_name(figures)
    assert cycles[COMPUTATION].cycles > 10 * cycles["sync and start of supersteps"].cycles


def test_emulated_dtypes() -> None:
    with jax.enable_x64(True):
        wide = profile(lambda x: jnp.sin(x) * x, array(1 << 14, dtype=np.float64), donate_argnums=0)
    assert by_name(wide)["emulated dtypes"].alone_cycles > 0.5 * wide.cycles
    assert verdict(wide).sentence.startswith("Emulated dtypes")


def test_collectives_of_small_batches() -> None:
    figures = profile(lambda x: lax.psum(x, "replica"), array(1 << 16), num_ipus=16, replicas=16, donate_argnums=0)
    assert by_name(figures)["collectives"].alone_cycles > 0.5 * figures.device_cycles


def test_waits_of_a_pipeline_are_its_idle_time() -> None:
    figures = profile(train, [array(64, 64)] * 6, array(32, 64), num_ipus=2)
    causes = by_name(figures)
    busiest = figures.cycles - min(phases["idle"] for phases in figures.ipu_phase_cycles)
    assert causes["IPUs that wait"].alone_cycles == figures.cycles - busiest
    assert causes["unequal work of IPUs"].alone_cycles > 0


def test_a_recorded_run() -> None:
    def grow(x: Any) -> Any:
        return lax.while_loop(lambda x: x.sum() < 100, lambda x: x * 2, x)

    compiled = ipu.jit(grow, device=machine()).lower(array(64)).compile()
    with pytest.raises(ipu.ProfileError, match="trip count"):
        _ = compiled.profile.causes
    assert "Verdict" not in compiled.profile.summary()
    _, figures = compiled.profile_call(jnp.ones(64))
    assert sum(cause.cycles for cause in figures.causes) == figures.cycles


def test_saved_causes(tmp_path: Any) -> None:
    figures = PROGRAMS["pipeline"]()
    figures.save(tmp_path / "profile.json")
    assert ipu.Profile.load(tmp_path / "profile.json").causes == figures.causes


def test_streaming_memory_beside_other_work() -> None:
    fun = ipu.jit(update, device=machine(), offload_argnums=0, donate_argnums=0, options=ipu.Options(io_tiles=8))
    figures = fun.profile({"w": array(256, 256)}, array(64))
    assert by_name(figures)["streaming memory"].alone_cycles > 0
    assert sum(cause.cycles for cause in figures.causes) == figures.cycles


def test_keys_of_random_numbers() -> None:
    figures = profile(lambda key: jax.random.normal(jax.random.split(key)[0], (64,)), jax.random.key(0))
    assert sum(cause.cycles for cause in figures.causes) == figures.cycles


def test_slow_paths_of_odd_rows() -> None:
    def scaled(x: Any, w: Any) -> Any:
        return jax.nn.softmax(x * w, axis=-1) * w

    odd = profile(scaled, array(256, 197), array(197), donate_argnums=(0,))
    even = profile(scaled, array(256, 200), array(200), donate_argnums=(0,))
    name = "slow paths of odd rows"
    assert by_name(odd)[name].alone_cycles > 0
    assert name not in by_name(even)
    without = odd.device_cycles - by_name(odd)[name].alone_cycles
    assert without == pytest.approx(even.device_cycles, rel=0.1)


def test_the_page_and_the_summary_begin_with_the_verdict(tmp_path: Any) -> None:
    figures = PROGRAMS["pipeline"]()
    result = verdict(figures)
    figures.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.index(result.sentence) < page.index('class="answers"')
    for cause in figures.causes:
        assert cause.cycles <= 0 or f'title="{cause.name}: {cause.cycles:,} cycles' in page
    text = figures.summary()
    assert text.index(result.sentence) < text.index("What limits this program")
    assert all(remedy in text and remedy in page.replace("&#x27;", "'") for remedy in result.remedies)


def test_the_exchange_of_products_is_named_where_it_saves_most() -> None:
    def repeated(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 20, lambda _, x: jnp.tanh(x @ w), x), w

    device = ipu.IPUModel(tiles_per_ipu=512)
    figures = ipu.jit(repeated, device=device, donate_argnums=(0, 1)).profile(array(512, 512), array(512, 512))
    result = figures.verdict
    assert result.limit == figures.causes[0] and figures.causes[0].name == "exchange of products"
    assert result.sentence.startswith("Exchange of products: ")
    assert result.limit not in result.causes  # plans trade it for computing, so it promises nothing


def test_latency_of_the_host_is_of_no_argument() -> None:
    figures = profile(lambda scale, x: jnp.tanh(x).sum(0) * scale, array(), array(64, 64))
    rows = {row.name: row.cycles for row in figures.step_costs if row.cycles}
    latency_cycles = figures.target.host_latency_seconds * figures.target.clock_hz
    assert rows["latency"] == pytest.approx(2 * latency_cycles, abs=2)  # one in, one out
    assert rows.get("scale", 0) < 10 < rows["x"]
    limit = figures.verdict.limit
    assert limit is not None and str(limit.origin) == "latency of host exchanges"
    assert "several batches a call" in figures.verdict.remedies[0]
    larger = profile(lambda scale, x: jnp.tanh(x).sum() * scale, array(), array(1024, 1024)).verdict
    assert larger.limit is not None and str(larger.limit.origin) == "host stream x"
    assert "constant" in larger.remedies[0]


def test_remedies_against_unequal_tiles_are_those_of_their_reason() -> None:
    """A sort of few elements has its work on few tiles; rows that do not divide leave at most half of them idle."""
    few = ipu.jit(jnp.sort, device=ipu.IPUModel(), donate_argnums=0).profile(array(4096)).verdict
    assert few.causes[0].name == "unequal work of tiles" and "jax.vmap" in few.remedies[0]
    assert "divide" not in few.remedies[0]
    uneven = profile(lambda x: jax.nn.softmax(jnp.sin(x)), array(TILES + 1, 4096), donate_argnums=0).verdict
    remedies = {cause.name: remedy for cause, remedy in zip(uneven.causes, uneven.remedies, strict=True)}
    assert "divide evenly" in remedies["unequal work of tiles"]


def test_what_a_stencil_exchanges_promises_nothing() -> None:
    """Each element reads its neighbours: no formulation of the loop has them all on its tile."""

    def smoothed(x: Any) -> Any:
        wide = jnp.pad(x, 1)
        neighbours = wide[2:, 1:-1] + wide[:-2, 1:-1] + wide[1:-1, 2:] + wide[1:-1, :-2]
        return x + 0.1 * (neighbours - 4 * x)

    figures = profile(lambda x: lax.fori_loop(0, 50, lambda _, x: smoothed(x), x), array(256, 256), donate_argnums=0)
    moves = {"exchange between tiles", "rearrangement on tiles"}
    assert sum(cause.alone_cycles for cause in figures.causes if cause.name in moves) > 0.1 * figures.cycles
    assert moves.isdisjoint(cause.name for cause in figures.verdict.causes)


def test_no_waits_are_promised_beyond_the_bubble() -> None:
    """IPUs in lockstep wait for the exchanges of others too, which further micro-batches have as well."""
    from tests.ipujax.causes.planted_kinds import KINDS

    figures = KINDS["a micro-batch for each stage"].profile()
    bubble_cycles = sum(each.ideal_share * each.cycles for each in figures.pipelines)
    gains = dict(zip((cause.name for cause in figures.verdict.causes), figures.verdict.gains, strict=True))
    assert 0 < gains["IPUs that wait"] <= bubble_cycles < by_name(figures)["IPUs that wait"].alone_cycles


def test_rows_of_a_loop_are_overlapped_at_best() -> None:
    def means(w: Any, xs: Any) -> Any:
        return w, lax.map(lambda x: layer(w, x).mean(), xs)

    streamed = ipu.Options(stream_loops=True)
    figures = profile(means, array(128, 128), array(8, 4096, 128), donate_argnums=0, options=streamed)
    result = figures.verdict
    assert result.causes[0].name == "other transfers of the host" and "io_tiles" in result.remedies[0]
    assert result.gains[0] == min(result.causes[0].alone_cycles, figures.cycles - result.causes[0].alone_cycles)
    assert f"at least {figures.cycles - result.gains[0]:,}" in result.sentence
    overlapped = profile(
        means,
        array(128, 128),
        array(8, 4096, 128),
        donate_argnums=0,
        options=ipu.Options(stream_loops=True, io_tiles=16),
    )
    cause = by_name(overlapped)["other transfers of the host"]
    assert "float16" in remedy(cause, overlapped) and "io_tiles" not in remedy(cause, overlapped)


def test_a_callback_is_named_where_its_latency_limits() -> None:
    def step(_: Any, x: Any) -> Any:
        return x * 0.9 + jax.pure_callback(np.tanh, jax.ShapeDtypeStruct((), np.float32), x.mean())

    figures = profile(lambda x: lax.fori_loop(0, 20, step, x), array(4096), donate_argnums=0)
    assert "pure_callback at test_causes.py" in figures.verdict.remedies[0]


def test_data_of_a_callback_are_no_rows_of_a_loop() -> None:
    def called(x: Any) -> Any:
        return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1

    figures = profile(called, array(1 << 18))
    cause, result = figures.causes[0], figures.verdict
    assert cause.name == "other transfers of the host" and result.gains[0] == cause.alone_cycles
    assert "pure_callback at test_causes.py" in result.remedies[0]
    assert f"Without, it takes {figures.cycles - cause.alone_cycles:,}" in result.sentence


def test_streams_of_a_program_by_hand_are_no_rows_of_a_loop() -> None:
    from ipujax import poplar, popops, poputil

    graph = poplar.Graph(machine().target)
    program = poplar.program.Sequence()
    x = graph.add_variable(poplar.FLOAT, [1 << 18], "x")
    poputil.map_tensor_linearly(graph, x)
    program.add(poplar.program.Copy(graph.add_host_to_device_fifo("x", poplar.FLOAT, 1 << 18), x))
    popops.mul_in_place(graph, x, x, program)
    figures = poplar.Engine(graph, program).profile
    cause, result = figures.causes[0], figures.verdict
    assert cause.name == "other transfers of the host" and result.gains[0] == cause.alone_cycles
    assert "HALF" in result.remedies[0]


def test_wide_numbers_cost_the_bytes_that_they_have_beyond_native_ones() -> None:
    with jax.enable_x64(True):
        wide = profile(lambda x: x * x + 1, array(1 << 16, dtype=np.int64))
        native = profile(lambda x: x * x + 1, array(1 << 16, dtype=np.int32))
    saved = by_name(wide)["emulated dtypes"].alone_cycles
    assert saved == pytest.approx(wide.cycles - native.cycles, rel=0.05)


def test_emulated_work_of_a_single_tile_is_no_computation() -> None:
    """Steps that are spread over all tiles are computed in native dtypes there, where both causes are removed."""
    executable = ipu.jit(jnp.sort, device=machine()).lower(array(256, dtype=jnp.bfloat16)).compile().executable
    removals = Removals(executable)
    spread, native, both = (
        removals.without(causes)[..., COMPUTE].sum()
        for causes in ([SINGLE_TILES], [EMULATION], [SINGLE_TILES, EMULATION])
    )
    assert both < min(spread, native)


def test_programs_by_hand_are_told_to_map_their_variables() -> None:
    from tests.ipujax.causes.planted_programs import poplar_profile

    result = verdict(poplar_profile(1))
    assert "set_tile_mapping" in result.remedies[0]
