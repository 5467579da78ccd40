"""`offload_argnums`: the numbers of `jax.jit` on all kinds of machines, its bytes and cycles, refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.lowering.offload import BATCH_BYTES
from ipujax.lowering_plan import planned_program
from ipujax.runtime.interpreter.interpreter import interpret
from tests.ipujax.pipeline.pipeline_models import no_stage
from tests.lowering.helpers import assert_same, quick_jit
from tests.lowering.offload.offloaded_functions import ALL, CASES

SAME = P()
SPLIT = P("replica")
ADAM = optax.adam(0.01)


def array(*shape: int, seed: int = 0) -> jax.Array:
    """Numbers that differ for each shape and seed."""
    return jax.device_put((np.random.default_rng([*shape, seed]).normal(size=shape) / 2).astype(np.float32))


def device(num_ipus: int = 1, **changes: Any) -> ipu.IPUModel:
    return ipu.IPUModel(num_ipus, arch="mk2", **{"tiles_per_ipu": 16, **changes})


def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.array, tree)


def buffers(lowered: Any) -> list[str]:
    """The names of variables in streaming memory."""
    return [buffer.name for buffer in lowered.graph.off_chip.values()]


def on_tiles(lowered: Any, args: Any) -> list[Any]:
    """The results of the tile interpreter."""

    def run(inputs: Any) -> Any:
        return interpret(lowered.graph, lowered.program, {s: np.asarray(x) for s, x in inputs.items()}, seed=3)

    return list(lowered.planned.lowered.evaluate(jax.tree.leaves(args), run))


# --- numbers ----------------------------------------------------------------------------------------------------------


def loss(params: Any, x: jax.Array, stage: Any = ipu.stage) -> jax.Array:
    """Two dense layers, each a stage."""
    with stage(0):
        h = jnp.tanh(x @ params["in"] + params["bias"])
    with stage(1):
        return jnp.mean((h @ params["out"]) ** 2)


def loop_loss(params: Any, x: jax.Array) -> jax.Array:
    """A loop over stacked layers."""
    layers = params["in"], params["bias"]
    return jnp.mean(lax.scan(lambda h, p: (jnp.tanh(h @ p[0] + p[1]), None), x, layers)[0] ** 2)


def trained(
    grads_of: Callable[..., Any], reduce: Callable[..., Any] = lambda x: x, optimizer: Any = ADAM
) -> Callable[..., Any]:
    """A training step of parameters, state and inputs."""

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, grads = reduce(grads_of(params, x))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


LAYERS = {"in": array(6, 8), "bias": array(8), "out": array(8, 4)}
STACK = {"in": array(2, 6, 6), "bias": array(2, 6)}
X = array(8, 6)
gradients = jax.value_and_grad(loss)
one_stage = jax.value_and_grad(partial(loss, stage=no_stage))
mean = partial(lax.pmean, axis_name="replica")
SHARDED = ipu.optim.shard(ADAM, replicas=2, min_elements=8)
SHARD_SPECS = ipu.optim.shard_specs(jax.eval_shape(SHARDED.init, LAYERS))


@dataclass(frozen=True)
class Machine:
    """A training step on some IPUs.

    Args:
        step: function for `ipu.jit`.
        num_ipus: number of IPUs.
        offloaded: `offload_argnums`.
        settings: further settings of `ipu.jit`.
        loss: the loss of all inputs on one machine.
        params: parameters.
        optimizer: makes the state.
    """

    step: Callable[..., Any]
    num_ipus: int = 2
    offloaded: tuple[int, ...] = ALL
    settings: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[..., Any] = loss
    params: Mapping[str, Any] = field(default_factory=lambda: LAYERS)
    optimizer: Any = ADAM

    @property
    def args(self) -> tuple[Any, ...]:
        return self.params, self.optimizer.init(self.params), X

    def jitted(self, offloaded: tuple[int, ...]) -> Any:
        settings = {"donate_argnums": ALL, "offload_argnums": offloaded, **self.settings}
        return ipu.jit(self.step, device=device(self.num_ipus), **settings)


EQUAL = {"replicas": 2, "in_specs": (SAME, SAME, SPLIT), "out_specs": SAME}
PARTS = {"replicas": 2, "in_specs": (SAME, SHARD_SPECS, SPLIT), "out_specs": (SAME, SHARD_SPECS, SAME)}
MACHINES = {
    "state": Machine(trained(one_stage), 1, (1,)),
    "all": Machine(trained(one_stage), 1),
    "not donated": Machine(trained(one_stage), 1, settings={"donate_argnums": ()}),
    "stages": Machine(trained(gradients)),
    "pipeline": Machine(trained(ipu.pipeline(gradients, micro_batches=2))),
    "stages of a loop": Machine(
        trained(ipu.pipeline(jax.value_and_grad(loop_loss), micro_batches=2, stages=2)), loss=loop_loss, params=STACK
    ),
    "replicas": Machine(trained(one_stage, mean), 2, (0, 1, 2), EQUAL),
    "shards": Machine(trained(one_stage, lambda r: (mean(r[0]), r[1]), SHARDED), 2, (1,), PARTS, optimizer=SHARDED),
}
ON_TILES = ("stages", "replicas")


def results(machine: Machine, run: Callable[..., Any]) -> list[Any]:
    """Parameters and losses of three steps, each from the results of the one before."""
    *given, x = machine.args
    actual = []
    for _ in range(3):
        *given, value = run(*copied(given), x)
        actual.append((given[0], value))
    return jax.tree.leaves(actual)


@pytest.mark.parametrize("name", MACHINES)
def test_the_numbers_are_those_of_one_machine_without_offloading(name: str) -> None:
    machine = MACHINES[name]
    plain = Machine(trained(jax.value_and_grad(machine.loss)), params=machine.params)
    jitted = machine.jitted(machine.offloaded)
    expected = results(plain, jax.jit(plain.step))
    assert_same(results(machine, jitted), expected, 1e-3, 1e-5, name)
    lowered = jitted.lower(*machine.args).compile().lowered
    arrays = jax.tree.leaves([machine.args[n] for n in machine.offloaded])
    assert len(buffers(lowered)) == sum(x.size > 1 for x in arrays)
    if name in ON_TILES:
        once = jax.tree.leaves(plain.step(*plain.args))
        assert_same(on_tiles(lowered, machine.args), once, 1e-3, 1e-5, "tile interpreter")


SOME_CASES = (
    "swapped",
    "replaced by another's",
    "in a branch",
    "views swapped",
    "along a scan",
    "look up, mode fill",
    "look up, grid",
    "look up, row 5",
    "look up, windows, mode fill",
    "update, add, mode None",
    "update, half subtracted",
    "update, three rows at 5, scatter_sub, mode drop",
    "update, slice at 5",
    "update, set, of another",
    "update, and old",
)


@pytest.mark.parametrize("name", SOME_CASES)
def test_small_functions_on_engine_and_tiles(name: str) -> None:
    case = CASES[name]
    settings = {"offload_argnums": case.offloaded, "donate_argnums": case.donated}
    lowered = ipu.jit(case.fun, device=device(), **settings).lower(*case.args)
    lowered.compile()
    expected = jax.tree.leaves(case.fun(*case.args))
    assert_same(jax.tree.leaves(quick_jit(lowered.evaluate)(*case.args)), expected, 1e-6, 0, "engine")
    assert_same(on_tiles(lowered, case.args), expected, 1e-6, 0, "tile interpreter")


@pytest.mark.parametrize("spec", [SAME, SPLIT], ids=["whole", "split"])
def test_rows_of_a_table_over_replicas(spec: P) -> None:
    """Each has all of the table, or a part of its own."""
    table = array(8, 3)
    rows = jnp.array([0, 1, 1, 3, 2, -1])
    shares = (table, rows) if spec == SAME else (table.reshape(2, 4, 3), rows.reshape(2, 3))
    settings = {"replicas": 2, "in_specs": spec, "out_specs": spec, "offload_argnums": 0, "donate_argnums": 0}

    def add(table: jax.Array, rows: jax.Array) -> jax.Array:
        return table.at[rows].add(1.0)

    expected = (add if spec == SAME else jax.vmap(add))(*shares).reshape(table.shape)
    jitted = ipu.jit(add, device=device(2), **settings)
    np.testing.assert_allclose(jitted(copied(table), rows), expected, rtol=1e-6)
    assert "remote_update" in jitted.lower(table, rows).as_text(after="offload")


@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "bool", "float8_e4m3fn", "complex64"])
def test_dtypes(dtype: str) -> None:
    x = array(4, 4).astype(dtype)
    (got,) = jax.tree.leaves(
        ipu.jit(lambda x: x[::-1], device=device(), offload_argnums=0, donate_argnums=0)(copied(x))
    )
    np.testing.assert_array_equal(got, x[::-1])


def test_loops_of_data_are_profiled_as_they_ran() -> None:
    x = array(4, 4)

    def fun(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x.sum() < 99, lambda x: jnp.abs(x) * 2 + 1, x)

    out, profile = ipu.jit(fun, device=device(), offload_argnums=0, donate_argnums=0).lower(x).compile().profile_call(x)
    np.testing.assert_allclose(out, fun(x))
    assert profile.phase_cycles["host_exchange"] == 2 * transfer_cycles(device(), [x.nbytes])


# --- what lies in streaming memory ------------------------------------------------------------------------------------


def test_keys_and_single_elements_stay_on_chip() -> None:
    tree = {
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(1), 4),
        "scalar": jnp.float32(2),
        "one": jnp.ones((1, 1)),
        "none": jnp.zeros((0, 3)),
        "two": array(2),
        "matrix": array(3, 3),
    }

    def fun(tree: Any) -> Any:
        noise = jax.random.normal(tree["key"], (3, 3)) + jax.random.normal(tree["keys"][1], (3, 3))
        return tree["matrix"] * tree["scalar"] * tree["one"] + noise + tree["two"].sum() + tree["none"].sum()

    jitted = ipu.jit(fun, device=device(), offload_argnums=0)
    assert buffers(jitted.lower(tree)) == ["tree['matrix']", "tree['two']"]
    np.testing.assert_allclose(jitted(tree), fun(tree), rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"offload_argnums": 0}, ["a"]),
        ({"offload_argnums": (2, 0)}, ["a", "c"]),
        ({"offload_argnums": -1}, ["c"]),
        ({"offload_argnums": (1, -2, 1)}, ["b"]),
        ({"offload_argnums": np.int64(1)}, ["b"]),
        ({"offload_argnums": ()}, []),
        ({"offload_argnums": None}, []),
    ],
)
def test_arguments_by_position(settings: dict[str, Any], expected: list[str]) -> None:
    lowered = ipu.jit(lambda a, b, c: a + b + c, device=device(), **settings).lower(*[array(4)] * 3)
    assert buffers(lowered) == expected


def test_positions_count_static_arguments() -> None:
    fun = ipu.jit(lambda n, a, b: a * n + b, device=device(), static_argnums=0, offload_argnums=(1,))
    assert buffers(fun.lower(3, array(4), array(4))) == ["a"]
    assert buffers(fun.with_options(offload_argnums=(2,)).lower(3, array(4), array(4))) == ["b"]


@pytest.mark.parametrize(
    ("wrong", "kind"), [(True, "bool"), (1.0, "float"), ("1", "str"), ((0, "b"), "tuple of int, str")]
)
def test_refuses_a_non_position(wrong: Any, kind: str) -> None:
    with pytest.raises(ipu.ArgumentError, match=rf"offload_argnums of ipu.jit cannot be (.|\n)*got: {kind}"):
        ipu.jit(lambda a: a, offload_argnums=wrong)


@pytest.mark.parametrize(
    ("wrong", "settings", "label"),
    [
        (2, {}, "no argument"),
        (-3, {}, "no argument"),
        ((0, 7), {}, "no argument"),
        (1, {"static_argnums": 1}, "a static argument"),
        (-1, {"static_argnames": "n"}, "a static argument"),
    ],
)
def test_positions_without_an_array_are_refused(wrong: Any, settings: dict[str, Any], label: str) -> None:
    def scaled(a: Any, n: Any) -> Any:
        return a * n

    number = wrong[-1] if isinstance(wrong, tuple) else wrong
    expected = rf"offload_argnums of scaled names {label}(.|\n)*positions of 2 positional(.|\n)*got: {number}"
    with pytest.raises(ipu.ArgumentError, match=expected):
        ipu.jit(scaled, device=device(), offload_argnums=wrong, **settings)(array(4), 3)


def test_streaming_memory_that_is_exceeded() -> None:
    small = device(streaming_memory_bytes=1024)
    fun = ipu.jit(lambda a, b: (a + 1, b + 1), device=small, offload_argnums=ALL)
    fun.lower(array(128), array(128)).compile()
    text = r"does not fit in streaming memory(.|\n)*at most 1,024 bytes(.|\n)*got: 1,028 bytes, of which b has 516"
    with pytest.raises(ipu.StreamingMemoryError, match=text):
        fun.lower(array(128), array(129)).compile()
    of_replicas = {"replicas": 2, "in_specs": SPLIT, "out_specs": SPLIT, "offload_argnums": 0}
    two = device(2, streaming_memory_bytes=1024)
    ipu.jit(lambda a: a + 1, device=two, **of_replicas).lower(array(512)).compile()  # each has a part
    with pytest.raises(ipu.StreamingMemoryError, match="got: 1,028 bytes"):
        ipu.jit(lambda a: a + 1, device=two, **of_replicas).lower(array(514)).compile()


# --- what it saves and costs ------------------------------------------------------------------------------------------


def transfer_cycles(on: ipu.IPUModel, sizes: Sequence[int]) -> int:
    """Cycles of one exchange with streaming memory of so many bytes each, after one latency."""
    target = on.target
    seconds = [size / target.streaming_bytes_per_second for size in sizes]
    seconds[0] += target.host_latency_seconds
    return sum(ceil(each * target.clock_hz) for each in seconds)


@pytest.mark.parametrize("most_bytes", [1 << 20, 800, 1])
def test_each_batch_has_a_latency_and_its_bytes(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four arguments of 400 bytes, in batches of four, of two and of one."""
    monkeypatch.setattr(planned_program, "BATCH_BYTES", most_bytes)
    monkeypatch.setattr(planned_program, "_MAX_BATCH_SHARE", 1)
    on = device(streaming_bytes_per_second=3e9)
    every = (0, 1, 2, 3)
    fun = ipu.jit(lambda *xs: [x * 2 for x in xs], device=on, offload_argnums=every, donate_argnums=every)
    profile = fun.lower(*[jax.ShapeDtypeStruct((100,), jnp.float32)] * 4).compile().profile
    of_each = max(1, min(4, most_bytes // 400))
    assert profile.phase_cycles["host_exchange"] == 2 * (4 // of_each) * transfer_cycles(on, [400] * of_each)


def test_bytes_beyond_one_transfer_have_several_latencies() -> None:
    on = device(max_remote_transfer_bytes=1024)
    fun = ipu.jit(lambda x: x * 2, device=on, offload_argnums=0, donate_argnums=0)
    profile = fun.lower(jax.ShapeDtypeStruct((1000,), jnp.float32)).compile().profile
    seconds = 4 * on.target.host_latency_seconds + 4000 / on.target.streaming_bytes_per_second
    assert profile.phase_cycles["host_exchange"] == 2 * ceil(seconds * on.target.clock_hz)


def test_looking_up_rows_moves_these_rows() -> None:
    shapes = jax.ShapeDtypeStruct((100_000, 32), jnp.float32), jax.ShapeDtypeStruct((10,), jnp.int32)
    fun = ipu.jit(lambda table, rows: jnp.tanh(table[rows]).sum(), device=device(), offload_argnums=0)
    profile = fun.lower(*shapes).compile().profile  # the table is larger than all tiles together
    target = device().target
    ends = [target.host_latency_seconds + size / target.host_bytes_per_second for size in (40, 4)]
    expected = sum(ceil(s * target.clock_hz) for s in ends) + transfer_cycles(device(), [10 * 32 * 4])
    assert profile.phase_cycles["host_exchange"] == expected


def test_the_state_of_adam_leaves_the_tiles() -> None:
    """But for one batch, as it is loaded and as it is stored."""

    def chain_loss(weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8
    args = weights, jax.eval_shape(ADAM.init, weights), jax.ShapeDtypeStruct((16, 256), jnp.float32)
    step = trained(jax.value_and_grad(chain_loss))
    fun = ipu.jit(step, device=device(), donate_argnums=ALL)
    memories = [
        fun.with_options(offload_argnums=there).lower(*args).compile().profile.memory for there in ((), (1,), ALL)
    ]
    variables = [int(memory.by_category["variable"].max()) for memory in memories]
    per_tile = 4 * 256 * 256 * 8 // 16  # of the weights, half of the state
    assert variables[0] - variables[1] >= 2 * per_tile - 2 * BATCH_BYTES // 16
    assert variables[2] < variables[1]
    worst = [memory.max_tile_bytes for memory in memories]
    assert worst[0] > 1.3 * worst[1] > 1.5 * worst[2]


def test_profiles_are_the_same_each_time_and_after_saving(tmp_path: Path) -> None:
    machine = MACHINES["stages"]
    first, second = (machine.jitted(ALL).lower(*machine.args).compile().profile for _ in range(2))
    assert first.summary(show_execution_steps=True) == second.summary(show_execution_steps=True)
    assert first.memory.tile_bytes.tolist() == second.memory.tile_bytes.tolist()
    first.save(tmp_path / "profile")
    loaded = ipu.Profile.load(tmp_path / "profile")
    assert loaded.summary() == first.summary() and loaded.phase_cycles == first.phase_cycles
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), machine.args)
    assert machine.jitted(ALL).lower(*shapes).compile().profile.summary() == first.summary()
