"""Loops over layers, cut into stages: segments, bits, where stacks lie, and how much there is to lower."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.lowering.jax_compat import ClosedJaxpr, check_jaxpr, jaxpr_as_fun
from ipujax.lowering.lower import LoweredProgram, lower
from ipujax.lowering.pipelining.row_shards import CutJaxpr, num_shards
from ipujax.lowering.pipelining.stage_search import Search
from ipujax.lowering.rules.equations import Lowering
from ipujax.lowering.schedules import SCHEDULES
from ipujax.runtime.graph.program import Call, Copy, StreamIn
from ipujax.runtime.graph.steps import distinct
from ipujax.runtime.tensor.mapping import owners
from ipujax.runtime.tensor.tensor import Tensor
from ipujax.stages import Lowered
from tests.ipujax.pipeline.layer_models import MODELS, batch, parameters
from tests.ipujax.pipeline.pipeline_models import array, no_stage
from tests.lowering.helpers import assert_same, lowered, quick_jit, run_engine, run_tiles, share_all, small_target
from tests.lowering.pipelining.search_helpers import search_of

TILES = 3


def arguments(length: int, micro_batches: int = 4) -> tuple[Any, ...]:
    return jax.tree.map(jnp.asarray, parameters(length)), jax.random.key(2), batch(2 * micro_batches)


def gradients(name: str, length: int, schedule: str = "1f1b", **settings: Any) -> Any:
    settings = {"micro_batches": 4, "rng_argnums": 1, "stages": 2, **settings}
    return ipu.pipeline(jax.value_and_grad(MODELS[name](length)), schedule=schedule, **settings)


def searched(fun: Any, args: Any, ipus: int, make: Any = Lowering) -> Search:
    return search_of(fun, args, small_target(TILES, num_ipus=ipus), make)


def cut_at(search: Search, layers: tuple[int, ...]) -> CutJaxpr:
    """With stages that begin with these iterations of the first loop."""
    first = min(search.work.loops)
    return search.rewritten(tuple(search.work.shard_segments()[first, row] for row in layers))


def into_shards(values: Any, cuts: Any) -> list[Any]:
    pairs = zip(values, cuts, strict=True)
    return [part for x, at in pairs for part in ([x] if at is None else [x[a:b] for a, b in pairwise(at)])]


def run_shards(found: CutJaxpr, args: Any, ipus: int, run: Any) -> tuple[LoweredProgram, list[Any]]:
    """What is compiled, run on arguments in shards; results whole."""
    program = lower(found.jaxpr, small_target(TILES, num_ipus=ipus))
    got = run(program, into_shards(jax.tree.leaves(args), found.inputs))
    parts = iter(got)
    taken = [[next(parts) for _ in range(num_shards(at))] for at in found.outputs]
    return program, [np.concatenate(each) if len(each) > 1 else each[0] for each in taken]


# --- segments ---------------------------------------------------------------------------------------------------------


FEW = ("gpipe", "zb-h1")


@pytest.mark.parametrize(
    ("name", "layers", "schedules"),
    [
        ("plain", (2,), FEW),
        *(
            pytest.param(name, layers, tuple(SCHEDULES), marks=pytest.mark.slow)
            for name, layers in (("plain", (1, 3)), ("rich", (1, 2, 4)), ("checkpointed", (1, 2, 4)))
        ),
    ],
)
def test_every_schedule_gives_the_same_bits_tile_by_tile(
    name: str, layers: tuple[int, ...], schedules: tuple[str, ...]
) -> None:
    count, first, stages = 4 if schedules == FEW else 8, None, len(layers) + 1
    args = arguments(5, count)
    expected = jax.tree.leaves(quick_jit(gradients(name, 5, stages=None, micro_batches=count))(*args))
    found = cut_at(searched(gradients(name, 5, stages=stages, micro_batches=count), args, 4), layers)
    for schedule in schedules:
        if (stages % 2 and schedule == "looped-1f1b") or (count % stages and schedule == "interleaved"):
            continue
        _, got = run_shards(by_schedule(found, schedule), args, 4, run_tiles)
        assert_same(got, expected, 1e-4, 1e-6, schedule)
        first = got if first is None else first
        # Stages on one IPU share an accumulator, so that sums over them are in another order.
        assert_same(got, first, *((1e-5, 1e-7) if schedule.startswith("looped") else (0, 0)), schedule)


def by_schedule(found: CutJaxpr, schedule: str) -> CutJaxpr:
    """The same pipeline in another order."""
    eqns = []
    for eqn in found.jaxpr.jaxpr.eqns:
        spec = eqn.params.get("spec")
        params = {} if spec is None else {"spec": replace(spec, schedule=SCHEDULES[schedule])}
        eqns.append(eqn.replace(params={**eqn.params, **params}))
    return replace(found, jaxpr=ClosedJaxpr(found.jaxpr.jaxpr.replace(eqns=eqns), found.jaxpr.consts))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpointed", "rich"])
def test_the_engine_gives_the_segments_of_plain_jax(name: str) -> None:
    args = arguments(5)
    expected = jax.tree.leaves(quick_jit(gradients(name, 5, stages=None))(*args))
    search = searched(gradients(name, 5, stages=3), args, 4)
    found = cut_at(search, (1, 3))
    check_jaxpr(found.jaxpr.jaxpr)
    flat = into_shards(jax.tree.leaves(args), found.inputs)
    assert_same(jaxpr_as_fun(found.jaxpr)(*flat), into_shards(expected, found.outputs), 1e-6, 1e-7, "plain JAX")
    program, got = run_shards(found, args, 4, run_engine)
    assert_same(got, expected, 1e-6, 1e-7, name)
    assert program.pipelines[0].plan.num_stages == 3


@pytest.mark.slow
def test_training_with_layers_on_four_ipus() -> None:
    """State and gradients of each layer stay on its IPU: nothing but activations and what all layers share moves."""
    optimizer, length = optax.adam(1e-2), 6

    def step(params: Any, state: Any, key: Any, rows: Any, **settings: Any) -> Any:
        value, grads = gradients("checkpointed", length, **settings)(params, key, rows)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    device = ipu.IPUModel(num_ipus=4, tiles_per_ipu=TILES)
    ours, reference = ipu.jit(step, device=device, donate_argnums=(0, 1)), jax.jit(lambda *a: step(*a, stages=None))
    params, _, rows = arguments(length)
    args = params, optimizer.init(params), jax.random.key(0), rows
    program = ours.lower(*args)
    stages = program.pipelines[0].plan.num_stages
    homes = homes_of_shards(program)
    cut = {name: shards for name, shards in homes.items() if len(shards) > 1}
    assert len(cut) == 6, "two stacks, and of each two moments"
    for shards in cut.values():
        assert shards == next(iter(cut.values())) and 2 <= len(shards) <= stages
        assert [ipu for ipus in shards for ipu in ipus] == sorted({ipu for ipus in shards for ipu in ipus})
    assert max(copy.source.size for copy in copies_between(program)) == params["table"].size < 2 * 6 * 6
    got, expected = ((jax.tree.map(jnp.array, params), optimizer.init(params)) for _ in range(2))
    for number in range(5):
        *got, loss = ours(*got, jax.random.key(number), rows)
        *expected, expected_loss = reference(*expected, jax.random.key(number), rows)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_same(jax.tree.leaves(got), jax.tree.leaves(expected), 1e-4, 1e-5, "after 5 steps")


def ipus_of(program: LoweredProgram | Lowered, tensor: Tensor) -> list[int]:
    """The IPUs of the variables that are no constants of a tensor."""
    own = [program.graph.mappings[v] for v in tensor.variables() if not v.is_constant]
    return sorted({int(n) for mapping in own for n in np.unique(owners(mapping)) // TILES})


def homes_of_shards(program: LoweredProgram | Lowered) -> dict[str, list[list[int]]]:
    """Of each argument the IPUs of each of its shards."""
    filled = [node for node in distinct(program.program) if isinstance(node, StreamIn)]
    return {node.stream.name: [ipus_of(program, Tensor.of(v)) for v in node.destination.variables()] for node in filled}


def copies_between(program: LoweredProgram | Lowered) -> list[Copy]:
    """Copies with another place of their destination than of their source."""
    copies = [node for node in distinct(program.program) if isinstance(node, Copy)]
    ends = [(copy, ipus_of(program, copy.source), ipus_of(program, copy.destination)) for copy in copies]
    return [copy for copy, source, destination in ends if source and source != destination]


def dense(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ w), None


def two(p: Any, x: jax.Array) -> jax.Array:
    h, _ = lax.scan(dense, x, p)
    return lax.scan(dense, h, p[1:] * 2.0)[0]


def groups(p: Any, x: jax.Array) -> jax.Array:
    inner = jax.checkpoint(lambda h, w: (lax.scan(dense, h, w)[0], None))
    return lax.scan(inner, x, p.reshape(2, 2, 6, 6))[0]


# Shards of the stack; 1 where something else is looped over than the stack that is given.
FORMS: dict[str, tuple[Any, int]] = {
    "cast": (lambda p, x: lax.scan(dense, x.astype(jnp.bfloat16), p.astype(jnp.bfloat16))[0].astype(jnp.float32), 2),
    "unrolled": (lambda p, x: lax.scan(dense, x, p, unroll=4)[0], 2),
    "backwards": (lambda p, x: lax.scan(dense, x, p, reverse=True)[0], 2),
    "checkpointed whole": (lambda p, x: jax.checkpoint(lambda x: lax.scan(dense, x, p)[0])(x), 2),
    "in groups": (groups, 1),
    "two lengths": (two, 2),
    "by number": (lambda p, x: lax.fori_loop(0, 4, lambda i, h: dense(h, p[i])[0], x), 1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "backwards" else pytest.mark.slow) for name in FORMS]
)
def test_forms_of_loops(name: str) -> None:
    """All give the segments of plain JAX; a stack that is cut or reshaped before it is looped over stays whole."""
    form, shards = FORMS[name]
    gradient = jax.value_and_grad(lambda p, x: jnp.mean(form(p, x) ** 2))
    args = array(4, 6, 6), array(8, 6)
    expected = jax.tree.leaves(quick_jit(ipu.pipeline(gradient, micro_batches=4))(*args))
    program = lowered(ipu.pipeline(gradient, micro_batches=4, stages=2), args, small_target(TILES, num_ipus=2))
    assert_same(run_engine(program, args), expected, 1e-6, 1e-7, name)
    assert len(homes_of_shards(program)["arg0"]) == shards


def test_state_that_each_layer_hands_on() -> None:
    """A running mean for each layer: it lies with the layer."""

    def loss(params: Any, means: jax.Array, x: jax.Array) -> Any:
        def layer(h: jax.Array, p: Any) -> Any:
            w, mean = p
            h = jnp.tanh(h @ w) - lax.stop_gradient(mean)
            return h, 0.9 * mean + 0.1 * jnp.mean(h, 0)

        h, means = lax.scan(layer, x, (params, means))
        return jnp.mean(h**2), means

    def fun(stages: int | None) -> Any:
        gradient = jax.value_and_grad(loss, has_aux=True)
        return ipu.pipeline(gradient, micro_batches=4, carry={1: (0, 1)}, stages=stages)

    args = array(5, 6, 6), array(5, 6), array(8, 6)
    expected = jax.tree.leaves(quick_jit(fun(None))(*args))
    found = cut_at(searched(fun(2), args, 2), (3,))
    assert found.inputs == ((0, 3, 5), (0, 3, 5), None) and found.outputs == (None, (0, 3, 5), (0, 3, 5))
    for run in (run_engine, run_tiles):
        _, got = run_shards(found, args, 2, run)
        assert_same(got, expected, 1e-5, 1e-6, run.__name__)


def test_inference_and_what_every_layer_makes() -> None:
    def fun(params: jax.Array, x: jax.Array) -> Any:
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), jnp.mean(h)), x, params)

    args = array(5, 6, 6), array(8, 6)
    expected = jax.tree.leaves(quick_jit(ipu.pipeline(fun, micro_batches=4, reduce="stack"))(*args))
    found = cut_at(searched(ipu.pipeline(fun, micro_batches=4, reduce="stack", stages=2), args, 2), (2,))
    assert found.inputs == ((0, 2, 5), None) and found.outputs == (None, None)
    _, got = run_shards(found, args, 2, run_tiles)
    assert_same(got, expected, 1e-5, 1e-6, "tile by tile")


@pytest.mark.slow
def test_replicas_sum_each_shard_where_it_lies() -> None:
    params, key, rows = arguments(4)

    def step(params: Any, rows: Any) -> Any:
        value, grads = gradients("plain", 4, micro_batches=2)(params, key, rows)
        return lax.pmean((value, grads), "replica")

    settings: dict[str, Any] = {"replicas": 2, "in_specs": (P(), P("replica")), "out_specs": P()}
    ours = ipu.jit(step, device=ipu.IPUModel(num_ipus=4, tiles_per_ipu=TILES), **settings)
    expected = jax.value_and_grad(MODELS["plain"](4))(params, key, rows)
    assert_same(jax.tree.leaves(ours(params, rows)), jax.tree.leaves(expected), 1e-5, 1e-6, "replicas")
    stacks = [shards for shards in homes_of_shards(ours.lower(params, rows)).values() if len(shards) > 1]
    assert stacks == [[[0], [1]]] * 2


# --- what there is to lower -------------------------------------------------------------------------------------------


def test_layers_of_a_stage_share_their_code() -> None:
    """Four times the layers are as many functions, compute sets and variables, found at the same price."""
    sizes, compute_sets, lowered_equations = [], [], []
    for length in (8, 32):
        args = arguments(length)
        before = Counting.count
        search = searched(gradients("checkpointed", length, stages=4), args, 4, Counting)
        lowered_equations.append(Counting.count - before)
        assert len(search.work.forward_cycles) >= length
        found = cut_at(search, (length // 4, length // 2, 3 * length // 4))
        program = lower(found.jaxpr, small_target(TILES, num_ipus=4))
        graph = program.graph
        calls = sum(isinstance(node, Call) for node in distinct(program.program))
        sizes.append((len(program.pipelines[0].tasks), calls, len(graph.variables)))
        compute_sets.append(len(graph.groups))
    assert sizes[0] == sizes[1] and sizes[0][0] == 8
    assert abs(compute_sets[1] - compute_sets[0]) < 5, "but for a few that merge where stacks are small"
    assert lowered_equations[0] == lowered_equations[1]


def computing(program: Any) -> int:
    """Vertex groups that do more than copy."""
    groups = [group for members in program.graph.groups.values() for group in members]
    return sum(not group.codelet.name.startswith("popops::Copy<") for group in groups)


@pytest.mark.slow
def test_layers_of_stages_on_one_ipu_share_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """And give the segments of stages that have an IPU each."""
    args = arguments(5)

    def run(schedule: str) -> tuple[LoweredProgram, list[Any]]:
        found = cut_at(searched(gradients("plain", 5, schedule, stages=4), args, 4), (1, 2, 4))
        check_jaxpr(found.jaxpr.jaxpr)
        return run_shards(found, args, 4, run_tiles)

    def layers(program: LoweredProgram) -> int:
        calls = {node.function for node in distinct(program.program) if isinstance(node, Call)}
        return sum(function.name == "layer" for function in calls)

    alone, expected = run("1f1b")
    apart, got = run("looped-1f1b")
    assert layers(alone) == layers(apart) == 0, "these are so small that to share them does not pay"
    assert_same(got, expected, 1e-6, 1e-6, "apart")
    share_all(monkeypatch)
    shared, got = run("looped-1f1b")
    assert layers(shared) == 4, "one on each of two IPUs for the way forward, and one for the way back"
    assert computing(shared) < computing(apart)
    assert_same(got, expected, 1e-6, 1e-6, "shared")
    assert layers(run("1f1b")[0]) == 0, "one stage an IPU has nothing to share"


class Counting(Lowering):
    """Counts the equations that it lowers, but those of views."""

    count = 0

    def equation(self, eqn: Any, *args: Any, **layer: Any) -> Any:
        Counting.count += eqn.primitive.name != "slice"
        return super().equation(eqn, *args, **layer)


def test_turns_cost_what_the_first_does_and_cuts_lie_between_them() -> None:
    search = searched(gradients("plain", 6, stages=3), arguments(6), 4)
    (loop,) = search.work.loops
    segments = [search.work.shard_segments()[loop, row] for row in range(6)]
    assert segments == list(range(segments[0], segments[0] + 6))
    assert len(set(search.work.forward_cycles[segments])) == len(set(search.work.backward_cycles[segments])) == 1
    assert set(segments) <= set(range(len(search.work.forward_cycles)))


@pytest.mark.slow
def test_the_number_of_stages_is_found_too() -> None:
    args = arguments(6)
    program = lowered(gradients("plain", 6, stages="auto"), args, small_target(TILES, num_ipus=4))
    assert 2 <= program.pipelines[0].plan.num_stages <= 4
    expected = jax.tree.leaves(quick_jit(gradients("plain", 6, stages=None))(*args))
    assert_same(run_tiles(program, args), expected, 1e-4, 1e-6, "auto")


# --- stages that are written ------------------------------------------------------------------------------------------


def test_stages_around_loops_stay_and_inside_of_them_are_refused() -> None:
    def around(params: Any, x: jax.Array, stage: Any = ipu.stage) -> jax.Array:
        for number in range(2):
            with stage(number):
                x, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params[number])
        return jnp.mean(x**2)

    def inside(params: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> Any:
            for number in range(2):
                with ipu.stage(number):
                    h = jnp.tanh(h @ w)
            return h, None

        return jnp.mean(lax.scan(layer, x, params[0])[0])

    args = (array(3, 6, 6), array(2, 6, 6)), array(8, 6)
    plain = ipu.pipeline(jax.value_and_grad(lambda p, x: around(p, x, no_stage)), micro_batches=4)
    program = lowered(ipu.pipeline(jax.value_and_grad(around), micro_batches=4), args, small_target(TILES, num_ipus=2))
    assert_same(run_engine(program, args), jax.tree.leaves(jax.jit(plain)(*args)), 1e-6, 1e-7, "around")
    with pytest.raises(ipu.ArgumentError, match="a stage begins inside a scan"):
        lowered(ipu.pipeline(jax.value_and_grad(inside), micro_batches=4), args, small_target(TILES, num_ipus=2))
