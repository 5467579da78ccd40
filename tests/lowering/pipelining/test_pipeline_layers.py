"""Loops over layers, cut into stages: numbers, mapping of stacks to IPUs, and the amount of code."""

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
from ipujax.lowering.pipelining.stage_search import StageSearch
from ipujax.lowering.rules.equations import Lowering
from ipujax.lowering.schedules import SCHEDULES
from ipujax.runtime.graph.program import Call, Copy, StreamIn
from ipujax.runtime.graph.walks import distinct
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


def search_for(fun: Any, args: Any, ipus: int, make: Any = Lowering) -> StageSearch:
    return search_of(fun, args, small_target(TILES, num_ipus=ipus), make)


def cut_at(search: StageSearch, layers: tuple[int, ...]) -> CutJaxpr:
    """The program with stages that begin at these iterations of the first loop."""
    first = min(search.batch.loops)
    return search.rewrite(tuple(search.batch.shard_segments()[first, row] for row in layers))


def into_shards(values: Any, cuts: Any) -> list[Any]:
    pairs = zip(values, cuts, strict=True)
    return [
        shard for x, bounds in pairs for shard in ([x] if bounds is None else [x[a:b] for a, b in pairwise(bounds)])
    ]


def run_shards(cut: CutJaxpr, args: Any, ipus: int, run: Any) -> tuple[LoweredProgram, list[Any]]:
    """Runs a cut program on arguments in shards; results are joined."""
    program = lower(cut.jaxpr, small_target(TILES, num_ipus=ipus))
    got = run(program, into_shards(jax.tree.leaves(args), cut.inputs))
    remaining = iter(got)
    shards_of_results = [[next(remaining) for _ in range(num_shards(bounds))] for bounds in cut.outputs]
    return program, [np.concatenate(shards) if len(shards) > 1 else shards[0] for shards in shards_of_results]


FEW = ("gpipe", "zb-h1")


@pytest.mark.parametrize(
    ("name", "layers", "schedules"),
    [
        ("plain", (2,), FEW),
        *(
            (name, layers, tuple(SCHEDULES))
            for name, layers in (("plain", (1, 3)), ("rich", (1, 2, 4)), ("checkpointed", (1, 2, 4)))
        ),
    ],
)
def test_every_schedule_gives_equal_bits_in_the_interpreter(
    name: str, layers: tuple[int, ...], schedules: tuple[str, ...]
) -> None:
    count = 4 if schedules == FEW else 8
    first = None
    stages = len(layers) + 1
    args = arguments(5, count)
    expected = jax.tree.leaves(quick_jit(gradients(name, 5, stages=None, micro_batches=count))(*args))
    cut = cut_at(search_for(gradients(name, 5, stages=stages, micro_batches=count), args, 4), layers)
    for schedule in schedules:
        if (stages % 2 and schedule == "looped-1f1b") or (count % stages and schedule == "interleaved"):
            continue
        _, got = run_shards(by_schedule(cut, schedule), args, 4, run_tiles)
        assert_same(got, expected, 1e-4, 1e-6, schedule)
        first = got if first is None else first
        # Stages on one IPU share an accumulator, so that sums over them are in another order.
        assert_same(got, first, *((1e-5, 1e-7) if schedule.startswith(("looped", "dualpipe")) else (0, 0)), schedule)


def by_schedule(cut: CutJaxpr, schedule: str) -> CutJaxpr:
    """The same pipeline with another schedule."""
    eqns = []
    for eqn in cut.jaxpr.jaxpr.eqns:
        spec = eqn.params.get("spec")
        params = {} if spec is None else {"spec": replace(spec, schedule=SCHEDULES[schedule])}
        eqns.append(eqn.replace(params={**eqn.params, **params}))
    return replace(cut, jaxpr=ClosedJaxpr(cut.jaxpr.jaxpr.replace(eqns=eqns), cut.jaxpr.consts))


@pytest.mark.parametrize("name", ["checkpointed", "rich"])
def test_engine_equals_plain_jax(name: str) -> None:
    args = arguments(5)
    expected = jax.tree.leaves(quick_jit(gradients(name, 5, stages=None))(*args))
    search = search_for(gradients(name, 5, stages=3), args, 4)
    cut = cut_at(search, (1, 3))
    check_jaxpr(cut.jaxpr.jaxpr)
    flat = into_shards(jax.tree.leaves(args), cut.inputs)
    assert_same(jaxpr_as_fun(cut.jaxpr)(*flat), into_shards(expected, cut.outputs), 1e-6, 1e-7, "plain JAX")
    program, got = run_shards(cut, args, 4, run_engine)
    assert_same(got, expected, 1e-6, 1e-7, name)
    assert program.pipelines[0].plan.num_stages == 3


def test_trains_with_layers_on_four_ipus() -> None:
    """State and gradients of each layer stay on its IPU: only activations and values that all layers share move."""
    optimizer = optax.adam(1e-2)
    length = 6

    def step(params: Any, state: Any, key: Any, rows: Any, **settings: Any) -> Any:
        value, grads = gradients("checkpointed", length, **settings)(params, key, rows)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    device = ipu.IPUModel(num_ipus=4, tiles_per_ipu=TILES)
    ours = ipu.jit(step, device=device, donate_argnums=(0, 1))
    reference = jax.jit(lambda *a: step(*a, stages=None))
    params, _, rows = arguments(length)
    args = params, optimizer.init(params), jax.random.key(0), rows
    program = ours.lower(*args)
    stages = program.pipelines[0].plan.num_stages
    ipus_of_arguments = ipus_of_shards(program)
    split_arguments = {name: shards for name, shards in ipus_of_arguments.items() if len(shards) > 1}
    assert len(split_arguments) == 6, "two stacks, and of each two moments"
    for shards in split_arguments.values():
        assert shards == next(iter(split_arguments.values())) and 2 <= len(shards) <= stages
        assert [ipu for ipus in shards for ipu in ipus] == sorted({ipu for ipus in shards for ipu in ipus})
    assert max(copy.source.size for copy in copies_between(program)) == params["table"].size < 2 * 6 * 6
    got, expected = ((jax.tree.map(jnp.array, params), optimizer.init(params)) for _ in range(2))
    for number in range(5):
        *got, loss = ours(*got, jax.random.key(number), rows)
        *expected, expected_loss = reference(*expected, jax.random.key(number), rows)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_same(jax.tree.leaves(got), jax.tree.leaves(expected), 1e-4, 1e-5, "after 5 steps")


def ipus_of(program: LoweredProgram | Lowered, tensor: Tensor) -> list[int]:
    """IPUs of the variables of a tensor, constants left out."""
    mappings = [program.graph.mappings[v] for v in tensor.variables() if not v.is_constant]
    return sorted({int(n) for mapping in mappings for n in np.unique(owners(mapping)) // TILES})


def ipus_of_shards(program: LoweredProgram | Lowered) -> dict[str, list[list[int]]]:
    """IPUs of each shard of each argument."""
    streams = [node for node in distinct(program.program) if isinstance(node, StreamIn)]
    return {
        node.stream.name: [ipus_of(program, Tensor.of(v)) for v in node.destination.variables()] for node in streams
    }


def copies_between(program: LoweredProgram | Lowered) -> list[Copy]:
    """Copies between IPUs."""
    copies = [node for node in distinct(program.program) if isinstance(node, Copy)]
    copies_and_ipus = [(copy, ipus_of(program, copy.source), ipus_of(program, copy.destination)) for copy in copies]
    return [copy for copy, source, destination in copies_and_ipus if source and source != destination]


def dense(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ w), None


def two_loops(p: Any, x: jax.Array) -> jax.Array:
    h, _ = lax.scan(dense, x, p)
    return lax.scan(dense, h, p[1:] * 2.0)[0]


def groups(p: Any, x: jax.Array) -> jax.Array:
    inner = jax.checkpoint(lambda h, w: (lax.scan(dense, h, w)[0], None))
    return lax.scan(inner, x, p.reshape(2, 2, 6, 6))[0]


# Loop, and number of shards of its stack: 1 if the loop is over another value than the argument.
FORMS: dict[str, tuple[Any, int]] = {
    "cast": (lambda p, x: lax.scan(dense, x.astype(jnp.bfloat16), p.astype(jnp.bfloat16))[0].astype(jnp.float32), 2),
    "unrolled": (lambda p, x: lax.scan(dense, x, p, unroll=4)[0], 2),
    "backwards": (lambda p, x: lax.scan(dense, x, p, reverse=True)[0], 2),
    "checkpointed whole": (lambda p, x: jax.checkpoint(lambda x: lax.scan(dense, x, p)[0])(x), 2),
    "in groups": (groups, 1),
    "two lengths": (two_loops, 2),
    "by number": (lambda p, x: lax.fori_loop(0, 4, lambda i, h: dense(h, p[i])[0], x), 1),
}


@pytest.mark.parametrize("name", FORMS)
def test_cuts_loops_of_every_form(name: str) -> None:
    """Equals plain JAX; a stack that is sliced or reshaped before its loop stays unsplit."""
    form, shards = FORMS[name]
    gradient = jax.value_and_grad(lambda p, x: jnp.mean(form(p, x) ** 2))
    args = array(4, 6, 6), array(8, 6)
    expected = jax.tree.leaves(quick_jit(ipu.pipeline(gradient, micro_batches=4))(*args))
    program = lowered(ipu.pipeline(gradient, micro_batches=4, stages=2), args, small_target(TILES, num_ipus=2))
    assert_same(run_engine(program, args), expected, 1e-6, 1e-7, name)
    assert len(ipus_of_shards(program)["arg0"]) == shards


def test_carries_a_state_of_each_layer() -> None:
    """A running mean for each layer: it is mapped to the IPU of the layer."""

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
    cut = cut_at(search_for(fun(2), args, 2), (3,))
    assert cut.inputs == ((0, 3, 5), (0, 3, 5), None) and cut.outputs == (None, (0, 3, 5), (0, 3, 5))
    for run in (run_engine, run_tiles):
        _, got = run_shards(cut, args, 2, run)
        assert_same(got, expected, 1e-5, 1e-6, run.__name__)


def test_stacks_a_result_of_every_layer_in_inference() -> None:
    def fun(params: jax.Array, x: jax.Array) -> Any:
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), jnp.mean(h)), x, params)

    args = array(5, 6, 6), array(8, 6)
    expected = jax.tree.leaves(quick_jit(ipu.pipeline(fun, micro_batches=4, reduce="stack"))(*args))
    cut = cut_at(search_for(ipu.pipeline(fun, micro_batches=4, reduce="stack", stages=2), args, 2), (2,))
    assert cut.inputs == ((0, 2, 5), None) and cut.outputs == (None, None)
    _, got = run_shards(cut, args, 2, run_tiles)
    assert_same(got, expected, 1e-5, 1e-6, "tile by tile")


def test_reduces_each_shard_over_replicas_on_its_ipu() -> None:
    params, key, rows = arguments(4)

    def step(params: Any, rows: Any) -> Any:
        value, grads = gradients("plain", 4, micro_batches=2)(params, key, rows)
        return lax.pmean((value, grads), "replica")

    settings: dict[str, Any] = {"replicas": 2, "in_specs": (P(), P("replica")), "out_specs": P()}
    ours = ipu.jit(step, device=ipu.IPUModel(num_ipus=4, tiles_per_ipu=TILES), **settings)
    expected = jax.value_and_grad(MODELS["plain"](4))(params, key, rows)
    assert_same(jax.tree.leaves(ours(params, rows)), jax.tree.leaves(expected), 1e-5, 1e-6, "replicas")
    stacks = [shards for shards in ipus_of_shards(ours.lower(params, rows)).values() if len(shards) > 1]
    assert stacks == [[[0], [1]]] * 2


def test_layers_of_a_stage_share_their_code() -> None:
    """Four times the layers take as many functions, compute sets and variables, at the same search cost."""
    sizes = []
    compute_sets = []
    lowered_equations = []
    for length in (8, 32):
        args = arguments(length)
        previous_count = Counting.count
        search = search_for(gradients("checkpointed", length, stages=4), args, 4, Counting)
        lowered_equations.append(Counting.count - previous_count)
        assert len(search.work.forward_cycles) >= length
        cut = cut_at(search, (length // 4, length // 2, 3 * length // 4))
        program = lower(cut.jaxpr, small_target(TILES, num_ipus=4))
        graph = program.graph
        calls = sum(isinstance(node, Call) for node in distinct(program.program))
        sizes.append((len(program.pipelines[0].tasks), calls, len(graph.variables)))
        compute_sets.append(len(graph.groups))
    assert sizes[0] == sizes[1] and sizes[0][0] == 8
    assert abs(compute_sets[1] - compute_sets[0]) < 5, "but for a few that merge where stacks are small"
    assert lowered_equations[0] == lowered_equations[1]


def num_computing_groups(program: Any) -> int:
    """Vertex groups that do more than copy."""
    groups = [group for members in program.graph.groups.values() for group in members]
    return sum(not group.codelet.name.startswith("popops::Copy<") for group in groups)


def test_layers_of_stages_on_one_ipu_share_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers equal those of stages that have an IPU each."""
    args = arguments(5)

    def run(schedule: str) -> tuple[LoweredProgram, list[Any]]:
        cut = cut_at(search_for(gradients("plain", 5, schedule, stages=4), args, 4), (1, 2, 4))
        check_jaxpr(cut.jaxpr.jaxpr)
        return run_shards(cut, args, 4, run_tiles)

    def layers(program: LoweredProgram) -> int:
        calls = {node.function for node in distinct(program.program) if isinstance(node, Call)}
        return sum(function.name == "layer" for function in calls)

    one_stage_an_ipu, expected = run("1f1b")
    two_stages_an_ipu, got = run("looped-1f1b")
    assert layers(one_stage_an_ipu) == layers(two_stages_an_ipu) == 0, (
        "these are so small that to share them does not pay"
    )
    assert_same(got, expected, 1e-6, 1e-6, "apart")
    share_all(monkeypatch)
    shared, got = run("looped-1f1b")
    assert layers(shared) == 4, "one on each of two IPUs for the way forward, and one for the way back"
    assert num_computing_groups(shared) < num_computing_groups(two_stages_an_ipu)
    assert_same(got, expected, 1e-6, 1e-6, "shared")
    assert layers(run("1f1b")[0]) == 0, "one stage an IPU has nothing to share"


class Counting(Lowering):
    """Counts the equations that it lowers, slices left out."""

    count = 0

    def equation(self, eqn: Any, *args: Any, **layer: Any) -> Any:
        Counting.count += eqn.primitive.name != "slice"
        return super().equation(eqn, *args, **layer)


def test_iterations_of_equal_cost_are_segments() -> None:
    search = search_for(gradients("plain", 6, stages=3), arguments(6), 4)
    (loop,) = search.batch.loops
    segments = [search.batch.shard_segments()[loop, row] for row in range(6)]
    assert segments == list(range(segments[0], segments[0] + 6))
    assert len(set(search.work.forward_cycles[segments])) == len(set(search.work.backward_cycles[segments])) == 1
    assert set(segments) <= set(range(len(search.work.forward_cycles)))


def test_chooses_the_number_of_stages() -> None:
    args = arguments(6)
    program = lowered(gradients("plain", 6, stages="auto"), args, small_target(TILES, num_ipus=4))
    assert 2 <= program.pipelines[0].plan.num_stages <= 4
    expected = jax.tree.leaves(quick_jit(gradients("plain", 6, stages=None))(*args))
    assert_same(run_tiles(program, args), expected, 1e-4, 1e-6, "auto")


def test_keeps_stages_around_loops_and_refuses_stages_inside() -> None:
    def stages_with_loops(params: Any, x: jax.Array, stage: Any = ipu.stage) -> jax.Array:
        for number in range(2):
            with stage(number):
                x, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params[number])
        return jnp.mean(x**2)

    def loop_with_stages(params: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> Any:
            for number in range(2):
                with ipu.stage(number):
                    h = jnp.tanh(h @ w)
            return h, None

        return jnp.mean(lax.scan(layer, x, params[0])[0])

    args = (array(3, 6, 6), array(2, 6, 6)), array(8, 6)
    plain = ipu.pipeline(jax.value_and_grad(lambda p, x: stages_with_loops(p, x, no_stage)), micro_batches=4)
    program = lowered(
        ipu.pipeline(jax.value_and_grad(stages_with_loops), micro_batches=4), args, small_target(TILES, num_ipus=2)
    )
    assert_same(run_engine(program, args), jax.tree.leaves(jax.jit(plain)(*args)), 1e-6, 1e-7, "around")
    with pytest.raises(ipu.ArgumentError, match="a stage begins inside a scan"):
        lowered(
            ipu.pipeline(jax.value_and_grad(loop_with_stages), micro_batches=4), args, small_target(TILES, num_ipus=2)
        )
