"""Automatic stages fit the memory of their IPUs with all other arguments, such as the state of an optimiser."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipujax as ipu
from ipujax.lowering.lower import lower
from ipujax.lowering.pipelining.cuts import _resident_bytes, cut_positions
from ipujax.runtime.compile import compile
from ipujax.runtime.options import Options
from ipujax.runtime.target.target import Target
from tests.ipujax.pipeline.layer_models import MODELS, batch, parameters
from tests.ipujax.pipeline.pipeline_models import array
from tests.lowering.helpers import assert_same, lowered, quick_jit, run_tiles, small_target
from tests.lowering.pipelining.search_helpers import search_of

TILES = 4


def chain(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


WIDTHS = (40, 40, 40, 4, 4, 4)
PARAMS = [jnp.asarray(array(a, b, seed=n)) for n, (a, b) in enumerate(pairwise(WIDTHS))]
OPTIMIZER = optax.adam(1e-2)
STATE = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(OPTIMIZER.init, PARAMS))
ARGS = PARAMS, STATE, array(16, WIDTHS[0])
GRADIENT = ipu.pipeline(jax.value_and_grad(chain), micro_batches=8, stages=2)


def step(params: Any, state: Any, x: jax.Array) -> Any:
    value, grads = GRADIENT(params, x)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def target_of(bytes_per_tile: int) -> Target:
    return small_target(TILES, num_ipus=2, bytes_per_tile=bytes_per_tile, interleaved_offset_bytes=bytes_per_tile)


TIGHT = target_of(35_000)


@pytest.fixture(scope="module")
def tile_bytes() -> dict[int, int]:
    """Bytes of the fullest tile of the entire step, for each position to cut at."""
    search = search_of(step, ARGS, TIGHT)
    options = Options(allow_out_of_memory=True)
    bytes_of_cut = {}
    for cut in range(1, len(search.work.forward_cycles)):
        program = lower(search.rewrite((cut,)).jaxpr, TIGHT)
        bytes_of_cut[cut] = compile(program.graph, program.program, options=options).memory.max_tile_bytes
    return bytes_of_cut


def test_finds_a_cut_that_fits_with_the_optimiser_state(tile_bytes: dict[int, int]) -> None:
    """Of all positions few leave room for two moments of each parameter; the best without moments is none of them."""
    fitting = {cut for cut, num_bytes in tile_bytes.items() if num_bytes <= TIGHT.bytes_per_tile}
    assert 0 < len(fitting) < len(tile_bytes) / 3
    (cut_without_state,) = search_of(lambda params, state, x: GRADIENT(params, x), ARGS, TIGHT).search()
    assert cut_without_state not in fitting
    program = lowered(step, ARGS, TIGHT)
    executable = compile(program.graph, program.program)  # raises TileMemoryError if it does not fit
    assert executable.memory.max_tile_bytes in {tile_bytes[cut] for cut in fitting}
    expected = jax.tree.leaves(quick_jit(step)(*ARGS))
    assert_same(run_tiles(program, ARGS), expected, 1e-4, 1e-6, "tile by tile")


def test_assigns_state_to_the_segment_of_its_parameters() -> None:
    """Before any cut, the other arguments of each segment are twice its parameters, and a count."""
    search = search_of(step, ARGS, target_of(624 << 10))
    bytes_of_segment: dict[int, int] = {}
    for number, size in search.resident:
        bytes_of_segment[number] = bytes_of_segment.get(number, 0) + size
    bytes_of_segment[0] -= 4
    assert bytes_of_segment == {users[0]: 2 * size for users, size in search.work.parameter_bytes}


def test_assigns_state_of_stacks_to_each_layer() -> None:
    params = {name: jnp.asarray(x) for name, x in parameters(5).items() if name in ("w", "b", "table")}
    gradient = ipu.pipeline(jax.value_and_grad(MODELS["plain"](5)), micro_batches=4, stages=2)

    def update(params: Any, state: Any, rows: Any) -> Any:
        _, grads = gradient(params, jax.random.key(0), rows)
        return OPTIMIZER.update(grads, state, params)

    search = search_of(update, (params, OPTIMIZER.init(params), batch(8)), target_of(624 << 10))
    (loop,) = search.batch.loops
    segments = search.batch.shard_segments()
    for row in range(5):
        sizes = sorted(size for segment, size in search.resident if segment == segments[loop, row] and size > 4)
        assert sizes == [4 * 6, 4 * 6, 4 * 6 * 6, 4 * 6 * 6]


def test_refuses_a_program_that_no_cut_fits() -> None:
    with pytest.raises(ipu.ArgumentError, match="no cut into 2 stages fits the memory"):
        lowered(step, ARGS, target_of(4_000))


def test_reports_the_best_cut_if_none_fits() -> None:
    program = lowered(step, ARGS, target_of(20_000))
    with pytest.raises(ipu.TileMemoryError):
        compile(program.graph, program.program)


def test_counts_a_parameter_in_each_stage_that_uses_it() -> None:
    """Of random users, between any two bounds; and another argument of the third segment."""
    rng = np.random.default_rng(0)
    count = 6
    parameters = [(tuple(sorted(rng.choice(count, size=1 + n % 3, replace=False).tolist())), 10**n) for n in range(5)]
    work = SimpleNamespace(forward_cycles=np.zeros(count), parameter_bytes=tuple(parameters), accumulator_share=1.0)
    bounds = np.arange(count + 1)
    resident = _resident_bytes(work, [(2, 7)], bounds)  # type: ignore[arg-type]
    for first, stop in combinations(range(count + 1), 2):
        parameter_bytes = sum(2 * size for users, size in parameters if not set(users).isdisjoint(range(first, stop)))
        assert resident[first, stop] == parameter_bytes + 7 * (first <= 2 < stop)


def test_tries_all_positions_with_least_to_send() -> None:
    """Forty layers of ten segments with cheap boundaries, and a long tail of equal segments."""
    sent = np.full(700, 9.0)
    sent[10:410:10] = 2.0
    work = SimpleNamespace(forward_cycles=np.ones(700), backward_cycles=np.ones(700), crossing_bytes=sent)
    positions = cut_positions(work)  # type: ignore[arg-type]
    assert set(range(10, 410, 10)) <= set(positions) and len(positions) < 80
    assert sum(position > 420 for position in positions) > 20 and not any(
        10 < position < 400 and position % 10 for position in positions
    )
