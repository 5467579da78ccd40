"""Lowered and Compiled: their views, refusals, and profiles of calls against the steps that ran."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.passes import PASSES
from ipujax.lowering_plan import program_evaluation
from ipujax.runtime.compile import STEPS
from ipujax.runtime.graph.program import Program, RepeatWhile, Switch
from ipujax.runtime.graph.walks import distinct

DEVICE = ipu.IPUModel(tiles_per_ipu=8)
X = jnp.arange(6.0).reshape(2, 3)
PHASES = {"compute", "exchange", "global_exchange", "host_exchange", "sync", "idle"}


class State(NamedTuple):
    weights: Any
    moments: Any


def step(state: State, batch: dict[str, Any], *, rate: Any = 0.1) -> tuple[State, jax.Array]:
    def loss(w: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ w["in"])
        return ((hidden @ w["out"] - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state.weights)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state.moments, grads)
    return State(jax.tree.map(lambda w, m: w - rate * m, state.weights, moments), moments), value


def arguments() -> tuple[State, dict[str, Any]]:
    weights = {"in": jnp.linspace(-1, 1, 12).reshape(4, 3), "out": jnp.ones((3, 2))}
    return State(weights, jax.tree.map(jnp.zeros_like, weights)), {"x": jnp.ones((5, 4)), "y": jnp.zeros((5, 2))}


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def assert_trees_close(got: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)
    assert jax.tree.structure(got) == jax.tree.structure(expected)


# --- lowered ----------------------------------------------------------------------------------------------------------


def test_lowers_from_shapes_alone() -> None:
    fun = ipu.jit(step, device=DEVICE)
    from_shapes = fun.lower(*shapes(arguments()))
    from_arrays = fun.lower(*arguments())
    assert from_shapes is from_arrays  # they are one signature
    assert_trees_close(from_shapes.compile()(*arguments()), jax.jit(step)(*arguments()))


def test_a_pod_is_profiled_without_running_or_allocating() -> None:
    ran = []

    def fun(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: ran.append(1))
        return (x @ x.T).sum()

    large = jax.ShapeDtypeStruct((1 << 15, 1 << 11), jnp.float16)  # 128 MiB, its product 2 GiB
    options = ipu.Options(allow_out_of_memory=True)
    profile = ipu.jit(fun, device=ipu.IPUModel(arch="bow"), options=options).lower(large).compile().profile
    assert profile.cycles > 1e6 and not ran


def test_lowered_shows_every_stage() -> None:
    lowered = ipu.jit(lambda *args, **kwargs: jax.jit(step)(*args, **kwargs), device=DEVICE)
    lowered = lowered.lower(*arguments(), rate=0.5)
    assert "tanh" in lowered.as_text(after="trace") and "name=step" in lowered.as_text(after="trace")
    assert "tanh" in lowered.as_text(after="inline") and "name=step" not in lowered.as_text(after="inline")
    assert lowered.as_text(after="fuse") == str(lowered.jaxpr) != lowered.as_text(after="dce")
    assert "dot_general" in lowered.as_text() and lowered.as_text() != lowered.as_text(after="fuse")
    assert lowered.in_tree == jax.tree.structure((arguments(), {"rate": 0.5}))
    assert lowered.out_tree == jax.tree.structure((arguments()[0], 0))
    assert lowered.graph.target == DEVICE.target and repr(lowered).startswith("Lowered(<lambda>: ")
    with pytest.raises(
        ipu.ArgumentError,
        match=r"no pass is called 'unroll'(.|\n)*one of trace, discharge, inline, .*dce, recompute, .*outline, fuse",
    ):
        lowered.as_text(after="unroll")


def test_the_jaxpr_after_every_pass() -> None:
    def layers(x: jax.Array) -> jax.Array:
        block = jax.jit(lambda x: jnp.tanh(x) @ x + jnp.sin(x))
        return jax.lax.scan(lambda x, _: (block(block(x)), None), x, length=2)[0]

    lowered = ipu.jit(layers, device=DEVICE).lower(jax.ShapeDtypeStruct((4, 4), jnp.float32))
    for name in ("trace", *(name for name, _ in PASSES)):
        text = lowered.as_text(after=name)
        assert "{ lambda" in text and "tanh" in text and "dot_general" in text, name
    for wrong, near in (("inlin", "inline"), ("DCE", "dce")):
        with pytest.raises(ipu.ArgumentError, match=rf"no pass is called '{wrong}'(.|\n)*try: '{near}', the nearest"):
            lowered.as_text(after=wrong)


def test_arguments_are_named_as_the_user_writes_them() -> None:
    text = ipu.jit(step, device=DEVICE).lower(*arguments(), rate=0.5).as_text()
    for name in ("state.weights['in']", "state.moments['out']", "batch['x']", "rate"):
        assert name in text
    text = ipu.jit(lambda a, n, *rest: (a, *rest), device=DEVICE, static_argnums=1).lower(X, 3, X, X).as_text()
    assert all(name in text for name in ('"a"', '"rest[0]"', '"rest[1]"'))


def test_timings_name_every_pass() -> None:
    lowered = ipu.jit(step, device=DEVICE).lower(*arguments())
    assert list(lowered.timings) == ["trace", *(name for name, _ in PASSES), "lower"]
    timings = lowered.compile().timings
    assert list(timings) == [*lowered.timings, *STEPS]
    assert all(seconds >= 0 for seconds in timings.values())
    with pytest.raises(TypeError):
        timings["trace"] = 0.0  # type: ignore[index]


# --- compiled ---------------------------------------------------------------------------------------------------------


def test_compiled_is_cached_and_callable() -> None:
    lowered = ipu.jit(step, device=DEVICE).lower(*arguments())
    compiled = lowered.compile()
    assert lowered.compile() is compiled and compiled.profile is compiled.profile
    assert_trees_close(compiled(*arguments()), jax.jit(step)(*arguments()))
    assert repr(compiled).startswith("Compiled(step: ")


def test_compiled_knows_its_device() -> None:
    """Called elsewhere, it is still compiled for the device it was lowered for."""
    fun = ipu.jit(lambda x: x * 2)
    with ipu.default_device(DEVICE):
        compiled = fun.lower(jnp.ones((500, 600))).compile()
    with ipu.default_device(ipu.IPUModel(tiles_per_ipu=1)):
        assert float(compiled(jnp.ones((500, 600))).sum()) == 6e5
        with pytest.raises(ipu.TileMemoryError):
            fun(jnp.ones((500, 600)))
    assert compiled.profile.memory.tile_bytes.shape == (8,)


def test_compiled_has_its_static_arguments_in_it() -> None:
    compiled = ipu.jit(lambda x, n: x * n, device=DEVICE, static_argnums=1).lower(X, 3).compile()
    np.testing.assert_array_equal(compiled(X), X * 3)
    np.testing.assert_array_equal(compiled.profile_call(X)[0], X * 3)
    with pytest.raises(ipu.ArgumentError, match="leave static arguments out"):
        compiled(X, 4)


def test_compiled_donates_as_jit() -> None:
    compiled = ipu.jit(step, device=DEVICE, donate_argnums=0).lower(*arguments()).compile()
    (state, batch) = arguments()
    (new, _) = jax.jit(step)(*arguments())
    got, _ = compiled(state, batch)
    assert_trees_close(got, new)
    assert all(x.is_deleted() for x in jax.tree.leaves(state)) and not batch["x"].is_deleted()


@pytest.mark.parametrize("method", ["__call__", "profile_call"])
def test_compiled_refuses_other_arguments(method: str) -> None:
    call = getattr(ipu.jit(step, device=DEVICE).lower(*arguments()).compile(), method)
    state, batch = arguments()
    wrong = [
        ((state, batch | {"x": jnp.ones((6, 4))}), {}, r"t batch\['x'\](.|\n)*: float32\[5,4\](.|\n)*\[6,4\]"),
        ((state, batch | {"y": jnp.zeros((5, 2), int)}), {}, r"batch\['y'\](.|\n)*float32\[5,2\](.|\n)*int32\[5,2\]"),
        ((state._replace(moments=None), batch), {}, r"structure of its argument state.moments(.|\n)*got: None"),
        ((state, batch), {"rate": 0.1}, r"expected: \(state, batch\)\n  got: \(State, dict, rate=float32\[\]\)"),
        ((state,), {}, r"another structure of its arguments(.|\n)*got: \(State\)(.|\n)*leave static arguments out"),
    ]
    for args, kwargs, text in wrong:
        with pytest.raises(ipu.ArgumentError, match=rf"step was compiled for (.|\n)*{text}(.|\n)*call the ipu.jit"):
            call(*args, **kwargs)
    with pytest.raises(ipu.ArgumentError, match="step is compiled: transformations of JAX"):
        jax.grad(lambda x: call(state, batch | {"x": x})[1])(batch["x"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    size: int = dataclasses.field(default=2, metadata={"static": True})


EIGHT = "keys 0, 1, 2, 3, 4, 5, 6, 7, …"
# What was compiled for, what is given, and the place and words of the first difference.
STRUCTURES: dict[str, tuple[Any, Any, str, str, str]] = {
    "missing": ({"w": X, "b": X}, {"w": X}, "p", "a dict with keys 'b', 'w'", "a dict without key 'b'"),
    "extra": ({"w": X}, {"w": X, "b": X, "a": X}, "p", "a dict with key 'w'", "a dict with keys 'a', 'b'"),
    "renamed": ({"w": X}, {"v": X}, "p", "a dict with key 'w'", "a dict without key 'w' and with key 'v'"),
    "many": (
        dict.fromkeys(range(20), X),
        {},
        "p",
        f"a dict with {EIGHT} (20 in all)",
        f"a dict without {EIGHT} (20 in all)",
    ),
    "list": ([X, [X, X]], [X, (X, X)], "p[1]", "a list of 2", "a tuple of 2"),
    "longer": ({"k": (X,)}, {"k": (X, X)}, "p['k']", "a tuple of 1", "a tuple of 2"),
    "named tuple": ([State(X, X)], [(X, X)], "p[0]", "a State", "a tuple of 2"),
    "none": ({"k": [None, X]}, {"k": [X, X]}, "p['k'][0]", "None", "float32[2,3]"),
    "no leaf": (State(X, X), State(X, [X]), "p.moments", "an array", "a list of 1"),
    "static field": (Layer(X, 3), Layer(X, 4), "p", "a Layer with (3,)", "a Layer with (4,)"),
    "inside a class": ([Layer(X)], [Layer({"a": X})], "p[0].w", "an array", "a dict with key 'a'"),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_first_difference_between_structures_is_named(name: str) -> None:
    compiled_for, inputs, place, expected, got = STRUCTURES[name]
    compiled = ipu.jit(lambda x, p, k=None: x, device=DEVICE).lower(X, compiled_for, k=compiled_for).compile()
    for args, kwargs in (((X, inputs), {"k": compiled_for}), ((X, compiled_for), {"k": inputs})):
        with pytest.raises(ipu.ArgumentError) as caught:
            compiled(*args, **kwargs)
        where = place if args[1] is inputs else "k" + place[1:]
        assert caught.value.what == f"<lambda> was compiled for another structure of its argument {where}"
        assert (caught.value.expected, caught.value.got) == (expected, got)
    np.testing.assert_array_equal(compiled(X, compiled_for, k=compiled_for), X)


def test_compiled_takes_numpy_and_numbers() -> None:
    compiled = ipu.jit(lambda x, n: x * n, device=DEVICE).lower(X, jnp.float32(2)).compile()
    np.testing.assert_array_equal(compiled(np.asarray(X), 3.0), X * 3)


# --- static profiles --------------------------------------------------------------------------------------------------


def test_costs_add_up() -> None:
    compiled = ipu.jit(step, device=DEVICE).lower(*arguments()).compile()
    profile = compiled.profile
    costs = compiled.cost_analysis()
    assert set(profile.phase_cycles) == PHASES
    assert sum(profile.phase_cycles.values()) == profile.cycles > 0
    assert costs["cycles"] == profile.cycles == sum(costs[f"{phase}_cycles"] for phase in PHASES)
    assert costs["seconds"] == pytest.approx(profile.cycles / DEVICE.target.clock_hz)
    assert all(isinstance(value, float) for value in costs.values())
    memory = compiled.memory_analysis()
    assert memory.max_tile_bytes == memory.tile_bytes.max() <= DEVICE.target.bytes_per_tile
    assert sum(layer.sum() for layer in memory.by_category.values()) == memory.tile_bytes.sum()


def test_profile_names_the_users_lines() -> None:
    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        h = x @ w
        h = jax.nn.gelu(h)
        return jax.nn.softmax(h)

    first = inspect.getsourcelines(fun)[1]
    profile = ipu.jit(fun, device=DEVICE).lower(jnp.ones((64, 64)), jnp.ones((64, 64))).compile().profile
    lines = {op.origin.line for op in profile.operations() if op.origin.line}
    assert lines == {f"test_stages.py:{first + n} (fun)" for n in (1, 2, 3)}


WHOLLY_OF_LIBRARIES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "softmax": (jax.nn.softmax, (X,)),
    "sort": (jnp.sort, (X,)),
    "gradient": (jax.grad(jax.nn.logsumexp), (X,)),
    "inverse": (jnp.linalg.inv, (np.eye(3, dtype=np.float32) + 1,)),
    "optimizer": (optax.adam(0.1).update, (X, optax.adam(0.1).init(X))),
}


@pytest.mark.parametrize("name", WHOLLY_OF_LIBRARIES)
def test_library_functions_belong_to_the_line_that_compiled_them(name: str, caplog: pytest.LogCaptureFixture) -> None:
    fun, args = WHOLLY_OF_LIBRARIES[name]
    jitted = ipu.jit(fun, device=DEVICE)
    place = f"test_stages.py:{inspect.currentframe().f_lineno - 1} ("  # type: ignore[union-attr]
    with caplog.at_level(logging.INFO, "ipujax"):
        lowered = jitted.lower(*args)
    profile = lowered.compile().profile
    lines = {op.origin.line for op in profile.operations() if op.origin.line}
    lines |= {variable.origin.line for variable in lowered.graph.variables if variable.origin.line}
    assert len(lines) == 1 and lines.pop().startswith(place)
    assert bool(profile.fallbacks) == (name == "inverse")
    output = [record.getMessage() for record in caplog.records if "tile-parallel" in record.getMessage()]
    assert {message.split()[0] for message in output} == ({"lu"} if profile.fallbacks else set())
    assert all(place in message for message in output)


def test_library_functions_inside_the_users_keep_his_lines() -> None:
    def fun(x: jax.Array) -> jax.Array:
        x = jnp.linalg.inv(x)
        return jax.nn.softmax(x)

    first = inspect.getsourcelines(fun)[1]
    operations = ipu.jit(fun, device=DEVICE).lower(jnp.eye(3)).compile().profile.operations()
    lines = {op.origin.line for op in operations if op.origin.line}
    assert lines == {f"test_stages.py:{first + n} (fun)" for n in (1, 2)}


def test_lines_of_libraries_unfold_a_line_of_the_user() -> None:
    optimizer = optax.adam(0.1)

    def step(params: jax.Array, state: Any) -> Any:
        grads = jnp.cumsum(params, 1)
        return optimizer.update(grads, state)

    first = inspect.getsourcelines(step)[1]
    user, calling = (f"test_stages.py:{first + n} (step)" for n in (1, 2))
    profile = ipu.jit(step, device=DEVICE).lower(X, optimizer.init(X)).compile().profile
    own, unfolded = ({op.origin.line: op.cycles for op in profile.operations(lines=of)} for of in ("user", "library"))
    inside = {line: cycles for line, cycles in unfolded.items() if line.endswith(f", from {calling}")}
    assert own[user] == unfolded[user] and calling not in unfolded
    assert len(inside) > 1 and sum(inside.values()) == own[calling]
    assert any(line.startswith("transform.py:") for line in inside)
    assert max(inside, key=inside.__getitem__) in profile.summary(lines="library")
    assert calling in profile.summary() and ", from" not in profile.summary()
    for ask in (profile.summary, profile.operations):
        with pytest.raises(ipu.ArgumentError, match="expected: 'user' or 'library'\n  got: 'libraries'"):
            ask(lines="libraries")


def test_profile_shows_named_scopes() -> None:
    def fun(x: jax.Array) -> jax.Array:
        with jax.named_scope("encoder"), jax.named_scope("dense"):
            x = jnp.tanh(x)
        with jax.named_scope("head"):
            return x.sum()

    compiled = ipu.jit(jax.value_and_grad(fun), device=DEVICE).lower(X).compile()
    layers = {(row.layer, row.part) for row in compiled.profile.layers}
    for layer in ("encoder/dense", "head"):
        assert (layer, "forward") in layers, layers
    assert any(part == "backward" for _, part in layers), layers


def test_donated_arguments_stay_on_the_device() -> None:
    def host(**settings: Any) -> int:
        compiled = ipu.jit(step, device=DEVICE, **settings).lower(*arguments()).compile()
        return compiled.profile.phase_cycles["host_exchange"]

    assert 0 < host(donate_argnums=0) < host()


def test_reports_are_json() -> None:
    profile = ipu.jit(step, device=DEVICE).lower(*arguments()).compile().profile
    for report in (profile.graph(), profile.execution()):
        assert json.loads(json.dumps(report)) == report


# --- profiles of calls ------------------------------------------------------------------------------------------------


def collatz(n: jax.Array) -> jax.Array:
    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        n, count = state
        return lax.cond(n % 2 == 0, lambda: n // 2, lambda: 3 * n + 1), count + 1

    return lax.while_loop(lambda state: state[0] != 1, body, (n, 0))[1]


def collatz_in_python(n: int) -> list[int]:
    """The branch of each turn: 1 where the number is even."""
    turns = []
    while n != 1:
        turns.append(int(n % 2 == 0))
        n = n // 2 if n % 2 == 0 else 3 * n + 1
    return turns


def nodes(compiled: ipu.Compiled, kind: type[Program]) -> list[Program]:
    return [node for node in distinct(compiled.executable.program) if isinstance(node, kind)]


@pytest.mark.parametrize("n", [1, 2, 6, 7])
def test_recorded_trips_and_branches(n: int) -> None:
    compiled = ipu.jit(collatz, device=DEVICE).lower(jnp.int32(3)).compile()
    [loop] = nodes(compiled, RepeatWhile)
    [branch] = nodes(compiled, Switch)
    turns = collatz_in_python(n)
    count, profile = compiled.profile_call(jnp.int32(n))
    assert int(count) == len(turns)
    assert profile.recording is not None
    assert list(profile.recording[loop]) == [len(turns)]
    assert list(profile.recording.get(branch, [])) == turns
    assert sum(profile.phase_cycles.values()) == profile.cycles


def test_each_trip_costs_the_same_and_as_the_options_say() -> None:
    def fun(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda s: s[1] < x[0], lambda s: (jnp.sin(s[0]), s[1] + 1), (x, 0.0))[0]

    line = inspect.getsourcelines(fun)[1] + 1
    compiled = ipu.jit(fun, device=DEVICE).lower(jnp.ones(3)).compile()
    text = rf"trip count of loop 'test_stages.py:{line} \(fun\)' is data(.|\n)*'while\[0\]'(.|\n)*or profile a call"
    for ask in (lambda: compiled.profile.cycles, compiled.cost_analysis, compiled.profile.execution):
        with pytest.raises(ipu.ProfileError, match=text):
            ask()
    assert compiled.memory_analysis().max_tile_bytes > 0  # needs no trip count
    cycles = [compiled.profile_call(jnp.full(3, float(n)))[1].cycles for n in range(4)]
    assert np.diff(cycles).min() == np.diff(cycles).max() > 0
    for n in (0, 3):
        options = ipu.Options(trip_counts={"while[0]": n})
        assert ipu.jit(fun, device=DEVICE, options=options).lower(jnp.ones(3)).compile().profile.cycles == cycles[n]


def test_trip_counts_that_differ_between_iterations() -> None:
    def fun(counts: jax.Array) -> jax.Array:
        def turn(total: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
            got = lax.while_loop(lambda i: i < n, lambda i: i + 1, 0)
            return total + got, got

        return lax.scan(turn, 0, counts)

    counts = jnp.array([3, 0, 5, 1])
    compiled = ipu.jit(fun, device=DEVICE).lower(counts).compile()
    (total, each), profile = compiled.profile_call(counts)
    assert int(total) == 9 and each.tolist() == counts.tolist()
    [loop] = nodes(compiled, RepeatWhile)
    assert profile.recording is not None and list(profile.recording[loop]) == counts.tolist()
    reordered = compiled.profile_call(counts[::-1])[1]
    assert profile.cycles == reordered.cycles < compiled.profile_call(counts + 1)[1].cycles


def test_branches_cost_the_branch_that_runs() -> None:
    def fun(case: jax.Array, x: jax.Array) -> jax.Array:
        branches = [lambda x: x, lambda x: jnp.sin(x) @ x, lambda x: jnp.cos(x) @ x @ x @ x]
        return lax.switch(case, branches, x)

    x = jnp.ones((16, 16))
    compiled = ipu.jit(fun, device=DEVICE).lower(0, x).compile()
    [switch] = nodes(compiled, Switch)
    calls = [compiled.profile_call(case, x)[1] for case in (-5, 0, 1, 2, 9)]
    assert [list(p.recording[switch]) for p in calls if p.recording] == [[0], [0], [1], [2], [2]]
    clamped, none, some, much, beyond = (p.cycles for p in calls)
    assert clamped == none < some < much == beyond
    assert compiled.profile.cycles == much  # a static profile takes the dearest branch


def test_calls_and_profiles_of_calls_trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[bool] = []
    original = program_evaluation.engine_function

    def counting(*args: Any, log: Any, **kwargs: Any) -> Any:
        traces.append(log is not None)
        return original(*args, log=log, **kwargs)

    monkeypatch.setattr(program_evaluation, "engine_function", counting)
    compiled = ipu.jit(collatz, device=DEVICE).lower(jnp.int32(3)).compile()
    profiles = []
    for n in (6, 7, 6):
        assert int(compiled(jnp.int32(n))) == len(collatz_in_python(n))
        profiles.append(compiled.profile_call(jnp.int32(n))[1])
    assert sorted(traces) == [False, True]
    [loop] = nodes(compiled, RepeatWhile)
    recorded = [list(profile.recording[loop]) for profile in profiles if profile.recording]
    assert recorded == [[len(collatz_in_python(n))] for n in (6, 7, 6)]
    assert profiles[0].cycles == profiles[2].cycles < profiles[1].cycles


def test_more_decisions_than_the_host_takes_at_once() -> None:
    def step(state: Any) -> Any:
        n, x = state
        return n - 1, jax.lax.cond(n % 3 == 0, lambda x: x + 1, lambda x: x * 0.5, x)

    def loop(n: jax.Array) -> Any:
        return jax.lax.while_loop(lambda state: state[0] > 0, step, (n, jnp.float32(0)))

    count = 10_000
    compiled = ipu.jit(loop, device=DEVICE).lower(jnp.int32(3)).compile()
    _, profile = compiled.profile_call(jnp.int32(count))
    [while_node] = nodes(compiled, RepeatWhile)
    [branch] = nodes(compiled, Switch)
    assert profile.recording is not None
    assert list(profile.recording[while_node]) == [count]
    assert list(profile.recording[branch]) == [int(n % 3 == 0) for n in range(count, 0, -1)]


def test_profiles_of_calls_in_two_threads_keep_apart() -> None:
    compiled = ipu.jit(collatz, device=DEVICE).lower(jnp.int32(3)).compile()
    [loop] = nodes(compiled, RepeatWhile)
    numbers = [2, 7, 6, 9] * 3
    with ThreadPoolExecutor(4) as pool:
        profiles = list(pool.map(lambda n: compiled.profile_call(jnp.int32(n))[1], numbers))
    trips = [list(profile.recording[loop]) for profile in profiles if profile.recording]
    assert trips == [[len(collatz_in_python(n))] for n in numbers]


def test_profile_call_keeps_donated_arguments_and_changes_no_profile() -> None:
    compiled = ipu.jit(step, device=DEVICE, donate_argnums=0).lower(*arguments()).compile()
    before = compiled.profile.summary()
    (state, batch) = arguments()
    outs, profile = compiled.profile_call(state, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, batch)))
    assert_trees_close(outs, jax.jit(step)(*arguments()))
    assert profile.cycles == compiled.profile.cycles and compiled.profile.summary() == before
    assert profile.summary() == before


def test_profile_call_of_an_error_in_a_callback() -> None:
    def fail(_: Any) -> Any:
        raise ValueError("mine")

    def fun(x: jax.Array) -> jax.Array:
        return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    fun_ipu = ipu.jit(fun, device=DEVICE)
    with pytest.raises(Exception, match="mine"):
        jax.block_until_ready(fun_ipu(X))
    with pytest.raises(Exception, match="mine"):
        fun_ipu.lower(X).compile().profile_call(X)


def test_stages_have_the_attributes_of_jax_stages() -> None:
    def fun(x: Any, n: int, *, y: Any) -> Any:
        return {"a": x * n + y, "b": (x > 1,)}

    settings: Any = {"static_argnums": 1, "donate_argnums": 0}
    traced, expected = (jit(fun, **settings).trace(jnp.ones(3), 2, y=3.0) for jit in (ipu.jit, jax.jit))
    pairs = [(traced, expected), (traced.lower(), expected.lower())]
    pairs.append((pairs[1][0].compile(), pairs[1][1].compile()))
    for ours, theirs in pairs:
        for name in ("args_info", "in_tree", "out_tree", "in_avals", "donate_argnums"):
            assert getattr(ours, name) == getattr(theirs, name), (ours, name)
        shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), each.out_info) for each in (ours, theirs)]
        assert shapes[0] == shapes[1]
        for name in (name for name in dir(theirs) if not name.startswith("_")):
            try:
                getattr(ours, name)
            except ipu.ArgumentError as error:
                assert isinstance(error, AttributeError) and error.what.startswith(f"{name} ")
    assert str(traced.out_avals) == str(expected.out_avals)
    lowered = pairs[1][0]
    compiled = pairs[2][0]
    assert lowered.cost_analysis() == compiled.cost_analysis() and compiled.as_text() == lowered.as_text()
    assert compiled.runtime_executable() is compiled.executable
    np.testing.assert_array_equal(traced(jnp.ones(3), y=3.0)["a"], [5, 5, 5])
    with pytest.raises(ipu.ArgumentError, match=r"compiler_ir of jax.stages.Lowered does not(.|\n)*try: lowered.jaxpr"):
        lowered.compiler_ir()
    with pytest.raises(AttributeError, match="no attribute 'input'"):
        _ = compiled.input
    with pytest.raises(ipu.ArgumentError, match=r"Lowered.as_text cannot be called like this(.|\n)*after"):
        lowered.as_text(dialect="hlo")
    exported = jax.export.export(ipu.jit(jnp.sin))(jnp.ones(3))
    np.testing.assert_array_equal(exported.call(jnp.ones(3)), jnp.sin(jnp.ones(3)))
