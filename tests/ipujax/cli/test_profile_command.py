"""`ipujax profile`: the script runs as it would, and every program that it compiles is listed."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax.cli import main
from ipujax.compiled_programs import collected_programs
from ipujax.jax_scripts import types_apart

Capture = pytest.CaptureFixture[str]

PROGRAMS = """
import sys
import jax, jax.numpy as jnp, numpy as np
import ipujax as ipu
from ipujax import poplar

small = ipu.IPUModel(tiles_per_ipu=4)

@ipu.jit(device=small)
def step(x):
    return jnp.tanh(x @ x.T).sum()

if __name__ == "__main__":
    print("arguments", sys.argv[1:])
    step(jnp.ones((8, 8)))
    step(jnp.ones((8, 8)))
    step(jnp.ones((4, 4)))
    ipu.jit(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x), device=small)(jnp.zeros(4))
    graph = poplar.Graph(poplar.IPUModel(tiles_per_ipu=4).create_device().target)
    v = graph.add_variable(poplar.FLOAT, [4], "v")
    graph.set_tile_mapping(v, 0)
    poplar.Engine(graph, poplar.program.Copy(v, v))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAMS, encoding="utf-8")
    return path


def written(tmp_path: Path, source: str) -> str:
    path = tmp_path / "short.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return str(path)


def rows(output: str) -> dict[str, list[str]]:
    """The cells of each row of the table, by the first."""
    table = output[output.index("Programs of ") :].partition("JAX, one operation at a time")[0]
    lines = [*table.splitlines()[2:], *(line for line in output.splitlines() if line.startswith("  saved "))]
    cells = [re.split(r"  +", line.strip()) for line in lines if not line.startswith("  saved ")]
    return {cell[0]: cell[1:] for cell in cells}


def test_every_program_is_listed_and_saved(script: Path, tmp_path: Path, capsys: Capture) -> None:
    before = list(sys.argv), list(sys.path)
    assert main(["profile", "--save", str(tmp_path / "saved"), str(script), "--epochs", "1"]) == 0
    assert (sys.argv, sys.path) == before
    output = capsys.readouterr()
    assert output.out == "arguments ['--epochs', '1']\n"
    actual = rows(output.err)
    assert list(actual) == ["step, float32[8,8]", "step-2, float32[4,4]", "lambda", "engine"]
    actual = {name.partition(",")[0]: cells for name, cells in actual.items()}
    assert {path.stem for path in (tmp_path / "saved").iterdir()} == set(actual)
    for name in ("step", "step-2", "engine"):
        profile = ipu.Profile.load(tmp_path / "saved" / f"{name}.profile")
        limit = profile.verdict.limit
        assert limit is not None
        assert actual[name][:2] == ["1 × mk2", f"{profile.cycles:,}"]
        assert actual[name][3].endswith(f" KiB, tile {profile.memory.worst_tile}")
        assert actual[name][4].startswith(f"{limit.name}, {100 * limit.alone_cycles / profile.cycles:.0f} %")
        assert profile.verdict.sentence.lower().startswith(limit.name)
        assert profile.identity.file == script.name
    assert actual["lambda"][1] == "depend on data" and "trip_counts" in actual["lambda"][3]


@pytest.mark.parametrize(
    ("source", "code", "error"),
    [
        ("pass", 0, "none: JAX ran nothing"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('in words')", 1, "in words\n"),
        (
            "assert __name__ == '__main__'; import sys; assert sys.path[0] in __file__ and sys.argv[0] == __file__",
            0,
            "",
        ),
    ],
)
def test_the_exit_code_is_that_of_the_script(source, code, error, tmp_path, capsys: Capture) -> None:
    assert main(["profile", written(tmp_path, source)]) == code
    output = capsys.readouterr().err
    assert error in output and "Programs of " in output and "Traceback" not in output


def test_options_of_jax_without_a_function_of_jax_are_named(tmp_path, capsys: Capture) -> None:
    source = """
        import ipujax as ipu
        ipu.jit(lambda x: x + 1, device=ipu.IPUModel(tiles_per_ipu=4))(1.0)
        """
    assert main(["profile", "--device", "bow", "--min-cycles", "0", written(tmp_path, source)]) == 0
    assert "no effect, without a function of jax.jit: --device, --min-cycles\n" in capsys.readouterr().err


def test_an_interrupt_ends_the_script(tmp_path, capsys: Capture) -> None:
    with pytest.raises(KeyboardInterrupt):
        main(["profile", written(tmp_path, "raise KeyboardInterrupt")])
    output = capsys.readouterr().err
    assert output.index("KeyboardInterrupt") < output.index("Programs of ")


def test_after_an_exception_as_of_python_compiled_programs_are_listed(tmp_path, capsys: Capture) -> None:
    source = """
    import jax.numpy as jnp, ipujax as ipu
    ipu.jit(jnp.sin, device=ipu.IPUModel(tiles_per_ipu=4)).lower(jnp.ones(4)).compile()
    ipu.jit(jnp.sin, device="mk2")
    """
    path = written(tmp_path, source)
    assert main(["profile", path]) == 1
    output = capsys.readouterr().err
    displayed = re.findall(r'^  File "(.*)", line', output, re.MULTILINE)
    assert displayed[0] == path and not [file for file in displayed if "runpy" in file or "cli" in Path(file).parts]
    assert "ArgumentError" in output and list(rows(output)) == ["sin"]


def test_a_module_is_run(script: Path, monkeypatch, capsys: Capture) -> None:
    monkeypatch.chdir(script.parent)
    assert main(["profile", "-m", "train", "a"]) == 0
    output = capsys.readouterr()
    assert (
        output.out == "arguments ['a']\n"
        and re.search(r"^Programs of train, \d+ \w+ \d{4}:$", output.err, re.MULTILINE)
        and "engine" in rows(output.err)
    )


def test_programs_are_collected_inside_alone() -> None:
    names: dict[str, Any] = {"__name__": "train"}
    exec(PROGRAMS, names)
    with collected_programs() as outer, collected_programs() as inner:
        names["step"].lower(jnp.ones((2, 2))).compile()
    assert [program.name for program in inner] == ["step"] and not outer


def test_programs_of_threads_are_listed(tmp_path: Path, capsys: Capture) -> None:
    source = """
        import threading
        import jax.numpy as jnp, ipujax as ipu
        @ipu.jit(device=ipu.IPUModel(tiles_per_ipu=4))
        def step(x):
            return jnp.tanh(x)
        thread = threading.Thread(target=lambda: step(jnp.ones(4)))
        thread.start()
    """
    assert main(["profile", written(tmp_path, source)]) == 0
    assert list(rows(capsys.readouterr().err)) == ["step"]


def test_page_is_that_of_the_program_of_most_cycles(script: Path, tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "page.html"
    assert main(["profile", "--html", str(page), str(script)]) == 0
    output = capsys.readouterr().err
    cycles = {name: int(cells[1].replace(",", "")) for name, cells in rows(output).items() if cells[1][0].isdigit()}
    name = max(cycles, key=cycles.__getitem__).partition(", ")[0]  # types of arguments may follow
    assert f"wrote {page}, the page of {name}" in output
    assert f"<title>{name.partition('-')[0]}" in page.read_text(encoding="utf-8")


def test_programs_of_one_name_are_told_apart_by_the_types_that_differ() -> None:
    """As train functions of Keras for several sizes of a batch, whose first arguments are the same weights."""
    weights = ("float32[16,32]", "float32[32]", "float32[32,4]", "float32[4]", "float32[]")
    of_all = [(*weights, f"float32[{size},16]", f"float32[{size},4]") for size in (8, 10)]
    assert types_apart(of_all[1], of_all) == "float32[10,16] float32[10,4]"
    assert types_apart(of_all[0], of_all[:1]) == types_apart(weights, [weights, weights]) == ""
    many = [tuple(f"float32[{size + n}]" for n in range(6)) for size in (8, 100)]
    assert types_apart(many[0], many) == "float32[8] float32[9] float32[10] float32[11] and 2 more"
