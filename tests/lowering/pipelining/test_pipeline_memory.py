"""Stages that are found fit the machine with all that lies there: the state of an optimiser too."""

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
from ipujax.lowering.pipelining.cuts import _resident_bytes, places
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
ARGS = PARAMS, OPTIMIZER.init(PARAMS), array(16, WIDTHS[0])
GRADIENT = ipu.pipeline(jax.value_and_grad(chain), micro_batches=8, stages=2)


def step(params: Any, state: Any, x: jax.Array) -> Any:
    value, grads = GRADIENT(params, x)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def machine(bytes_per_tile: int) -> Target:
    return small_target(TILES, num_ipus=2, bytes_per_tile=bytes_per_tile, interleaved_offset_bytes=bytes_per_tile)


TIGHT = machine(35_000)


@pytest.fixture(scope="module")
def needs() -> dict[int, int]:
    """What the fullest tile needs, of the whole step, for each place to cut."""
    search, options = search_of(step, ARGS, TIGHT), Options(allow_out_of_memory=True)
    found = {}
    for cut in range(1, len(search.work.forward_cycles)):
        program = lower(search.rewritten((cut,)).jaxpr, TIGHT)
        found[cut] = compile(program.graph, program.program, options=options).memory.max_tile_bytes
    return found


@pytest.mark.slow
def test_a_cut_that_fits_with_the_state_of_the_optimiser_is_found(needs: dict[int, int]) -> None:
    """Of all places to cut few leave room for two moments of each parameter, and not the best of those without."""
    fitting = {cut for cut, need in needs.items() if need <= TIGHT.bytes_per_tile}
    assert 0 < len(fitting) < len(needs) / 3
    (blind,) = search_of(lambda params, state, x: GRADIENT(params, x), ARGS, TIGHT).chosen()
    assert blind not in fitting
    program = lowered(step, ARGS, TIGHT)
    executable = compile(program.graph, program.program)  # raises TileMemoryError if it does not fit
    assert executable.memory.max_tile_bytes in {needs[cut] for cut in fitting}
    expected = jax.tree.leaves(quick_jit(step)(*ARGS))
    assert_same(run_tiles(program, ARGS), expected, 1e-4, 1e-6, "tile by tile")


def test_state_goes_with_the_parameters_that_it_is_of() -> None:
    """Before anything is cut, what is placed beside each equation is twice its parameters, and a count."""
    search = search_of(step, ARGS, machine(624 << 10))
    beside: dict[int, int] = {}
    for number, size in search.resident:
        beside[number] = beside.get(number, 0) + size
    beside[0] -= 4
    assert beside == {users[0]: 2 * size for users, size in search.work.parameter_bytes}


def test_state_of_stacks_goes_with_each_layer() -> None:
    params = {name: jnp.asarray(x) for name, x in parameters(5).items() if name in ("w", "b", "table")}
    gradient = ipu.pipeline(jax.value_and_grad(MODELS["plain"](5)), micro_batches=4, stages=2)

    def update(params: Any, state: Any, rows: Any) -> Any:
        _, grads = gradient(params, jax.random.key(0), rows)
        return OPTIMIZER.update(grads, state, params)

    search = search_of(update, (params, OPTIMIZER.init(params), batch(8)), machine(624 << 10))
    (loop,) = search.work.loops
    segments = search.work.shard_segments()
    for row in range(5):
        sizes = sorted(size for segment, size in search.resident if segment == segments[loop, row] and size > 4)
        assert sizes == [4 * 6, 4 * 6, 4 * 6 * 6, 4 * 6 * 6]


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(ipu.ArgumentError, match="no cut into 2 stages fits the memory"):
        lowered(step, ARGS, machine(4_000))


@pytest.mark.slow
def test_if_nothing_fits_the_error_is_that_of_the_best() -> None:
    program = lowered(step, ARGS, machine(20_000))
    with pytest.raises(ipu.TileMemoryError):
        compile(program.graph, program.program)


def test_a_parameter_is_in_each_stage_that_uses_it() -> None:
    """Of random users, between any two bounds; and what lies with the third segment besides."""
    rng = np.random.default_rng(0)
    count = 6
    parameters = [(tuple(sorted(rng.choice(count, size=1 + n % 3, replace=False).tolist())), 10**n) for n in range(5)]
    work = SimpleNamespace(forward_cycles=np.zeros(count), parameter_bytes=parameters)
    bounds = np.arange(count + 1)
    found = _resident_bytes(work, [(2, 7)], bounds)  # type: ignore[arg-type]
    for first, stop in combinations(range(count + 1), 2):
        shared = sum(2 * size for users, size in parameters if not set(users).isdisjoint(range(first, stop)))
        assert found[first, stop] == shared + 7 * (first <= 2 < stop)


def test_places_with_least_to_send_are_all_tried() -> None:
    """Forty layers of ten segments, the boundary between two of which sends least, and a long tail of equal ones."""
    sent = np.full(700, 9.0)
    sent[10:410:10] = 2.0
    work = SimpleNamespace(forward_cycles=np.ones(700), backward_cycles=np.ones(700), crossing_bytes=sent)
    found = places(work)  # type: ignore[arg-type]
    assert set(range(10, 410, 10)) <= set(found) and len(found) < 80
    assert sum(place > 420 for place in found) > 20 and not any(10 < place < 400 and place % 10 for place in found)
