"""Weights lie where all passes of a dense layer can use them: roles, plans where operands lie, and what that saves."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipujax.lowering import equations
from ipujax.lowering.jax_compat import trace
from ipujax.lowering.passes import PASSES
from ipujax.lowering.poplin.aligned import LHS, OUT, RHS, boxes_of, plan_where
from ipujax.lowering.poplin.joint import Later, joint_plan, later_cycles, spread_plans
from ipujax.lowering.poplin.plan import plan_matmul
from ipujax.lowering.poputil import map_linearly
from ipujax.lowering.roles import roles
from ipujax.runtime.compile import compile
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.exchange import traffic
from ipujax.runtime.graph import Graph
from ipujax.runtime.interpreter import interpret
from ipujax.runtime.mapping import Blocked
from ipujax.runtime.presets import preset
from ipujax.runtime.profile import Profile
from ipujax.runtime.program import Execute, HostStream, Sequence, StreamIn, StreamOut
from tests.lowering.helpers import check, lowered, small_target

FLOAT = np.float32
MK2 = preset("mk2")
products = import_module("ipujax.lowering.poplin.matmul")


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, FLOAT)


def mlp(params: Any, x: Any) -> Any:
    *hidden, last = params
    for weights in hidden:
        x = jax.nn.relu(x @ weights)
    return jnp.sum((x @ last) ** 2)


def sgd(params: Any, x: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.125 * g, params, jax.grad(mlp)(params, x))


def known_roles(fun: Any, *args: Any) -> list[tuple[str, int, bool, tuple[str, ...]]]:
    """For each product its role, the weights' side or number, a flag of the role, and the operations after."""
    jaxpr = trace(fun, args, {}, ()).jaxpr
    for _, run in PASSES:
        jaxpr = run(jaxpr)
    body, found = jaxpr.jaxpr, roles(jaxpr.jaxpr)
    rows = []
    for eqn in body.eqns:
        if eqn.primitive.name == "dot_general":
            role = found.get(id(eqn))
            if role is None or (role.later is None and role.laid_as is None):
                rows.append(("other", 0, False, ()))
            elif role.laid_as is None:
                assert role.later is not None
                name = "forward" if role.later.elementwise else "backward"
                rows.append((name, role.later.side, role.later.has_backward, _names(role)))
            else:
                number = list(body.invars).index(role.laid_as)
                rows.append(("update", number, role.is_transposed, _names(role)))
    return rows


def _names(role: Any) -> tuple[str, ...]:
    return tuple(name for name, _, _ in role.later.elementwise)


def test_roles_of_a_training_step():
    """The first layer has no backward pass; JAX makes gradients as [features, inputs] and turns them."""
    after = "mul", "sub"
    assert known_roles(sgd, [struct(6, 5), struct(5, 4)], struct(3, 6)) == [
        ("forward", 1, False, after),
        ("forward", 1, True, after),
        ("update", 1, True, after),
        ("backward", 1, False, ()),
        ("update", 0, True, after),
    ]


@pytest.mark.parametrize(
    ("apply", "shape", "side"),
    [(lambda w, x: w @ x, (5, 6), 0), (lambda w, x: jnp.einsum("fd,btd->btf", w, x), (2, 3, 5), 1)],
    ids=["left", "sequence"],
)
def test_roles_wherever_the_weights_are(apply, shape, side):
    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(apply(w, jnp.tanh(x)) ** 2))(w)

    forward, update = known_roles(step, struct(7, 5), struct(*shape))
    assert forward[:3] == ("forward", side, False) and update[:2] == ("update", 0)


def test_operations_on_arrays_of_one_shape_are_shared_by_their_weights():
    """Adam updates three arrays of each shape; two square layers share the operations on squares."""

    def step(params, state, x):
        updates, state = optax.adam(1e-3).update(jax.grad(mlp)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    params = [struct(6, 6), struct(6, 6), struct(6, 2)]
    rows = known_roles(step, params, jax.eval_shape(optax.adam(1e-3).init, params), struct(3, 6))
    square, last = (next(r for r in rows if r[:2] == ("update", n)) for n in (0, 2))
    assert len(last[3]) >= 10 and len(square[3]) == pytest.approx(len(last[3]), abs=3)


@pytest.mark.parametrize("fun", [lambda w, x: x @ w, lambda w, x: (x @ w) @ w.T, lambda w, x: jnp.vdot(w, x)])
def test_what_is_no_training_step_has_no_roles(fun):
    assert all(row[0] == "other" for row in known_roles(fun, struct(6, 6), struct(6, 6)))


# --- plans where operands lie ---------------------------------------------------------------------------------------


def placed(dims: tuple[int, ...], shape: tuple[int, int, int], seed: int) -> tuple[Graph, list[Any], Blocked]:
    """Two operands and a result of which one lies in random boxes, each on a tile of its own, as `dims` says."""
    rng = np.random.default_rng(seed)
    m, k, n = shape
    graph, shapes = Graph(small_target(16)), {LHS: (1, m, k), RHS: (1, k, n), OUT: (1, m, n)}
    tensors = {which: graph.add_variable(size, FLOAT, "x") for which, size in shapes.items()}
    cuts = [np.array([0, 1])]
    for length, parts in zip(shapes[dims][1:], rng.permutation([3, 4]), strict=True):
        inside = np.sort(rng.choice(np.arange(1, length), parts - 1, replace=False))
        cuts.append(np.array([0, *inside, length]))
    tile = rng.permutation(16)[:12].reshape([len(cut) - 1 for cut in cuts]).astype(np.int32)
    boxes = Blocked(tuple(cuts), tile)
    graph.set_tile_mapping(tensors[dims].variables()[0], boxes)
    return graph, list(tensors.values()), boxes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dims", [LHS, RHS, OUT], ids=["lhs", "rhs", "out"])
def test_what_lies_is_not_exchanged_and_products_are_right(dims, seed):
    m, k, n = shape = (13, 22, 17)
    graph, (a, b, wanted), boxes = placed(dims, shape, seed)
    assert boxes_of(graph, (a, b, wanted)[(LHS, RHS, OUT).index(dims)]) is not None
    spec = plan_matmul(1, m, k, n, FLOAT, graph.target).spec
    plan = plan_where(spec, dims, boxes, graph.target, graph.target.bytes_per_tile)
    assert plan.tiles_used == 12 and np.array_equal(np.sort(plan.grid().tile, None), np.sort(boxes.tile, None))
    prog = Sequence()
    streams = [HostStream(name, x.shape, FLOAT) for name, x in zip("ab", (a, b), strict=True)]
    for stream, x in zip(streams, (a, b), strict=True):
        prog.add(StreamIn(stream, x))
    out = products._in_steps(graph, a, b, plan, None, prog, "dot")
    sink = HostStream("out", out.shape, FLOAT)
    prog.add(StreamOut(out, sink))
    map_linearly(graph, wanted)
    group = next(graph.groups[leaf.compute_set] for leaf in prog.children() if isinstance(leaf, Execute))[0]
    field = (LHS, RHS, OUT).index(dims)
    if dims == OUT:
        assert np.array_equal(graph.mappings[out.variables()[0]].tile, boxes.tile)
    else:
        assert not traffic(group, field, graph).received_bytes.any()
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(-4, 5, (1, *size)).astype(FLOAT) for size in ((m, k), (k, n)))
    found = interpret(graph, prog, dict(zip(streams, (x, y), strict=True)))
    np.testing.assert_array_equal(found[sink], x @ y)


def test_a_plan_where_an_operand_lies_keeps_its_memory_bound():
    graph, (a, *_), boxes = placed(LHS, (13, 22, 17), 0)
    spec = plan_matmul(1, 13, 22, 17, FLOAT, graph.target).spec
    assert boxes_of(graph, a) is not None
    assert plan_where(spec, LHS, boxes, graph.target, 500) is None


# --- all passes together --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("batch", [4, 64])
def test_a_joint_plan_costs_the_other_passes_what_it_says(side, batch):
    inputs, features = 300, 200
    m, n = (batch, features) if side else (features, batch)
    spec = plan_matmul(1, m, inputs, n, FLOAT, MK2, lhs_is_free=not side, rhs_is_free=bool(side)).spec
    later, bound = Later(side, True), 0.6 * MK2.bytes_per_tile
    plan, others = joint_plan(spec, later, MK2, bound)
    splits = plan.splits
    assert (splits.field[0] if side else splits.out_channels) == 1
    graph = Graph(MK2)
    a, b = graph.add_variable((1, m, inputs), FLOAT), graph.add_variable((1, inputs, n), FLOAT)
    products._in_steps(graph, a, b, plan, None, Sequence(), "dot")
    boxes = boxes_of(graph, b if side else a.transpose((0, 2, 1)))
    assert boxes is not None
    assert later_cycles(spec, later, boxes, MK2, bound) <= others + 1
    assert later_cycles(spec, later, boxes, MK2, bound) <= later_cycles(spec, later, None, MK2, bound)


def wide(batch: int) -> tuple[Any, ...]:
    return sgd, ([struct(768, 1536), struct(1536, 768), struct(768, 16)], struct(batch, 768))


def device_cycles(program: Any) -> int:
    profile = Profile(compile(program.graph, program.program))
    return profile.cycles - profile.phase_cycles["host_exchange"]


def test_weights_stay_where_the_forward_pass_put_them():
    """At a small batch weights are what there is to exchange: backward and update leave them where they lie."""
    program = lowered(*wide(4), MK2)
    executable = compile(program.graph, program.program)
    weights = {v for v in program.graph.variables if v.shape in ((768, 1536), (1536, 768)) and "arg" in v.name}
    read = {variable: 0 for variable in weights}
    for leaf, cost in executable.costs.items():
        if isinstance(leaf, Execute) and isinstance(cost, ComputeSetCost):
            for group in program.graph.groups[leaf.compute_set]:
                for number, access in enumerate(group.accesses):
                    used = weights & set(access.tensor.variables())
                    if used and group.codelet.fields[number].is_read:
                        read[used.pop()] += 1
                        assert not traffic(group, number, program.graph).received_bytes.any(), leaf.compute_set.name
    assert sorted(read.values()) == [2, 3]  # forward, the optimizer, and backward but for the first layer


def test_planning_together_saves_cycles_where_weights_are_large(monkeypatch):
    together = device_cycles(lowered(*wide(4), MK2))
    monkeypatch.setattr(equations, "roles", lambda body, known: {})
    assert together < 0.96 * device_cycles(lowered(*wide(4), MK2))


@pytest.mark.parametrize(
    ("sizes", "most"), [((16, 30, 16, 10), 0.98), ((64, 128, 64, 10), 0.96), ((13, 7, 3), 1.04)], ids=str
)
def test_planning_together_hardly_ever_costs(sizes, most, monkeypatch):
    params = [struct(*pair) for pair in pairwise(sizes)]

    def cycles():
        return sum(device_cycles(lowered(sgd, (params, struct(batch, sizes[0])), MK2)) for batch in (2, 16))

    together = cycles()
    monkeypatch.setattr(equations, "roles", lambda body, known: {})
    assert together <= most * cycles()


def test_a_step_with_joint_layouts_gives_what_jax_gives():
    rng = np.random.default_rng(0)
    params = [rng.integers(-2, 3, shape).astype(FLOAT) for shape in ((40, 24), (24, 5))]
    x = rng.integers(-2, 3, (3, 40)).astype(FLOAT)
    check(sgd, params, x, tiles=(4, 16), rtol=1e-5, atol=1e-3)


def adam_step(sizes: tuple[int, ...], batch: int) -> tuple[Any, ...]:
    optimizer, params = optax.adam(1e-3), [struct(*pair) for pair in pairwise(sizes)]

    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = optimizer.update(jax.grad(mlp)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, jax.eval_shape(optimizer.init, params), struct(batch, sizes[0]))


SPREADS = (64, 128, 256, 512, 1024)


@pytest.mark.parametrize("sizes", [(64, 128, 64, 10), (13, 7, 3)], ids=str)
def test_twice_a_small_batch_never_takes_less_time(sizes):
    """An update of few rows needs few tiles, and its optimizer many: both are planned together."""
    cycles = [device_cycles(lowered(*adam_step(sizes, batch), MK2)) for batch in (2, 4, 8, 16)]
    assert cycles == sorted(cycles)


def test_updates_may_spread_over_more_tiles_than_they_need():
    spec = plan_matmul(1, 128, 2, 64, FLOAT, MK2).spec
    plans = spread_plans(spec, MK2, 0.6 * MK2.bytes_per_tile)
    tiles = [plan.tiles_used for plan in plans]
    assert len(tiles) == 5 and all(tile // least == 1 for tile, least in zip(sorted(tiles), SPREADS, strict=True))
    assert all(plan.slots == 1 for plan in plans)
    fewer = spread_plans(spec, MK2.replace(tiles_per_ipu=511), 0.6 * MK2.bytes_per_tile)
    assert set(fewer) == {plan for plan in plans if plan.tiles_used < 512}


def test_an_update_may_come_before_its_weights_lie_anywhere() -> None:
    """As in the backward pass of a layer whose own result nothing recomputes."""

    def fun(x: jax.Array, dy: jax.Array, w: jax.Array) -> Any:
        x, dy = jnp.tanh(x), jnp.tanh(dy)
        update = jax.lax.dot_general(dy, x, (((0,), (0,)), ((), ()))).T
        return update * 2, jax.lax.dot_general(dy, w, (((1,), (1,)), ((), ())))

    jaxpr = trace(fun, (struct(16, 256), struct(16, 64), struct(256, 64)), {}, ()).jaxpr
    assert any(role.laid_as is jaxpr.jaxpr.invars[2] for role in roles(jaxpr.jaxpr).values())
    rng = np.random.default_rng(0)
    args = (rng.normal(size=shape).astype(FLOAT) for shape in ((16, 256), (16, 64), (256, 64)))
    check(fun, *args, tiles=(16,), rtol=1e-5, atol=1e-5, split_rtol=1e-4, split_atol=1e-4)
