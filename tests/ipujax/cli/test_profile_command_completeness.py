"""`ipujax profile` leaves nothing out: each computation that XLA runs is counted, with what its own calls took."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import export
from jax.experimental import checkify, io_callback
from jax.experimental.ode import odeint
from jax.scipy.optimize import minimize
from jax.scipy.sparse.linalg import cg

import ipujax as ipu
from ipujax.cli import main
from ipujax.lowering.jax_compat import Primitive, mlir

Capture = pytest.CaptureFixture[str]
DEVICE = ipu.IPUModel(tiles_per_ipu=16)
X = jnp.linspace(0.0, 1.0, 16).reshape(4, 4)


def step(x: Any) -> Any:
    return jnp.tanh(x @ x)


jitted = jax.jit(step)
exported = export.deserialize(export.export(jitted)(jax.ShapeDtypeStruct((4, 4), jnp.float32)).serialize())
donating = jax.jit(lambda x: jax.lax.while_loop(lambda x: x.sum() < 50, lambda x: x + 1, x), donate_argnums=0)


@jax.jit
def printing(x: Any) -> Any:
    jax.debug.print("sum {}", x.sum())
    return x + 1


# What runs, by name: some in C++, some in Python, some before a gradient, some ahead of time.
RUNS: dict[str, Any] = {
    "jit": lambda: [jitted(X) for _ in range(3)],
    "operations": lambda: ((X + 1) * 2)[1],
    "gradient": lambda: [jax.grad(lambda x: jitted(x).sum())(X) for _ in range(2)],
    "gradient of operations": lambda: jax.grad(lambda x: (jnp.sin(x) ** 2).sum())(X),
    "vmap": lambda: [jax.vmap(jitted)(X[None]) for _ in range(2)],
    "scan": lambda: jax.lax.scan(lambda c, _: (c @ c, None), X, None, length=3),
    "fresh loops": lambda: [jax.lax.while_loop(lambda c: c.sum() < 50, lambda c: c + 1, X) for _ in range(3)],
    "ahead of time": lambda: [jitted.lower(X).compile()(X) for _ in range(2)],
    "exported": lambda: [exported.call(X) for _ in range(3)],
    "donated": lambda: [donating(X + n) for n in range(3)],
    "prints": lambda: [printing(X) for _ in range(3)],
    "pmap": lambda: jax.pmap(step)(X[None]),
    "random": lambda: jax.random.normal(jax.random.key(0), (4,)),
    "odeint": lambda: odeint(lambda y, t: -y, jnp.ones(3), jnp.linspace(0.0, 1.0, 4)),
    "minimize": lambda: minimize(lambda x: ((x - 1) ** 2).sum(), jnp.zeros(3), method="BFGS"),
    "cg": lambda: cg(X @ X.T + jnp.eye(4), jnp.ones(4)),
}


def executed(run: Any, tmp_path: Path) -> Counter[str]:
    """Names of the modules that XLA runs, by JAX's own trace of the host."""
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(run())
    (path,) = tmp_path.rglob("*.xplane.pb")
    names: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name.endswith("::ExecuteHelperOnSingleDevice"):
                    names[event.name] += 1
    return names


@pytest.mark.parametrize("name", RUNS)
def test_profile_command_counts_each_computation_that_xla_runs(name: str, tmp_path: Path) -> None:
    RUNS[name]()  # compiled: what compiling computes itself is no part of the run
    right = executed(RUNS[name], tmp_path).total()
    with ipu.profiling(DEVICE, only="nothing") as profiled:
        jax.block_until_ready(RUNS[name]())
    counted = sum(row.calls for row in profiled.functions) + sum(row.operations for row in profiled.operations)
    assert counted == right > 0


def test_profile_command_finds_functions_wherever_they_were_jitted() -> None:
    def hidden() -> Any:
        local = jax.jit(step)
        holder = {"deep": [local]}
        local(X)
        return lambda: holder["deep"][0](X)

    call = hidden()
    with ipu.profiling(DEVICE) as run:
        call()
    (row,) = run.functions
    assert (row.name, row.calls) == ("step", 1) and row.total_cycles == row.profile.cycles  # type: ignore[union-attr]


class Scale:
    def __call__(self, x: Any) -> Any:
        return jnp.tanh(x @ x)


def test_profile_command_names_functions_that_jax_does_not() -> None:
    scale = jax.jit(Scale())
    mapped = jax.pmap(step)
    with ipu.profiling(DEVICE, every=True) as run:
        scale(X)
        scale(X)
        mapped(X[None])
    rows = {row.name: row.calls for row in run.functions}
    assert rows["__call__"] == 2 and rows["step"] == 1
    assert not any("Scale" in row.line or "scale" in row.line for row in run.operations)
    assert sum(row.calls for row in run.functions if row.profile is not None) == 3


def test_profile_command_has_a_row_for_a_function_that_jax_wraps() -> None:
    def positive(x: Any) -> Any:
        checkify.check((x >= 0).all(), "negative")
        return x + 1

    checked = jax.jit(checkify.checkify(positive))
    with ipu.profiling(DEVICE, every=True) as run:
        for _ in range(2):
            checked(X)
    assert [(row.name, row.calls) for row in run.functions] == [("positive", 2)]
    assert not run.operations


def test_profile_command_names_the_layer_where_one_line_calls_a_library() -> None:
    layers = [keras.layers.Dense(n, name=name) for name, n in (("narrow", 8), ("wide", 512), ("head", 2))]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile("sgd", "mse")
    with ipu.profiling(DEVICE) as run:
        model.fit(np.ones((32, 64)), np.ones((32, 2)), batch_size=32, verbose=0)
    (cells,) = (line for line in str(run).splitlines() if line.startswith("  train_step "))
    assert f"{Path(__file__).name}:" in cells and cells.endswith("most in layer wide")


# Functions with loops and branches on data, with arguments of some calls.
SOLVERS: dict[str, tuple[Any, list[tuple[Any, ...]]]] = {
    "bounded loop": (
        lambda x: jax.lax.scan(
            lambda s, _: (jax.lax.cond(s[1] < 2, lambda x, i: (jnp.tanh(x @ x), i + 1), lambda x, i: (x, i), *s), None),
            (x, 0),
            None,
            length=64,
        )[0],
        [(X,)],
    ),
    "trip counts": (
        lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ x), x),
        [(X, n) for n in (1, 90, 90, 5)],
    ),
    "convergence": (
        lambda a: jax.lax.while_loop(
            lambda s: jnp.abs(s[0] * s[0] - s[1]).max() > 1e-4, lambda s: ((s[0] + s[1] / s[0]) / 2, s[1]), (a + 1, a)
        )[0],
        [(X + n,) for n in (0, 10, 1000)],
    ),
    "switch": (
        lambda i, x: jax.lax.switch(i, [lambda x: x, lambda x: x @ x @ x @ x, lambda x: jnp.sort(x)], x),
        [(i, X) for i in (0, 0, 1, 2)],
    ),
    "prints": (
        lambda x, n: jax.lax.while_loop(
            lambda s: s[0] < n, lambda s: (s[0] + 1, (jax.debug.print("{}", s[1].sum()), s[1] + 1)[1]), (0, x)
        ),
        [(X, n) for n in (2, 9)],
    ),
    "host": (
        lambda x, n: jax.lax.while_loop(
            lambda s: s[0] < n,
            lambda s: (s[0] + 1, jax.pure_callback(np.negative, jax.ShapeDtypeStruct((4, 4), jnp.float32), s[1])),
            (0, x),
        ),
        [(X, n) for n in (2, 7)],
    ),
}


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("donates", [False, True])
def test_profile_command_has_the_cycles_of_each_call(name: str, donates: bool, capfd: Capture) -> None:
    fun, calls = SOLVERS[name]
    donated = (0 if name != "switch" else 1,) if donates else ()
    solver = jax.jit(fun, donate_argnums=donated)

    def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x.copy() if isinstance(x, jax.Array) else x for x in args)

    with ipu.profiling(DEVICE) as run:
        for args in calls:
            solver(*copied(args))
    printed = capfd.readouterr().out
    row = next(each for each in run.functions if each.calls == len(calls))
    assert capfd.readouterr().out == "" and (name == "prints") == bool(printed)
    compiled = ipu.jit(fun, device=DEVICE, donate_argnums=donated).lower(*calls[0]).compile()
    right = sum(compiled.profile_call(*args)[1].cycles for args in calls)
    assert row.total_cycles == pytest.approx(right, rel=0.01) and row.sampled_calls == len(calls)
    if name in ("bounded loop", "switch"):
        assert row.worst_cycles == compiled.profile.cycles > row.cycles
        assert "worst case" in str(run)


def test_profile_command_says_which_calls_it_could_not_run_again() -> None:
    def asked(x: Any) -> Any:
        flag = io_callback(lambda: np.bool_(True), jax.ShapeDtypeStruct((), bool))
        return jax.lax.cond(flag, lambda x: x @ x @ x, lambda x: x, x)

    many = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ x), x))
    with ipu.profiling(DEVICE) as run:
        jax.jit(asked)(X)
        for n in range(100):
            many(X, n)
    rows = {row.name: row for row in run.functions}
    assert rows["asked"].unrecorded and rows["asked"].total_cycles > 0
    assert rows["<lambda>"].calls == 100 and (rows["<lambda>"].sampled_calls or 0) < 100
    table = str(run)
    assert "asked: each branch on data is the dearest" in table and "of 100 calls were run again" in table
    compiled = ipu.jit(many, device=DEVICE).lower(X, 1).compile()
    right = sum(compiled.profile_call(X, n)[1].cycles for n in range(100))
    assert rows["<lambda>"].total_cycles == pytest.approx(right, rel=0.05)


def test_profile_command_counts_calls_of_the_host() -> None:
    """Their transfers decide which functions are compiled."""

    def called(x: Any) -> Any:
        return jax.pure_callback(np.sin, x, x, vmap_method="sequential")

    with ipu.profiling(DEVICE, every=True) as run:
        jax.jit(lambda x: jax.lax.scan(lambda _, row: (None, called(row)), None, x)[1])(X)
    (row,) = run.functions
    assert row.estimated_cycles == pytest.approx(row.total_cycles, rel=0.1)


def test_profile_command_sees_through_primitives_of_libraries() -> None:
    """A primitive whose implementation is JAX code has its control flow, its calls of the host, and its cycles."""

    def solve(x: Any) -> Any:
        def refuse(x: Any) -> Any:
            return jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct((4, 4), jnp.float32), x)

        return jax.lax.cond(jnp.isnan(x).any(), refuse, lambda x: x @ x @ x, x)

    primitive = Primitive("solve")
    primitive.def_impl(solve)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(solve, multiple_results=False))
    with ipu.profiling(DEVICE) as run:
        jax.jit(lambda x: primitive.bind(x) + 1)(X)
        jax.jit(lambda x: solve(x) + 1)(X)
    hidden, plain = run.functions
    assert hidden.estimated_cycles == plain.estimated_cycles
    assert hidden.sampled_calls == plain.sampled_calls == 1
    assert hidden.total_cycles == pytest.approx(plain.total_cycles, rel=0.01)
    assert hidden.worst_cycles is not None and hidden.worst_cycles > hidden.cycles


def test_profile_command_has_the_programs_of_calls_that_fail() -> None:
    def fail(_: Any) -> Any:
        raise ValueError("no roots")

    @jax.jit
    def root(x: Any) -> Any:
        x = jax.lax.while_loop(lambda x: x.sum() < 50, lambda x: x + 1, x)
        return jax.pure_callback(fail, jax.ShapeDtypeStruct((4, 4), jnp.float32), x)

    with ipu.profiling(DEVICE) as run, pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(root(X))
    (row,) = run.functions
    assert row.profile is not None and row.profile.memory.max_tile_bytes > 0
    assert "no roots" in row.unrecorded and "trip counts are unknown, for no call was run again: its run" in str(run)


def test_profile_command_leaves_out_small_functions_that_choose() -> None:
    """Their dearest branches have less than the share that is listed; a trip count may be any number."""
    large = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda _, x: jnp.tanh(x @ x), x))
    choosing = jax.jit(lambda x: jax.lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: x, x))
    looping = jax.jit(lambda x: jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: x @ x, x))
    with ipu.profiling(DEVICE) as run:
        for fun in (large, choosing, looping):
            fun(X)
    reasons = {bool(row.reason): row.reason for row in run.functions}
    assert [row.profile is None for row in run.functions] == [False, False, True]
    assert re.fullmatch(r"at most 0\.\d % of the run's cycles", reasons[True])


def written(tmp_path: Path, source: str) -> str:
    path = tmp_path / "plain.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return str(path)


# Scripts whose dearest functions have no floating-point operations, or few.
ORDERED = """
    import jax, jax.numpy as jnp
    board, table = jnp.ones((256, 256), jnp.int32), jnp.ones((512, 64))
    rows = jnp.arange(4096) % 512
    {functions}
    for _ in range(3):
        {calls}
"""
FUNCTIONS = {
    "whole": ("lambda x: (jnp.roll(x, 1, 0) + jnp.roll(x, 1, 1)) % 7", "board"),
    "sort": ("lambda x: jnp.sort(x.ravel())", "board"),
    "gather": ("lambda t, i: t[i]", "table, rows"),
    "scatter": ("lambda t, i: t.at[i % 97].add(1.0)", "table, rows"),
    "move": ("lambda x: x.T.reshape(-1)", "board"),
    "product": ("lambda t: t @ t.T", "table"),
    "small": ("lambda t: t[:4, :4] + 1", "table[:4]"),
    "loop": ("lambda t: jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), t[:64, :64], None, length=200)[0]", "table"),
    "bits": ("lambda x: jax.lax.population_count(x ^ (x >> 3)).sum()", "board"),
    "cumulative": ("lambda x: jnp.cumsum(x, 0)", "board"),
}


def test_profile_command_orders_functions_by_cycles(tmp_path: Path, capsys: Capture) -> None:
    definitions = "\n    ".join(f"{name} = jax.jit({code}); {name}_ = 0" for name, (code, _) in FUNCTIONS.items())
    named = definitions.replace("jax.jit(lambda", "jax.jit(lambda")
    calls = "\n        ".join(f"{name}({args})" for name, (_, args) in FUNCTIONS.items())
    script = written(tmp_path, ORDERED.format(functions=named, calls=calls))

    def cycles(*options: str) -> list[int]:
        assert main(["profile", *options, script]) == 0
        table = capsys.readouterr().err.partition("Computed by")[0].partition("JAX, one")[0]
        return [int(row[1].replace(",", "")) for row in re.findall(r"^  (.*?)  +3  +([\d,]+)", table, re.MULTILINE)]

    chosen, every = cycles(), cycles("--all")
    assert len(every) == len(FUNCTIONS) and every == sorted(every, reverse=True)
    assert chosen == every[: len(chosen)]
    assert sum(every[len(chosen) :]) <= 0.03 * sum(every)


def test_profile_command_tells_rows_of_one_name_apart(tmp_path: Path, capsys: Capture) -> None:
    source = """
        import jax, jax.numpy as jnp
        class Actor:
            @jax.jit(static_argnums=0)
            def act(self, x): return x @ x
        class Critic:
            @jax.jit(static_argnums=0)
            def act(self, x): return x @ x + 1
        Actor().act(jnp.ones((4, 4))), Critic().act(jnp.ones((4, 4))), Critic().act(jnp.ones((8, 8)))
    """
    assert main(["profile", "--all", written(tmp_path, source)]) == 0
    output = capsys.readouterr().err
    critic = "Critic.act, plain.py:7, float32"
    for name in ("Actor.act, plain.py:4", f"{critic}[4,4]", f"{critic}[8,8]"):
        assert f"  {name}  " in output


@pytest.mark.parametrize(
    ("device", "name"), [("bow", "1 × bow"), ("4", "4 × mk2"), ("4xbow", "4 × bow"), ("2×mk1", "2 × mk1")]
)
def test_profile_command_takes_a_number_of_ipus(device: str, name: str, tmp_path: Path, capsys: Capture) -> None:
    source = "import jax, jax.numpy as jnp\njax.jit(lambda x: x @ x)(jnp.ones((4, 4)))"
    assert main(["profile", "--device", device, written(tmp_path, source)]) == 0
    assert f"compiled for {name} (" in capsys.readouterr().err


def test_profile_command_refuses_devices_and_trip_counts_that_are_none(tmp_path: Path, capsys: Capture) -> None:
    script = written(tmp_path, "print('ran')")
    for options, error in ((("--device", "bwo"), "try: 'bow'"), (("--trip-count", "loop"), "LOOP=N")):
        assert main(["profile", *options, script]) == 2
        output = capsys.readouterr()
        assert error in output.err and not output.out


def test_profile_command_takes_trip_counts(tmp_path: Path, capsys: Capture) -> None:
    source = """
        import jax, jax.numpy as jnp
        @jax.jit
        def relax(x, n):
            return jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] @ s[1]), (0, x))
        relax(jnp.ones((4, 4)), 3)
    """
    script = written(tmp_path, source)

    def cycles(*options: str) -> int:
        assert main(["profile", *options, script]) == 0
        output = capsys.readouterr().err
        assert ("no loop of a compiled function is called nowhere" in output) == ("nowhere=1" in options)
        (row,) = re.findall(r"^  relax +1 +([\d,]+)", output, re.MULTILINE)
        return int(row.replace(",", ""))

    recorded = cycles()
    assert recorded == cycles("--trip-count", "plain.py:5 (relax)=3", "--trip-count", "nowhere=1")
    assert cycles("--trip-count", "while[0]=300") > recorded


def test_profile_command_says_what_jax_ran_where_nothing_was_compiled(tmp_path: Path, capsys: Capture) -> None:
    assert main(["profile", written(tmp_path, "print(1)")]) == 0
    assert "none: JAX ran nothing in this process" in capsys.readouterr().err
    source = "import jax.numpy as jnp\nx = jnp.ones(4)\nfor _ in range(5):\n    x = x * 2"
    assert main(["profile", written(tmp_path, source)]) == 0
    output = capsys.readouterr().err
    assert re.search(r"one operation at a time: \d+ operations.*jax\.jit around", output)
    assert re.search(r"^  5 +[\d,]+ +plain.py:4 \(<module>\)$", output, re.MULTILINE)
