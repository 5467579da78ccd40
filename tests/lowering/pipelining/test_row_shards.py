"""Stacks in shards: the same numbers, a valid jaxpr, and concatenations only for equations that mix rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from ipujax.lowering.jax_compat import ClosedJaxpr, Literal, check_jaxpr, jaxpr_as_fun, trace
from ipujax.lowering.passes import ready
from ipujax.lowering.pipelining.layers import finest_bounds, share_bounds
from ipujax.lowering.pipelining.row_shards import CutJaxpr, cut, num_shards, rows_of, spread
from tests.ipujax.pipeline.layer_models import MODELS, batch, parameters
from tests.ipujax.pipeline.pipeline_models import array


def passed(fun: Any, *args: Any) -> ClosedJaxpr:
    """The jaxpr of `fun` before its equations are fused, which is cut."""
    return ready(trace(fun, args, {}, ()).jaxpr, is_cut=True)


def cut_loops(jaxpr: ClosedJaxpr, bounds: tuple[int, ...]) -> CutJaxpr:
    """Cuts all stacks that loops read."""
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    stacks = [x for eqn in loops for x in eqn.invars[eqn.params["num_consts"] + eqn.params["num_carry"] :]]
    return cut(jaxpr, spread(jaxpr.jaxpr, {x: bounds for x in stacks if not isinstance(x, Literal)}))


def into_shards(values: Any, cuts: Any) -> list[Any]:
    pairs = zip(values, cuts, strict=True)
    return [
        shard for x, bounds in pairs for shard in ([x] if bounds is None else [x[a:b] for a, b in pairwise(bounds)])
    ]


def check(jaxpr: ClosedJaxpr, cut_jaxpr: CutJaxpr, args: Any, rtol: float = 1e-6) -> None:
    """The cut jaxpr is valid and computes the numbers of the uncut one."""
    check_jaxpr(cut_jaxpr.jaxpr.jaxpr)
    assert len(cut_jaxpr.sources) == len(cut_jaxpr.jaxpr.eqns)
    flat = jax.tree.leaves(args)
    expected = jax.jit(jaxpr_as_fun(jaxpr))(*flat)
    got = jax.jit(jaxpr_as_fun(cut_jaxpr.jaxpr))(*into_shards(flat, cut_jaxpr.inputs))
    assert sum(map(num_shards, cut_jaxpr.outputs)) == len(got)
    for a, b in zip(got, into_shards(expected, cut_jaxpr.outputs), strict=True):
        np.testing.assert_allclose(a, b, rtol, 1e-7)


ALL_ITERATIONS = (0, 1, 2, 3, 4, 5)
CUTS = [
    *((n, (0, 2, 5)) for n in MODELS),
    ("rich", ALL_ITERATIONS),
]


@pytest.mark.parametrize(("name", "bounds"), CUTS)
def test_cuts_gradients_of_loops(name: str, bounds: tuple[int, ...]) -> None:
    args = parameters(5), jax.random.key(2), batch(4)
    jaxpr = passed(jax.value_and_grad(MODELS[name](5)), *args)
    cut_jaxpr = cut_loops(jaxpr, bounds)
    check(jaxpr, cut_jaxpr, args)
    leaves = dict(zip(sorted(args[0]), cut_jaxpr.inputs, strict=False))
    assert leaves["w"] == leaves["b"] == bounds and leaves["table"] is None
    assert sum(output_bounds == bounds for output_bounds in cut_jaxpr.outputs) == 2, "both gradients come in shards"
    loops = {id(eqn.params["jaxpr"]) for eqn in cut_jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"}
    assert len(loops) == sum(eqn.primitive.name == "scan" for eqn in jaxpr.eqns), "shards share their body"


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "clipped": optax.chain(optax.clip_by_global_norm(1e-2), optax.lamb(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_cuts_optimiser_updates(name: str) -> None:
    """An optimiser updates each shard and its state by itself; norms over all layers are added up."""
    optimizer = OPTIMIZERS[name]
    loss = MODELS["plain"](4)

    def step(params: Any, state: Any, rows: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, jax.random.key(0), rows), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, parameters(4))
    args = params, optimizer.init(params), batch(8)
    jaxpr = passed(step, *args)
    cut_jaxpr = cut_loops(jaxpr, (0, 1, 4))
    check(jaxpr, cut_jaxpr, args, rtol=1e-5)
    for aval, bounds in zip((*jaxpr.in_avals, *jaxpr.out_avals), (*cut_jaxpr.inputs, *cut_jaxpr.outputs), strict=True):
        assert bounds == ((0, 1, 4) if aval.shape[:1] == (4,) else None), aval
    joins = [eqn for eqn, source in zip(cut_jaxpr.jaxpr.eqns, cut_jaxpr.sources, strict=True) if source is None]
    assert all(eqn.primitive.name == "add" for eqn in joins), "norms alone are of all layers"


def test_concatenates_shards_for_equations_that_mix_rows() -> None:
    def fun(w: jax.Array, x: jax.Array) -> Any:
        h, rows = lax.scan(lambda h, w: (jnp.tanh(h @ w), h[0]), x, w)
        order = jnp.argsort(jnp.sum(rows, 1))  # of all rows together
        return h, rows[order] * 2, rows + 1, jnp.max(rows, 0), rows.T, jnp.sum(rows, axis=(0, 1))

    args = array(4, 3, 3), array(2, 3)
    jaxpr = passed(fun, *args)
    cut_jaxpr = cut_loops(jaxpr, (0, 2, 4))
    check(jaxpr, cut_jaxpr, args)
    assert cut_jaxpr.outputs == (None, None, (0, 2, 4), None, None, None)
    joins = [eqn for eqn, source in zip(cut_jaxpr.jaxpr.eqns, cut_jaxpr.sources, strict=True) if source is None]
    assert sorted(eqn.primitive.name for eqn in joins) == ["add", "concatenate", "concatenate", "max"]


def test_inputs_may_stay_unsplit() -> None:
    args = array(4, 3, 3), array(2, 3)
    jaxpr = passed(lambda w, x: lax.scan(lambda h, w: (h @ w, h), x, w), *args)
    loop = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    stack = loop.invars[-1]
    bounds = spread(jaxpr.jaxpr, {stack: (0, 3, 4)})
    cut_jaxpr = cut(jaxpr, bounds, unsplit=[stack])
    check(jaxpr, cut_jaxpr, args)
    assert cut_jaxpr.inputs == (None, None) and cut_jaxpr.outputs == (None, (0, 3, 4))


ROWS = {
    "elementwise": (lambda x, y: x * y, "each"),
    "scalar": (lambda x, y: x * y[0, 0], "each"),
    "one column": (lambda x, y: x * y[:, :1], "each"),
    "one row": (lambda x, y: x * y[:1], "each"),
    "bits": (lambda x, y: lax.bitcast_convert_type(x, np.uint8), "each"),
    "product of rows": (lambda x, y: jnp.einsum("ij,ij->i", x, y), "each"),
    "product": (lambda x, y: x @ y.T, "each"),
    "product of columns": (lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ()))), None),
    "rows exchanged": (lambda x, y: x[::-1], None),
    "columns exchanged": (lambda x, y: x[:, ::-1], "each"),
    "columns sliced": (lambda x, y: x[:, 1:4:2], "each"),
    "rows sliced": (lambda x, y: x[1:3], None),
    "transposed": (lambda x, y: x.T, None),
    "split columns": (lambda x, y: x.reshape(4, 5, 1), "each"),
    "joined rows": (lambda x, y: x.reshape(20), None),
    "numbers of columns": (lambda x, y: lax.broadcasted_iota(np.int32, (4, 5), 1), "each"),
    "numbers of rows": (lambda x, y: lax.broadcasted_iota(np.int32, (4, 5), 0), None),
    "reduced along": (lambda x, y: jnp.max(x, 1), "each"),
    "reduced over": (lambda x, y: jnp.max(x, 0), "combine"),
    "multiplied over": (lambda x, y: jnp.prod(x, 0), "combine"),
    "summed along": (lambda x, y: lax.cumsum(x, 1), "each"),
    "one row for all": (lambda x, y: jnp.broadcast_to(x[0], (4, 5)), "each"),
    "joined along": (lambda x, y: jnp.concatenate([x, y], 1), "each"),
    "joined": (lambda x, y: jnp.concatenate([x, y]), None),
    "sorted": (lambda x, y: jnp.sort(x, 0), None),
    "sorted along": (lambda x, y: jnp.sort(x, 1), "each"),
    "position along": (lambda x, y: jnp.argmax(x, 1), "each"),
    "rows looked up": (lambda x, y: x.at[np.array([2, 0, 3, 2])].get(mode="clip"), "each"),
    "columns looked up": (lambda x, y: x.at[:, np.array([2, 0])].get(mode="clip"), "each"),
    "columns written": (lambda x, y: x.at[:, np.array([2, 0])].add(1, mode="drop"), "each"),
    "rows written": (lambda x, y: x.at[np.array([2, 0])].add(1, mode="drop"), None),
    "matrices": (lambda x, y: lax.linalg.cholesky(x[:, :1, None] ** 2, symmetrize_input=False), "each"),
}


@pytest.mark.parametrize("name", ROWS)
def test_recognises_rows(name: str) -> None:
    """Equations that go row by row are computed for some rows with the same numbers."""
    fun, kind = ROWS[name]
    args = array(4, 5), array(4, 5, seed=1)
    jaxpr = passed(fun, *args)
    eqn = jaxpr.eqns[-1]
    rows = rows_of(eqn)
    assert (rows and rows.kind) == kind, eqn
    stacks = {
        x: (0, 1, 4) for x in (*eqn.invars, *eqn.outvars) if not isinstance(x, Literal) and x.aval.shape[:1] == (4,)
    }
    cut_jaxpr = cut(jaxpr, spread(jaxpr.jaxpr, stacks))
    check(jaxpr, cut_jaxpr, args)
    if kind == "each":
        assert sum(source is not None and source.rows == 3 for source in cut_jaxpr.sources), "shards of rows"


COLLECTIVES = {
    "gathered along": (lambda x: lax.all_gather(x, "replica", axis=1, tiled=True), "each"),
    "gathered to a dimension": (lambda x: lax.all_gather(x, "replica", axis=1), "each"),
    "gathered rows": (lambda x: lax.all_gather(x, "replica", axis=0, tiled=True), None),
    "gathered to the first dimension": (lambda x: lax.all_gather(x, "replica", axis=0), None),
    "scattered along": (lambda x: lax.psum_scatter(x, "replica", scatter_dimension=1, tiled=True), "each"),
    "scattered rows": (lambda x: lax.psum_scatter(x, "replica", scatter_dimension=0, tiled=True), None),
    "exchanged along": (lambda x: lax.all_to_all(x, "replica", 1, 2, tiled=True), "each"),
    "exchanged rows": (lambda x: lax.all_to_all(x, "replica", 1, 0, tiled=True), None),
    "permuted": (lambda x: lax.ppermute(x, "replica", [(0, 1), (1, 0)]), "each"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_recognises_rows_of_collectives(name: str) -> None:
    """Collectives along other dimensions go row by row, as those of gradients of layers that IPUs share."""
    fun, kind = COLLECTIVES[name]
    x = array(2, 4, 2, 3)
    jaxpr = jax.make_jaxpr(fun, axis_env=[("replica", 2)])(x[0])
    eqn = jaxpr.eqns[-1]
    rows = rows_of(eqn)
    assert (rows and rows.kind) == kind, eqn
    cut_jaxpr = cut(jaxpr, spread(jaxpr.jaxpr, {jaxpr.jaxpr.invars[0]: (0, 1, 4)}))
    (expected,) = jax.vmap(jaxpr_as_fun(jaxpr), axis_name="replica")(x)
    got = jax.vmap(jaxpr_as_fun(cut_jaxpr.jaxpr), axis_name="replica")(x[:, :1], x[:, 1:])
    assert len(got) == (2 if kind else 1)
    np.testing.assert_array_equal(jnp.concatenate(got, 1), expected)


def test_cuts_many_layers_at_some_iterations() -> None:
    assert finest_bounds(5) == (0, 1, 2, 3, 4, 5)
    assert len(finest_bounds(24)) == 25 and len(finest_bounds(97)) == 33
    assert set(np.diff(finest_bounds(97))) == {3, 4} and finest_bounds(96)[:3] == (0, 3, 6)


def test_cuts_loops_over_one_stack_alike() -> None:
    args = parameters(6), jax.random.key(2), batch(4)
    jaxpr = passed(MODELS["rich"](6), *args)
    loops = [n for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "scan"]
    bounds = share_bounds(jaxpr.jaxpr, dict(zip(loops, [(0, 2, 6), (0, 5, 6)], strict=True)))
    assert bounds == dict.fromkeys(loops, (0, 2, 5, 6))
