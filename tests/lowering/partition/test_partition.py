"""The pass `partition`: numbers, types and shardings of `jax.jit` for each rule, and the kinds of XLA's collectives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from ipujax.lowering.jax_compat import jaxpr_as_fun
from ipujax.lowering.partition import MeshAxes, Notes, Shardings, partition
from ipujax.lowering.partition.resharding import steps, values_that_may_stay_unreduced
from ipujax.lowering.partition.specs import Spec, typed_spec
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.passes.shard_map import shard_map
from tests.lowering.partition.partitioned_programs import programs

SCRIPT = Path(__file__).parent / "partitioned_programs.py"
MESH = MeshAxes(("data", "model"), (2, 4))
AUTO = AbstractMesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
# Programs whose collectives are of other kinds than XLA's, with the reason.
OTHER_KINDS = {
    "dot_general, sharded parameters": "XLA of CPU has no reduce-scatter, and permutes around a ring",
    "reductions": "a product over devices has no collective: its terms are gathered",
    "gather, split rows of keys": "keys have no sums here: their rows are gathered",
    "cumulative, sort, arg": "XLA of CPU sorts whole rows on every device",
    "reshard": "XLA moves one block as a permute",
    "unreduced": "XLA of CPU has no reduce-scatter",
    "auto_axes": "XLA splits the product inside; here its operand is gathered once",
    "shard_map": "the sum is the user's own",
    "fft": "XLA of CPU gathers the operand, whose batch is split",
    "page: layers in a scan": "XLA of CPU gathers the parameters as sums of padded blocks, and by permutes",
    "page: loss of two layers": "XLA of CPU gathers the parameters as sums of padded blocks, and by permutes",
    "page: shard_map of a product": "the collective is the user's own",
    "page: shard_map of a ring": "the collective is the user's own",
    "page: shard_map of an exchange": "the collective is the user's own",
}
# Programs of which a device receives more bytes than XLA's, with the reason.
MORE_BYTES = {
    "reductions": "a product over devices has no collective: its terms are gathered",
    "reshard": "XLA moves one block as a permute",
    "gather, split rows of keys": "keys have no sums here: their rows are gathered",
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    root = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env={"PYTHONPATH": root})
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", programs())
def test_partitioned_programs_have_the_numbers_and_shardings_of_jax(outcomes: dict[str, Any], name: str) -> None:
    assert outcomes[name].get("error") is None


@pytest.mark.parametrize("name", programs())
def test_collectives_have_the_kinds_of_xla(outcomes: dict[str, Any], name: str) -> None:
    if name not in OTHER_KINDS:
        assert outcomes[name]["kinds"] == outcomes[name]["xla"]


@pytest.mark.parametrize("name", programs())
def test_collectives_have_no_more_bytes_than_those_of_xla(outcomes: dict[str, Any], name: str) -> None:
    if name not in MORE_BYTES:
        assert outcomes[name]["bytes"] <= 1.05 * outcomes[name]["bytes of xla"]


def kinds(before: Spec, after: Spec) -> list[str]:
    return [step.kind for step in steps(before, after, MESH)]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((("data",), ()), (("data",), ()), []),
        ((("data",), ()), (("data", "model"), ()), ["slice"]),
        ((("data",), ()), ((), ()), ["all_gather"]),
        ((("data",), ("model",)), ((), ()), ["all_gather", "all_gather"]),
        ((("data", "model"), ()), ((), ()), ["all_gather"]),
        ((("data",), ()), ((), ("data",)), ["all_to_all"]),
        ((("data", "model"), ()), (("model", "data"), ()), ["permute"]),
        ((("data",), ()), (("model",), ("data",)), ["all_to_all", "slice"]),
    ],
)
def test_reshards_in_few_collectives(before: Any, after: Any, expected: list[str]) -> None:
    assert kinds(Spec(before), Spec(after)) == expected


def test_sums_are_scattered_where_the_result_is_split() -> None:
    partial = Spec(((), ()), frozenset({"data", "model"}))
    assert kinds(partial, Spec((("data",), ()))) == ["reduce_scatter", "all_reduce"]
    assert kinds(partial, Spec(((), ()), frozenset({"model"}))) == ["all_reduce"]


@pytest.mark.parametrize(
    ("fun", "dtype", "may_stay"),
    [
        (lambda x: x.sum(0).astype(jnp.complex64), jnp.float32, True),
        (lambda x: x.sum(0).astype(jnp.float16), jnp.float32, False),
        (lambda x: lax.convert_element_type(x.sum(0), jnp.bfloat16), jnp.float32, False),
        (lambda x: x.sum(0).astype(jnp.int32), jnp.float32, False),
        (lambda x: x.sum(0).astype(bool), jnp.int32, False),
        (lambda x: x.sum(0).astype(jnp.float32), jnp.uint32, False),
        (lambda x: lax.convert_element_type(x.sum(0), jnp.int8), jnp.int32, True),
        (lambda x: lax.reduce(x, np.int8(0), lax.add, (0,)).astype(jnp.int32), jnp.int8, False),
        (lambda x: lax.div(x.sum(0), 3), jnp.int32, False),
        (lambda x: lax.mul(x.sum(0), 3), jnp.int32, True),
        (lambda x: lax.div(x.sum(0), jnp.float32(3)), jnp.float32, True),
        (lambda x: lax.div(x.sum(0), jnp.float32(0)), jnp.float32, False),
        (lambda x: lax.mul(x.sum(0), np.inf), jnp.float32, False),
        (lambda x: lax.mul(lax.reduce_sum(x, (0,)), x.dtype.type(3)), jnp.float16, False),
        (lambda x: lax.mul(lax.reduce_sum(x, (0,)), x.dtype.type(3)), jnp.bfloat16, True),
        (lambda x: lax.mul(np.float32(3), lax.reduce_sum(x, (0,))), jnp.float32, True),
        (lambda x: lax.div(np.float32(3), lax.reduce_sum(x, (0,))), jnp.float32, False),
        (lambda x: x.sum(0).astype(jnp.float8_e5m2), jnp.float32, False),
        (lambda x: -lax.reduce_sum(x, (0,)), jnp.float16, True),
        (lambda x: lax.add(lax.reduce_sum(x, (0,)), np.ones(2, np.float16)), jnp.float16, False),
        (lambda x: lax.add(lax.reduce_sum(x, (0,)), np.ones(2, jnp.bfloat16)), jnp.bfloat16, True),
        (lambda x: lax.cumsum(-lax.reduce_sum(x, (0,))), jnp.float32, False),
        (lambda x: lax.convert_element_type(lax.reduce_sum(x, (0,)), jnp.int8), jnp.int4, False),
    ],
)
def test_partial_sums_pass_through_linear_equations_alone(fun: Any, dtype: Any, may_stay: bool) -> None:
    jaxpr = inline(jax.make_jaxpr(fun)(jnp.ones((4, 2), dtype))).jaxpr
    (total,) = [eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_sum"]
    assert (total in values_that_may_stay_unreduced(jaxpr, dict.fromkeys(jaxpr.outvars, 1))) is may_stay


def partitioned(fun: Any, *args: Any, outputs: Any = ()) -> tuple[Any, Notes]:
    notes = Notes()
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape, _ in args]
    inputs = tuple(None if spec is None else NamedSharding(AUTO, spec) for _, spec in args)
    jaxpr = inline(jax.jit(fun).trace(*shapes).jaxpr)
    return partition(jaxpr, Shardings(inputs, outputs), notes), notes


def test_programs_without_shardings_stay_the_same_object() -> None:
    jaxpr = inline(jax.jit(jnp.sin).trace(np.ones(8, np.float32)).jaxpr)
    assert partition(jaxpr) is jaxpr
    assert partition(jaxpr, Shardings((NamedSharding(AUTO, P()),))) is jaxpr


def looked_up_by_bytes(table: Any) -> Any:
    """Look-ups and sums by indices of a dtype that has not all rows of the table."""
    rows = jnp.array([0, 10, 200, 255], jnp.uint8)
    dims = lax.ScatterDimensionNumbers((), (0,), (0,))
    read = [jnp.take(table, rows, mode=mode) for mode in ("clip", "fill")]
    return read, [lax.scatter_add(table, rows[:, None], read[0], dims, mode=mode) for mode in ("clip", "drop")]


def filled(table: Any) -> Any:
    """Look-ups beyond the table, whose values are beyond the range of its dtype."""
    return [table.at[jnp.array([3, 5000])].get(mode="fill", fill_value=value) for value in (-1, 300, None)]


def drawn(x: Any) -> Any:
    """Random numbers under a setting that the function itself changes."""
    with jax.threefry_partitionable(False):
        return [x + jax.random.uniform(jax.random.key(0), x.shape)]


# Programs that XLA does not partition, or rounds twice: (function, values of the split argument).
OF_ONE_DEVICE: dict[str, tuple[Any, Any]] = {
    "bits": (
        lambda x: [ufunc.reduce(x | 256) for ufunc in (jnp.bitwise_or, jnp.bitwise_and, jnp.bitwise_xor)],
        2 ** np.arange(8, dtype=np.int32),
    ),
    "iota of halves": (lambda x: x + lax.iota(x.dtype, 4096), np.zeros(4096, jnp.bfloat16)),
    "truths": (lambda x: x[jnp.array([0, 3, 5])], np.arange(8) % 3 == 0),
    "narrow indices": (looked_up_by_bytes, np.arange(1000, dtype=np.float32)),
    "random numbers": (drawn, np.zeros((8, 4), np.float32)),
    "fill values out of range": (filled, (np.arange(4096 * 16) % 251).astype(np.uint8).reshape(4096, 16)),
}


@pytest.mark.parametrize("name", OF_ONE_DEVICE)
def test_partitioned_programs_have_the_numbers_of_one_device(name: str) -> None:
    fun, x = OF_ONE_DEVICE[name]
    jaxpr = partition(inline(jax.make_jaxpr(fun)(x)), Shardings((NamedSharding(AUTO, P("model")),)))
    assert jaxpr.eqns[0].primitive.name == "shard_map"
    for a, b in zip(jaxpr_as_fun(shard_map(jaxpr))(x), jax.tree.leaves(fun(jnp.asarray(x))), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


def test_a_result_that_is_an_operand_of_another_split_is_moved_by_itself() -> None:
    """The array of a device is the block of both: rows of one value are columns of the other."""

    def fun(x: Any) -> Any:
        mapped = jax.shard_map(lambda block: block, mesh=AUTO, in_specs=P("data"), out_specs=P(None, "data"))
        return jnp.sort(x, axis=0), jnp.sort(mapped(x), axis=1)

    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    after, _ = partitioned(fun, ((8, 4), P("data")))
    ordered, joined = jaxpr_as_fun(shard_map(after))(x)
    np.testing.assert_array_equal(ordered, np.sort(x, axis=0))
    np.testing.assert_array_equal(joined, np.sort(np.concatenate([x[:4], x[4:]], 1), axis=1))


def test_specs_spread_forward_and_backward() -> None:
    after, notes = partitioned(lambda x, w: jnp.tanh(x @ w), ((8, 16), None), ((16, 32), P(None, "model")))
    (eqn,) = after.eqns
    assert eqn.params["out_specs"] == (P(None, "model"),)
    after, _ = partitioned(lambda x: jnp.tanh(x.T), ((8, 16), None), outputs=(NamedSharding(AUTO, P("data")),))
    assert after.eqns[0].params["in_specs"] == (P(None, "data"),)
    assert not notes.moves


def test_equations_without_a_rule_gather_and_say_so() -> None:
    _, notes = partitioned(lambda x: jax.lax.ragged_dot(x, x[None, :4], jnp.array([8])), ((8, 4), P("data")))
    assert [name for name, _ in notes.gathered] == ["ragged_dot_general"]
    assert [move.step.kind for move in notes.moves].count("all_gather") >= 1


def test_sums_that_a_result_leaves_are_stacks_of_terms() -> None:
    explicit = AbstractMesh((2, 4), ("data", "model"), (AxisType.Explicit,) * 2)
    shape = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(explicit, P(None, "model")))

    def fun(x: Any) -> Any:
        return jnp.einsum("ab,cb->ac", x, x, out_sharding=P(None, None, unreduced={"model"}))

    with jax.sharding.use_abstract_mesh(explicit):
        jaxpr = inline(jax.jit(fun).trace(shape).jaxpr)
    notes = Notes()
    (result,) = partition(jaxpr, notes=notes).out_avals
    assert result.shape == (4, 8, 8)
    assert notes.unreduced == [("model",)] and not notes.moves


def test_terms_of_a_loop_are_added_up_over_devices_after_it() -> None:
    def fun(x: Any, y: Any) -> Any:
        def add(total: Any, rows: Any) -> Any:
            return total + jnp.tanh(rows[0]).T @ rows[1], None

        return lax.scan(add, jnp.ones((4, 6)), (x, y))[0]

    after, notes = partitioned(fun, ((3, 8, 4), P(None, "data")), ((3, 8, 6), P(None, "data")))
    assert [move.step.kind for move in notes.moves] == ["all_reduce"]
    body = after.eqns[0].params["jaxpr"]
    (loop,) = (eqn for eqn in body.eqns if eqn.primitive.name == "scan")
    assert {"psum", "all_gather"}.isdisjoint(eqn.primitive.name for eqn in loop.params["jaxpr"].jaxpr.eqns)
    x, y = np.linspace(-1, 1, 96, dtype=np.float32).reshape(3, 8, 4), np.ones((3, 8, 6), np.float32)
    (got,) = jax.jit(jaxpr_as_fun(shard_map(after)))(x, y)
    np.testing.assert_allclose(got, jax.jit(fun)(x, y), rtol=1e-5)


def test_dimensions_that_a_reshape_joins_are_split_in_contiguous_blocks() -> None:
    after, notes = partitioned(lambda x: x.reshape(32), ((8, 4), P("data", "model")))
    assert after.eqns[0].params["out_specs"] == (P("data"),)
    assert [move.step.kind for move in notes.moves] == ["all_gather"]


def test_types_over_one_device_leave_the_split_open() -> None:
    kinds = (AxisType.Explicit,)
    for size, expected in ((1, None), (2, Spec((("data",), ())))):
        mesh = AbstractMesh((size,), ("data",), kinds)
        aval = jax.ShapeDtypeStruct((4, 2), np.float32, sharding=NamedSharding(mesh, P("data")))
        assert typed_spec(aval, MeshAxes(("data",), (size,))) == expected


# Rows of the op table that XLA of the CPU cannot compute on several devices, after the pass or before it.
NOT_ON_DEVICES = {
    "mulhi: int": "it has no translation in a manual computation",
    "mulhi: unsigned": "it has no translation in a manual computation",
    "dot_general: empty": "an operand without elements has no shards",
    "pure_callback: keys": "callbacks of keys have no sharding",
}


def test_operations_with_random_shardings_have_the_numbers_of_jax() -> None:
    root = str(Path(__file__).parents[3])
    script = SCRIPT.with_name("partitioned_operations.py")
    done = subprocess.run([sys.executable, script, "1"], capture_output=True, text=True, env={"PYTHONPATH": root})
    assert done.returncode == 0, done.stderr
    faults = json.loads(done.stdout.splitlines()[-1])
    assert not {name: fault for name, fault in faults.items() if name not in NOT_ON_DEVICES}
