"""`ipujax profile` of scripts that know nothing of ipujax: they run as under `python`; a table has their functions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import pytest

import ipujax as ipu
from ipujax.cli import main

Capture = pytest.CaptureFixture[str]

SCRIPT = """
    import sys
    from functools import partial

    import jax
    import jax.numpy as jnp
    from jax import jit

    @jit
    def step(weights, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.tanh(x @ w).sum())(weights)
        return weights - 0.1 * gradient, loss

    @partial(jax.jit, static_argnames="exponent")
    def power(x, exponent):
        return x**exponent

    class Model:
        @jax.jit(static_argnums=0)
        def twice(self, x):
            return 2 * step(x, x)[1]

    weights = jnp.ones((8, 8))
    for _ in range(3):
        weights, loss = step(weights, jnp.ones((4, 8)))
    print(loss, power(weights, 2).sum(), power(weights, exponent=3).sum(), Model().twice(weights), sys.argv)
    jax.grad(lambda x: power(x, 2).sum())(weights)
"""


def written(tmp_path: Path, source: str) -> str:
    path = tmp_path / "plain.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return str(path)


def table_of(output: str, heading: str) -> dict[str, list[str]]:
    """The cells of each row under a heading, by the first; of functions with several signatures the last."""
    rows: dict[str, list[str]] = {}
    for line in output[output.index(heading) :].splitlines()[2:]:
        if not line.startswith("  ") or line.startswith(("  wrote", "  saved")):
            break
        name, *cells = re.split(r"  +", line.strip())
        rows[name] = cells
    return rows


def test_profile_command_compiles_functions_that_matter(tmp_path: Path, capsys: Capture) -> None:
    before = jax.jit, jax.pmap
    script = written(tmp_path, SCRIPT)
    assert main(["profile", "--min-cycles", "28_000", script, "--lr", "1"]) == 0
    assert (jax.jit, jax.pmap) == before
    output = capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, "--lr", "1"])
        exec(compile(Path(script).read_text(encoding="utf-8"), script, "exec"), {"__name__": "__main__"})
    assert output.out == capsys.readouterr().out
    compiled = table_of(output.err, "Functions of JAX")
    assert list(compiled) == ["step", "twice"] and compiled["step"][0] == "3"
    assert compiled["step"][1] == f"{3 * int(compiled['step'][2].replace(',', '')):,}"
    assert compiled["step"][-1].endswith("%") or "plain.py:" in compiled["step"][-1]
    others = table_of(output.err, "Computed by JAX alone")
    assert all(reason == "fewer than 28,000 cycles a call" for *_, reason in others.values())
    # A signature for each static value, forward and backward of a gradient.
    assert [name.split(", ")[0] for name in others] == 4 * ["power"]
    assert [", transformed, " in name for name in others].count(True) == 2
    assert "JAX, one operation at a time: " in output.err and "jax.jit around" in output.err


def test_profile_command_writes_the_page_of_the_function_of_most_cycles(tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "page.html"
    assert main(["profile", "--min-cycles", "28_000", "--html", str(page), written(tmp_path, SCRIPT)]) == 0
    output = capsys.readouterr()
    name = next(iter(table_of(output.err, "Functions of JAX")))
    assert f"wrote {page}, the page of {name}" in output.err and "wrote" not in output.out
    text = page.read_text(encoding="utf-8")
    assert f"<title>{name}" in text and "plain.py" in text
    assert main(["profile", "--html", str(tmp_path / "none.html"), written(tmp_path, "print(1)")]) == 0
    assert "none.html is not written" in capsys.readouterr().err and not (tmp_path / "none.html").exists()


def test_profile_command_lists_functions_that_cannot_be_compiled(tmp_path: Path, capsys: Capture, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no such program\nat all")

    monkeypatch.setattr("ipujax.jax_scripts.profiling_run.profiles_of", refuse)
    source = """
        import jax, jax.numpy as jnp
        @jax.jit
        def sine(x): return jnp.sin(x)
        sine(jnp.ones(4))
        raise KeyError("of the script")
    """
    assert main(["profile", "--all", "--only", "tan", written(tmp_path, source)]) == 2
    error = capsys.readouterr().err
    assert "one rule" in error and "min_cycles (--min-cycles)" in error
    assert main(["profile", "--all", written(tmp_path, source)]) == 1
    output = capsys.readouterr().err
    assert output.index("KeyError: 'of the script'") < output.index("Functions of JAX")
    others = table_of(output, "Computed by JAX alone")
    assert others["sine"][0] == "1" and others["sine"][2] == "ValueError: no such program"


def test_profile_command_applies_variables_that_are_set_before_jax_is_imported(
    tmp_path: Path, capsys: Capture, monkeypatch
) -> None:
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    monkeypatch.delenv("JAX_NO_SUCH_SETTING", raising=False)
    source = """
        import os
        os.environ["JAX_ENABLE_X64"] = "1"
        os.environ["JAX_NO_SUCH_SETTING"] = "1"
        import jax, jax.numpy as jnp
        os.environ["JAX_DEBUG_NANS"] = "1"
        print(jax.jit(lambda x: x @ x)(jnp.ones((4, 4))).dtype, jax.config.jax_debug_nans)
    """
    assert main(["profile", written(tmp_path, source)]) == 0
    monkeypatch.delenv("JAX_NO_SUCH_SETTING")
    monkeypatch.delenv("JAX_DEBUG_NANS")
    output = capsys.readouterr()
    assert output.out == "float64 False\n" and list(table_of(output.err, "Functions of JAX")) == ["<lambda>"]
    warned = re.findall(r"^(\w+) was changed by the script, without effect", output.err, re.MULTILINE)
    assert warned == ["JAX_DEBUG_NANS", "JAX_NO_SUCH_SETTING"] and not jax.config.jax_enable_x64


def test_profile_command_leaves_tracebacks_to_the_script(tmp_path: Path, capsys: Capture) -> None:
    source = """
        import jax
        @jax.jit
        def step(x):
            raise KeyError("inside")
        step(1.0)
    """
    path = written(tmp_path, source)
    assert main(["profile", path]) == 1
    output = capsys.readouterr().err
    assert set(re.findall(r'^  File "(.*)", line', output, re.MULTILINE)) == {path}
    assert "none: JAX ran nothing" in output


@jax.jit
def matrix_step(x: jax.Array) -> jax.Array:
    return x @ x


def test_profiling_of_a_block() -> None:
    plain = matrix_step
    x = jax.numpy.ones((8, 8))
    with ipu.profiling(ipu.IPUModel(tiles_per_ipu=4)) as run:
        assert matrix_step is plain
        with pytest.raises(ipu.ArgumentError, match="when its block has ended"):
            run.profile()
        count = jax.jit(lambda x: jax.lax.while_loop(lambda x: x[0] < 9, lambda x: x + 1, x))
        matrix_step(x)
        matrix_step(x)
        count(x[0])
    count(x[0])  # no longer counted
    rows = {row.name: row for row in run.functions}
    row, loop = rows["matrix_step"], rows["<lambda>"]
    assert row.calls == 2 and row.total_cycles == 2 * run.profile("matrix_step").cycles
    assert loop.calls == 1 and loop.total_cycles > 0
    with pytest.raises(ipu.ArgumentError, match="no such function"):
        run.profile("lambda")
    with pytest.raises(ipu.ArgumentError, match="no machine model"), ipu.profiling(ipu.CPU()):
        pass


def test_the_profile_without_a_name_is_of_most_cycles_where_programs_share_a_name() -> None:
    other_step = jax.jit(lambda x: x @ x)
    with ipu.profiling(ipu.IPUModel(tiles_per_ipu=4), every=True) as run:
        matrix_step(jax.numpy.ones((32, 32)))
        other_step(jax.numpy.ones((16, 16)))
        matrix_step(jax.numpy.ones((2, 2)))
    assert [row.name for row in run.functions] == ["matrix_step", "<lambda>", "matrix_step"]
    assert run.profile() is run.profile("matrix_step") is run.functions[0].profile


def scaled(factor: Any, x: Any) -> Any:
    return factor * (x @ x)


class Scaling(eqx.Module):
    factor: Any

    def __call__(self, x: Any) -> Any:
        return scaled(self.factor, x)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (eqx.Partial(scaled, jax.numpy.float32(2)), "scaled"),
        (partial(scaled, jax.numpy.float32(2)), "scaled"),
        (scaled, "scaled"),
        (Scaling(jax.numpy.float32(2)).__call__, "__call__"),
        (eqx.nn.Linear(4, 4, key=jax.random.key(0)), "Linear"),
    ],
)
def test_profiling_names_what_the_wrapper_of_a_library_calls(function: Any, name: str) -> None:
    x = jax.numpy.ones((4, 4))
    args = (x[0],) if name == "Linear" else (2.0, x) if function is scaled else (x,)
    with ipu.profiling(ipu.IPUModel(tiles_per_ipu=4), every=True) as run:
        eqx.filter_jit(function)(*args)
    (row,) = (row for row in run.functions if row.total_cycles)
    assert row.name == name
    assert run.profile(name).cycles == row.total_cycles


def test_profiling_runs_loops_on_data_once_more() -> None:
    with ipu.profiling(ipu.IPUModel(tiles_per_ipu=4), every=True) as run:
        jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 9, lambda x: x + 1, x), donate_argnums=0)(jax.numpy.ones(()))
    assert run.functions[0].total_cycles > 0


EAGER = {
    "jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=3)": ("scan(<lambda>)", "1"),
    "jax.lax.fori_loop(0, 3, lambda _, c: c @ c, x)": ("fori_loop(<lambda>)", "1"),
    "jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ c, x)": ("while_loop(<lambda>)", "1"),
    "jax.lax.map(lambda c: c @ x, x)": ("map (scan)", "1"),
    "jax.value_and_grad(total)(x)": ("total, transformed", "1"),
    "jax.vmap(total)(jnp.stack([x, x]))": ("total", "1"),
    "[jax.grad(lambda x: 2 * total(x))(x) for _ in range(2)]": ("total, transformed", "2"),
    "total.lower(x).compile()(x)": ("total", "1"),
    "total.trace(x).lower().compile()(x)": ("total", "1"),
    "pjit(lambda x: x @ x)(x)": ("<lambda>", "1"),
    "jax.eval_shape(total, x), jax.make_jaxpr(total)(x), total.lower(x)": None,
    "jax.jit(jax.grad(total))(x), jax.jit(lambda x: jax.lax.scan(lambda c, _: (c, total(x)), x, None, 2))(x)": (
        "total",
        "1",
    ),
}


@pytest.mark.parametrize(("call", "row"), EAGER.items())
@pytest.mark.filterwarnings("ignore:jax.experimental.pjit.pjit has been deprecated")
def test_profiling_counts_calls_outside_of_jit(call: str, row: tuple[str, str] | None) -> None:
    traces: list[int] = []
    with ipu.profiling(ipu.IPUModel(tiles_per_ipu=4), every=True) as run:
        names: dict[str, object] = {"traces": traces}
        exec("import jax, jax.numpy as jnp\nfrom jax.experimental.pjit import pjit\nx = jnp.full((4, 4), 0.5)", names)
        exec("@jax.jit\ndef total(x):\n    traces.append(1)\n    return jnp.tanh(x @ x).sum()", names)
        exec(call, names)
    assert {(each.name, str(each.calls)) for each in run.functions if each.name != "<lambda>" or row} >= (
        set() if row is None else {row}
    )
    assert (row is None) == (not run.functions) and len(traces) <= 1
    assert all(each.total_cycles > 0 for each in run.functions)


SPLIT = """
    import jax, jax.numpy as jnp
    @jax.jit
    def step(weights, x, y):
        loss, gradient = jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(weights)
        return weights - gradient, loss
    @jax.jit
    def evaluate(weights, x):
        return x @ weights
    weights, x = jnp.ones((16, 4)), jnp.ones((64, 16))
    step(weights, x, jnp.ones((64, 4)))
    print(evaluate(weights, x).sum())
"""


def test_profile_command_splits_a_batch_over_replicas(tmp_path: Path, capsys: Capture) -> None:
    script = written(tmp_path, SPLIT)
    command = ["profile", "--all", "--save", str(tmp_path / "saved")]
    assert main([*command, "--replicas", "4", script]) == 0
    output = capsys.readouterr()
    assert output.out == "4096.0\n" and "the batch split over 4 replicas" in output.err
    reason = table_of(output.err, "Computed by JAX alone")["evaluate"][2]
    assert reason == "the batch is not known: arguments that are no state have 16, 64 rows"
    profile = ipu.Profile.load(tmp_path / "saved" / "step.profile")
    assert profile.device == "4 × mk2" and profile.phase_cycles["global_exchange"] > 0
    assert main([*command, "--replicas", "4", "--batch-size", "64", script]) == 0
    assert set(table_of(capsys.readouterr().err, "Functions of JAX")) == {"step", "evaluate"}
    evaluation = ipu.Profile.load(tmp_path / "saved" / "evaluate.profile")
    assert evaluation.device == "4 × mk2" and evaluation.phase_cycles["global_exchange"] == 0  # no sum over the batch


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--replicas", "3"], "a power of two"),
        (["--batch-size", "64"], "batch_size of ipu.profiling has no effect without replicas"),
    ],
)
def test_profile_command_refuses_replicas(
    options: tuple[str, ...], error: str, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["profile", *options, written(tmp_path, "print('ran')")]) == 2
    output = capsys.readouterr()
    assert error in output.err and not output.out


def test_profiling_names_replicas_that_do_not_divide_a_batch() -> None:
    with ipu.profiling(ipu.IPUModel(tiles_per_ipu=4), every=True, replicas=8) as run:
        jax.jit(lambda x: x.sum())(jax.numpy.ones((12, 2)))
    assert run.functions[0].reason == "8 replicas do not divide a batch of 12 rows"


def test_profiling_names_functions_whose_compilation_was_interrupted(monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ipujax.jax_scripts.profiling_run.profiles_of", interrupt)
    with ipu.profiling(ipu.IPUModel(tiles_per_ipu=4), every=True) as run:
        jax.jit(lambda x: jax.numpy.sin(x))(1.0)
        jax.jit(lambda x: jax.numpy.cos(x))(1.0)
    assert [row.reason for row in run.functions] == ["the compilation was interrupted"] * 2


@pytest.mark.parametrize(
    "ending",
    [
        "os._exit(5)",
        "sys.exit(7)",
        "sys.exit('in words')",
        "raise KeyError('x')",
        "import signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(100)",
        "import logging; logging.basicConfig(level=logging.INFO)",
        "os._exit(3) if os.fork() == 0 else print(os.wait()[1])",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(1), print(step(x)[0, 0]))).start()",
        "import multiprocessing as m; p = m.get_context('spawn').Process(target=main); p.start(); p.join()",
        "import pickle; print(pickle.loads(pickle.dumps(step))(x)[0, 0], __file__, sys.argv, sys.path[0])",
    ],
)
def test_profile_command_has_the_output_and_exit_code_of_python(ending: str, tmp_path: Path) -> None:
    source = f"""
        import os, sys
        import jax, jax.numpy as jnp
        @jax.jit
        def step(x):
            return x @ x
        if "fork" in {ending!r} and os.fork() == 0:
            sys.exit(4)  # before JAX has threads
        def main():
            print("main", step(jnp.ones((4, 4)))[0, 0])
        if __name__ == "__main__":
            x = jnp.ones((4, 4))
            main()
            sys.stdout.flush()
            {ending}
    """
    path = Path(written(tmp_path, source)).name
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, [*sys.path[:1], os.getcwd()]))}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, *command, path, "--epochs", "2"]
        return subprocess.run(
            arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=100
        )

    plain = run()
    profiled = run("-m", "ipujax", "profile")
    assert (profiled.returncode, profiled.stdout) == (plain.returncode, plain.stdout)
    error, _, table = profiled.stderr.partition("Functions of JAX")
    assert table.splitlines()[2].split()[0] == "step"
    if any(name in ending for name in ("KeyError", "SIGINT", "logging")):
        assert error == plain.stderr


def test_profile_command_has_an_ipu_for_each_device_of_a_mesh(tmp_path: Path) -> None:
    source = """
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        rows = NamedSharding(mesh, PartitionSpec("data"))
        def step(weights, x):
            return weights - jax.grad(lambda w: jnp.tanh(x @ w).sum())(weights)
        named = jax.jit(step, in_shardings=(None, rows))
        given = jax.jit(lambda w, x: step(w, x) + 1)
        print(named(jnp.ones((8, 8)), jnp.ones((64, 8))).sum())
        print(given(jnp.ones((8, 8)), jax.device_put(jnp.ones((64, 8)), rows)).sum())
    """
    command = [sys.executable, "-m", "ipujax", "profile", "--save", "saved", Path(written(tmp_path, source)).name]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=100)
    profiles = [ipu.Profile.load(path) for path in (tmp_path / "saved").iterdir()]
    assert {profile.device for profile in profiles} == {"8 × mk2"} and len(profiles) == 2
    assert all(profile.phase_cycles["global_exchange"] > 0 for profile in profiles)


def test_a_script_without_functions_imports_no_compiler(tmp_path: Path) -> None:
    source = """
        import sys
        import jax.numpy as jnp
        print(jnp.sin(0.0), *(name for name in sys.modules if name.startswith("ipujax.")))
    """
    command = [sys.executable, "-m", "ipujax", "profile", written(tmp_path, source)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    compiler = {"ipujax.lowering.rules", "ipujax.lowering.passes", "ipujax.runtime.compile", "ipujax.runtime.report"}
    assert "ipujax.cli" in output.split() and compiler.isdisjoint(output.split())
