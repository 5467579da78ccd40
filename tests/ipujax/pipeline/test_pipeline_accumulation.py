"""`ipu.pipeline` without stages: its numbers against loops written out in plain JAX; refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import ipujax as ipu
from ipujax.runtime.graph.program import Execute, Repeat
from ipujax.runtime.graph.walks import distinct
from tests.lowering.helpers import check

RNG = np.random.default_rng(7)
PARAMS = {"w": RNG.normal(size=(5, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}
BATCH = {"x": RNG.normal(size=(8, 5)).astype(np.float32), "y": RNG.normal(size=(8, 3)).astype(np.float32)}
DEVICE = ipu.IPUModel(tiles_per_ipu=8)
TILES = (1, 7)


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]) ** 2)


def micro_batch(batch: Any, number: int, of: int) -> Any:
    """Micro-batch `number`, cut out by hand."""
    return jax.tree.map(lambda x: x[number * len(x) // of : (number + 1) * len(x) // of], batch)


def close(got: Any, expected: Any, rtol: float = 1e-6) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol, rtol)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_accumulated_gradients_are_those_of_the_whole_batch(micro_batches: int) -> None:
    accumulated = ipu.pipeline(jax.value_and_grad(loss), micro_batches=micro_batches)
    expected = jax.value_and_grad(loss)(PARAMS, BATCH)
    for run in (accumulated, jax.jit(accumulated), ipu.jit(accumulated, device=DEVICE)):
        close(run(PARAMS, BATCH), expected)


REDUCED: dict[str, Callable[[list[Any]], Any]] = {
    "mean": lambda values: sum(values) / np.float32(len(values)),
    "running_mean": lambda values: sum(values) / np.float32(len(values)),
    "sum": sum,
    "stack": np.stack,
    "last": lambda values: values[-1],
}


@pytest.mark.parametrize("kind", REDUCED)
def test_every_reduction(kind: str) -> None:
    values = [np.asarray(jax.jit(loss)(PARAMS, micro_batch(BATCH, n, 4))) for n in range(4)]
    run = ipu.pipeline(loss, micro_batches=4, reduce=kind)
    close(jax.jit(run)(PARAMS, BATCH), np.asarray(REDUCED[kind](values), np.float32))
    check(run, PARAMS, BATCH, tiles=TILES, rtol=1e-6, split_rtol=1e-5)


def test_reductions_as_a_prefix_of_the_results() -> None:
    def fun(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return (value, {"rows": batch["x"][0], "count": jnp.int32(len(batch["x"]))}), grads

    run = ipu.pipeline(fun, micro_batches=2, reduce=(("stack", {"rows": "last", "count": "sum"}), "sum"))
    (losses, aux), grads = ipu.jit(run, device=DEVICE)(PARAMS, BATCH)
    halves = [jax.value_and_grad(loss)(PARAMS, micro_batch(BATCH, n, 2)) for n in range(2)]
    close(losses, jnp.stack([half[0] for half in halves]))
    close(aux, {"rows": jnp.asarray(BATCH["x"][4]), "count": jnp.int32(8)})
    close(grads, jax.tree.map(jnp.add, halves[0][1], halves[1][1]))


def test_none_among_the_results_is_none() -> None:
    def fun(params: Any, batch: Any) -> Any:
        return loss(params, batch), (None, {"rows": batch["x"][0], "mask": batch["mask"]})

    batch = {**BATCH, "mask": None}
    rows = BATCH["x"][[0, 4]]
    for reduce in (("mean", "stack"), ("mean", (None, "stack")), ("mean", (None, {"rows": "stack", "mask": None}))):
        run = ipu.pipeline(fun, micro_batches=2, reduce=reduce)
        for wrap in (jax.jit, ipu.jit):
            close(wrap(run)(PARAMS, batch), (loss(PARAMS, BATCH), (None, {"rows": rows, "mask": None})))


def test_accumulators_of_their_own_dtype() -> None:
    """Half-precision values whose sum half precision does not hold; and a mean that never leaves it."""

    def fun(batch: jax.Array) -> jax.Array:
        return batch.sum(0)

    batch = np.full((8, 2), 3e4, np.float16)
    wide = ipu.pipeline(fun, micro_batches=8, reduce="sum", accumulate_dtype=jnp.float32)
    close(ipu.jit(wide, device=DEVICE)(batch), np.full(2, 2.4e5, np.float32), 1e-3)
    means = {kind: ipu.jit(ipu.pipeline(fun, micro_batches=8, reduce=kind), device=DEVICE)(batch) for kind in REDUCED}
    assert means["mean"].dtype == means["running_mean"].dtype == jnp.float16
    assert np.all(np.isinf(means["mean"]))
    close(means["running_mean"], np.full(2, 3e4, np.float16), 2e-3)


def test_keys_are_folded_with_the_number_of_the_micro_batch() -> None:
    def dropped(params: Any, key: Any, batch: Any) -> jax.Array:
        kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return loss(params, batch | {"x": batch["x"] * kept})

    run = ipu.pipeline(dropped, micro_batches=4, rng_argnums=1, reduce="stack")
    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        expected = [dropped(PARAMS, jax.random.fold_in(key, n), micro_batch(BATCH, n, 4)) for n in range(4)]
        assert len({float(x) for x in expected}) == 4
        close(ipu.jit(run, device=DEVICE)(PARAMS, key, BATCH), jnp.stack(expected))
    check(run, PARAMS, jax.random.key(3), BATCH, tiles=(7,), rtol=1e-6, split_rtol=1e-5)


def running_statistics(params: Any, state: Any, batch: Any) -> Any:
    """A loss, and the next value of a running mean, as batch normalisation keeps."""
    mean = 0.9 * state["mean"] + 0.1 * batch["x"].mean(0)
    value = loss(params, batch | {"x": batch["x"] - mean})
    return value, {"state": {"mean": mean, "steps": state["steps"] + 1}}


def test_carried_state_goes_from_micro_batch_to_micro_batch() -> None:
    state = {"mean": np.ones(5, np.float32), "steps": np.int32(3)}
    with_grad = jax.value_and_grad(running_statistics, has_aux=True)
    run = ipu.pipeline(with_grad, micro_batches=4, carry={1: (0, 1, "state")})
    expected = state
    losses = []
    grads = []
    for n in range(4):
        (value, aux), grad = with_grad(PARAMS, expected, micro_batch(BATCH, n, 4))
        expected = aux["state"]
        losses = [*losses, value]
        grads = [*grads, grad]
    total = (sum(losses) / 4, {"state": expected}), jax.tree.map(lambda *g: sum(g) / 4, *grads)
    close(ipu.jit(run, device=DEVICE)(PARAMS, state, BATCH), total)
    check(run, PARAMS, state, BATCH, tiles=(7,), rtol=1e-6, atol=1e-8, split_rtol=1e-5, split_atol=1e-7)


@pytest.mark.parametrize("stages", [1, 2])
def test_states_in_bfloat16_are_those_of_plain_jax_that_rounds_each_operation(stages: int) -> None:
    """XLA otherwise leaves out roundings between operations that it fuses, which differ from program to program."""

    def fun(weights: Any, state: Any, x: Any) -> Any:
        with ipu.stage(0):
            h = x @ weights[0]
            state = 0.9 * state + 0.1 * h.var(0)
            h = jax.nn.relu(h * lax.rsqrt(h.var(0) + 1e-3))
        with ipu.stage(stages - 1):
            return jnp.mean((h @ weights[1]) ** 2), state

    strictly = {"xla_allow_excess_precision": False}
    run = ipu.pipeline(jax.value_and_grad(fun, has_aux=True), micro_batches=8, carry={1: (0, 1)})
    args = ([RNG.normal(size=(8, 8)) for _ in range(2)], np.ones(8), RNG.normal(size=(64, 8)))
    args = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), args)
    device = ipu.IPUModel(num_ipus=stages, tiles_per_ipu=8)
    expected = jax.jit(run, compiler_options=strictly)(*args)
    jax.tree.map(np.testing.assert_array_equal, ipu.jit(run, device=device, compiler_options=strictly)(*args), expected)


def test_carried_state_reduced_as_asked() -> None:
    def fun(count: jax.Array, batch: jax.Array) -> jax.Array:
        return count + batch.sum()

    run = ipu.pipeline(fun, micro_batches=4, carry={0: ()}, reduce="mean")
    assert run(jnp.float32(1), jnp.ones(4)) == 5
    stacked = ipu.pipeline(lambda c, b: (fun(c, b),), micro_batches=4, carry={0: 0}, reduce=("stack",))
    np.testing.assert_array_equal(stacked(jnp.float32(1), jnp.ones(4))[0], [2, 3, 4, 5])


def test_several_batches_and_arguments_by_name() -> None:
    def fun(x: jax.Array, w: jax.Array, y: jax.Array, *, scale: float) -> jax.Array:
        return scale * jnp.mean((x @ w - y) ** 2)

    run = ipu.pipeline(fun, micro_batches=2, batch_argnums=(0, 2))
    got = ipu.jit(run, device=DEVICE)(BATCH["x"], PARAMS["w"], BATCH["y"], scale=2.0)
    close(got, fun(BATCH["x"], PARAMS["w"], BATCH["y"], scale=2.0))


def test_a_batch_by_name_is_the_batch() -> None:
    w = jnp.ones((8, 8))
    x = jnp.arange(32.0).reshape(4, 8)
    split = ipu.pipeline(lambda w, batch: jnp.mean(batch @ w.T), micro_batches=4)
    assert split(w, batch=x) == split(w, x) == split(batch=x, w=w)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        split(w, x, other=x)


def test_closed_over_values_are_those_of_the_surroundings() -> None:
    def step(params: Any, batch: Any) -> Any:
        doubled = jax.tree.map(lambda x: 2 * x, params)
        return ipu.pipeline(lambda b: jax.value_and_grad(loss)(doubled, b), micro_batches=4)(batch)

    expected = jax.value_and_grad(loss)(jax.tree.map(lambda x: 2 * x, PARAMS), BATCH)
    close(ipu.jit(step, device=DEVICE)(PARAMS, BATCH), expected)


def test_training_with_accumulation_is_training_on_the_whole_batch() -> None:
    optimizer = optax.adam(1e-2)

    def train(grad: Callable[..., Any]) -> Callable[..., Any]:
        def step(params: Any, state: Any, batch: Any) -> Any:
            value, grads = grad(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return step

    ours = ipu.jit(train(ipu.pipeline(jax.value_and_grad(loss), micro_batches=4)), device=DEVICE, donate_argnums=(0, 1))
    reference = jax.jit(train(jax.value_and_grad(loss)))
    got, expected = ((jax.tree.map(jnp.asarray, PARAMS), optimizer.init(PARAMS)) for _ in range(2))
    for _ in range(5):
        *got, got_loss = ours(*got, BATCH)
        *expected, expected_loss = reference(*expected, BATCH)
        close(got_loss, expected_loss, 1e-5)


def test_gradients_of_whole_numbers_stay_without_bytes() -> None:
    def fun(n: jax.Array, x: jax.Array) -> jax.Array:
        return n * jnp.sum(x)

    run = ipu.pipeline(jax.grad(fun, allow_int=True), micro_batches=2)
    assert run(jnp.int32(2), jnp.ones(4)).dtype == jax.dtypes.float0
    assert ipu.jit(run, device=DEVICE)(jnp.int32(2), jnp.ones(4)).dtype == jax.dtypes.float0


# --- transformations around it ----------------------------------------------------------------------------------------


def test_under_vmap() -> None:
    run = ipu.pipeline(jax.value_and_grad(loss), micro_batches=4)
    many = jax.tree.map(lambda x: np.stack([x, 2 * x, -x]), PARAMS)
    expected = jax.vmap(jax.value_and_grad(loss), (0, None))(many, BATCH)
    for wrap in (jax.jit, ipu.jit):
        close(wrap(jax.vmap(run, (0, None)))(many, BATCH), expected)


def test_collectives_inside_are_those_of_the_axis_around() -> None:
    shards = jax.tree.map(lambda x: x.reshape(2, 4, -1), BATCH)

    def averaged(batch: Any) -> jax.Array:
        return lax.pmean(loss(PARAMS, batch), "replica")

    run = ipu.pipeline(averaged, micro_batches=2)
    close(jax.vmap(run, axis_name="replica")(shards), jnp.full(2, loss(PARAMS, BATCH)))


def test_in_a_loop_and_a_branch() -> None:
    run = ipu.pipeline(loss, micro_batches=4)

    def fun(params: Any, batch: Any) -> Any:
        def body(total: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
            scaled = jax.tree.map(lambda x: x * scale, params)
            return lax.cond(scale > 1, lambda: total + run(scaled, batch), lambda: total), None

        return lax.scan(body, jnp.float32(0), jnp.arange(4.0))[0]

    double, triple = (jax.tree.map(np.multiply, PARAMS, {"w": s, "b": s}) for s in map(np.float32, (2, 3)))
    expected = loss(double, BATCH) + loss(triple, BATCH)
    close(ipu.jit(fun, device=DEVICE)(PARAMS, BATCH), expected)


def test_prints_come_once_a_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    def fun(batch: jax.Array) -> jax.Array:
        jax.debug.print("{}", batch[0], ordered=True)
        return batch.sum()

    for wrap in (jax.jit, ipu.jit):
        assert wrap(ipu.pipeline(fun, micro_batches=4, reduce="sum"))(jnp.arange(8)) == 28
        jax.effects_barrier()
        assert capsys.readouterr().out.split() == ["0", "2", "4", "6"]


# --- programs ---------------------------------------------------------------------------------------------------------


def test_the_program_is_one_loop_of_any_trip_count() -> None:
    sizes = set()
    for micro_batches in (4, 512):
        rows = 4 * micro_batches
        batch = {"x": jax.ShapeDtypeStruct((rows, 5), np.float32), "y": jax.ShapeDtypeStruct((rows, 3), np.float32)}
        run = ipu.pipeline(jax.value_and_grad(loss), micro_batches=micro_batches)
        lowered = ipu.jit(run, device=DEVICE).lower(PARAMS, batch)
        (loop,) = [node for node in distinct(lowered.program) if isinstance(node, Repeat)]
        assert loop.count == micro_batches
        nodes = list(distinct(loop.body))  # before the loop, a batch may be moved once
        sizes.add((len(nodes), sum(isinstance(node, Execute) for node in nodes)))
    assert len(sizes) == 1


def test_a_pipeline_called_twice_is_traced_once() -> None:
    traces = []

    def fun(x: jax.Array) -> jax.Array:
        traces.append(x)
        return x.sum()

    run = ipu.pipeline(fun, micro_batches=2)
    run(jnp.ones(4)), run(jnp.ones(4))
    assert len(traces) == 1


# --- bad input --------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no micro-batches": ({"micro_batches": 0}, "at least 1"),
    "a bool": ({"micro_batches": True}, "got: True"),
    "half a micro-batch": ({"micro_batches": 2.5}, "got: 2.5"),
    "no such reduction": ({"reduce": "maen"}, "try: 'mean'"),
    "a reduction of None": ({"reduce": None}, "got: None"),
    "carry of no mapping": ({"carry": (1, 2)}, "path of a result"),
    "carry of a name": ({"carry": {"state": 0}}, "carry of ipu.pipeline"),
    "batch by name": ({"batch_argnums": "batch"}, "batch_argnums of ipu.pipeline"),
    "an integer accumulator": ({"accumulate_dtype": jnp.int32}, "floating-point dtype"),
    "a dtype nobody knows": ({"accumulate_dtype": "float33"}, "got: 'float33'"),
    "one stage": ({"stages": 1}, "at least 2"),
    "stages by another name": ({"stages": "automatic"}, "got: 'automatic'"),
    "device mapping": ({"device_mapping": [0, -1]}, "device_mapping of ipu.pipeline"),
    "a mapping to half an IPU": ({"device_mapping": [0, 0.5]}, "IPUs of stages, from 0\n  got: list of float, int"),
    "a schedule": ({"schedule": "gpip"}, "try: 'gpipe'"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_make_no_sense_are_refused(name: str) -> None:
    settings, match = SETTINGS[name]
    with pytest.raises(ipu.ArgumentError, match=match):
        ipu.pipeline(loss, **{"micro_batches": 2, **settings})


def test_no_function_is_refused() -> None:
    with pytest.raises(ipu.ArgumentError, match="needs a function"):
        ipu.pipeline(3, micro_batches=2)  # type: ignore[arg-type]


CALLS: dict[str, tuple[dict[str, Any], Callable[..., Any], tuple[Any, ...], str]] = {
    "a schedule without stages": (
        {"schedule": "gpipe"},
        loss,
        (PARAMS, BATCH),
        "schedule .* the function has fewer than two",
    ),
    "a mapping without stages": ({"device_mapping": [0]}, loss, (PARAMS, BATCH), "device_mapping .* is for stages"),
    "accumulators without sums": (
        {"accumulate_dtype": jnp.float32, "reduce": "stack"},
        lambda b: b * 2,
        (np.ones(4, np.float16),),
        r"accumulate_dtype .* has no effect\n.*\n.*\n.*got: float16\[2\] with 'stack'",
    ),
    "accumulators of integers": (
        {"accumulate_dtype": jnp.float32, "reduce": "sum"},
        lambda b: b.sum(),
        (np.arange(4, dtype=np.int32),),
        "accumulate_dtype .* has no effect",
    ),
    "does not divide": ({"micro_batches": 3}, loss, (PARAMS, BATCH), r"batch\['x'\].* cannot be split into 3"),
    "no first axis": ({}, lambda x: x, (np.float32(1),), "x of .* cannot be split.*\n.*\n.*\n.*float32"),
    "batch position": ({"batch_argnums": 2}, loss, (PARAMS, BATCH), "2 positional arguments: params, batch"),
    "key position": ({"rng_argnums": -3}, loss, (PARAMS, BATCH), "rng_argnums.*\n.*\n.*\n.*got: -3"),
    "two roles": ({"rng_argnums": 1}, loss, (PARAMS, BATCH), "batch .* has two roles"),
    "no key": ({"rng_argnums": 0}, loss, (PARAMS, BATCH), r"params\['b'\].* is not a key"),
    "other structure": ({"carry": {0: ()}}, loss, (PARAMS, BATCH), "params .* has another structure"),
    "other shape": ({"carry": {0: ()}}, lambda s, b: b, (np.float32(1), np.ones(4)), "another type"),
    "no such path": ({"carry": {0: "state"}}, loss, (PARAMS, BATCH), "names a result that does not exist"),
    "mean of integers": ({}, lambda b: b.sum(), (np.arange(4, dtype=np.int32),), "a result .* has no mean"),
    "sum of truths": ({"reduce": "sum"}, lambda b: b.any(), (np.ones(4, bool),), "a result .* has no sum"),
    "reductions do not fit": ({"reduce": ("mean", "sum")}, loss, (PARAMS, BATCH), "does not match its results"),
    "None for a result": ({"reduce": ("sum", None)}, lambda b: (b, b), (np.ones(4),), "does not match its results"),
    "unequal batches": (
        {},
        lambda w, batch: w * batch["x"].sum() + batch["y"].sum(),
        (np.float32(1), {"x": np.ones((8, 4)), "y": np.ones((4, 4))}),
        r"first axes of unequal size\n.*\n.*\n  got: batch\['x'\] f.*\[8,4\], batch\['y'\] f.*\[4,4\]",
    ),
    "unequal arguments": (
        {"batch_argnums": (0, 1)},
        lambda x, y: x.sum() + y.sum(),
        (np.ones(8), np.ones(4)),
        r"got: x f.*\[8\], y f.*\[4\]\n  try: .*batch_argnums=\(0, 1\) takes x, y for the batch",
    ),
    "a batch that is not last": (
        {},
        lambda batch, w: loss(w, batch),
        (BATCH, PARAMS),
        r"w\['b'\].* cannot be split(.*\n)*.*batch_argnums=0 if batch is the batch; .*=-1 takes w for the batch",
    ),
    "two arguments before the parameters": (
        {"rng_argnums": 0},
        lambda key, x, y, w: (x @ w).sum() + y.sum(),
        (jax.random.key(0), np.ones((8, 3)), np.ones(8), np.ones(3)),
        r"w of .* cannot be split(.*\n)*.*batch_argnums=\(1, 2\) if x, y is the batch;",
    ),
    "None for the batch": (
        {},
        lambda batch, w: w.sum(),
        (np.ones((8, 3)), None),
        r"batch of .* has no arrays\n(.*\n)*  got: w None\n  try: batch_argnums=0 if batch",
    ),
    "an empty batch": ({}, lambda w, b: w.sum(), (np.float32(1), {"x": None}), r"got: b {'x': None}\n"),
    "other structure in words": (
        {"carry": {0: ()}},
        lambda s, b: {"a": s["a"]},
        ({"a": np.float32(1), "b": [np.float32(1)]}, np.ones(4)),
        r"expected: {'a': \*, 'b': \[\*\]}\n  got: {'a': \*} at all of it",
    ),
    "no path in words": ({"carry": {0: "b"}}, lambda s, b: {"a": s}, (1.0, np.ones(4)), r"a path in {'a': \*}\n"),
    "nested": ({}, ipu.pipeline(loss, micro_batches=2), (PARAMS, BATCH), r"ipu.pipeline\(loss\) is inside of"),
    "nested in a loop": (
        {},
        lambda b: lax.map(lambda _: ipu.pipeline(jnp.sum, micro_batches=2)(b), jnp.arange(3)),
        (np.ones(8),),
        "is inside of",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_do_not_fit_are_refused(name: str) -> None:
    settings, fun, args, match = CALLS[name]
    run = ipu.pipeline(fun, **{"micro_batches": 2, **settings})
    for wrap in (lambda f: f, ipu.jit):
        with pytest.raises(ipu.ArgumentError, match=match) as caught:
            wrap(run)(*args)
        assert "test_pipeline_accumulation.py" in str(caught.value)


def test_an_error_of_the_function_names_the_batch_arguments() -> None:
    run = ipu.pipeline(lambda batch, w: jnp.mean(batch @ w), micro_batches=2)
    for wrap in (lambda f: f, ipu.jit):
        with pytest.raises(TypeError, match="dot_general") as caught:
            wrap(run)(np.ones((8, 4), np.float32), np.ones((4, 4), np.float32))
        (note,) = (note for note in caught.value.__notes__ if "ipu.pipeline" in note)
        assert "batch_argnums=0 if batch is the batch; batch_argnums=-1 takes w for the batch" in note


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, ipu.jit], ids=["eager", "jit", "ipu.jit"])
def test_a_derivative_through_a_pipeline_is_refused(wrap: Any) -> None:
    run = ipu.pipeline(loss, micro_batches=2)
    with pytest.raises(ipu.ArgumentError, match="differentiate inside"):
        wrap(jax.grad(run))(PARAMS, BATCH)
    with pytest.raises(ipu.ArgumentError, match="differentiate inside"):
        jax.jvp(lambda p: wrap(run)(p, BATCH), (PARAMS,), (PARAMS,))
    close(jax.grad(lambda s: s * lax.stop_gradient(run(PARAMS, BATCH)))(2.0), run(PARAMS, BATCH))
