"""What a type checker sees: functions keep their arguments and results through ipujax's decorators."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
api = pytest.importorskip("mypy.api")

SNIPPET = """
from collections.abc import Callable
import jax
import ipujax as ipu

def add(x: jax.Array, times: int = 2, *, name: str = "") -> jax.Array:
    return x * times

@ipu.jit
def bare(x: jax.Array, times: int = 2) -> tuple[jax.Array, int]:
    return x, times

@ipu.jit(device=ipu.IPUModel(), donate_argnums=0)
def called(x: jax.Array, times: int = 2) -> dict[str, jax.Array]:
    return {"x": x}

class Model:
    @ipu.jit(static_argnums=0)
    def step(self, x: jax.Array) -> float:
        return 0.0

function = ipu.jit(add, replicas=2)
pipelined = ipu.pipeline(add, micro_batches=2)
x = jax.numpy.ones(3)
reveal_type(bare(x))
reveal_type(called(x, times=3))
reveal_type(function(x, name="a"))
reveal_type(function.lower(x).compile().profile.cycles)
reveal_type(Model().step(x))
reveal_type(pipelined(x, 3))
reveal_type(ipu.codelet_call)
bare("no")
called(x, time=3)
function(x, 2, "a")
Model().step(x, 1)
pipelined(3)
ipu.jit(add, donate_argnum=0)
ipu.jti
"""
REVEALED = ["tuple[Array, int]", "dict[str, Array]", "Array", "int", "float", "Array"]
WRONG = {
    "bare": 'incompatible type "str"; expected "Array"',
    "called": 'Unexpected keyword argument "time"',
    "function(": "Too many positional arguments",
    "Model()": "Too many arguments",
    "pipelined": 'incompatible type "int"; expected "Array"',
    "ipu.jit(": "No overload variant",
    "ipu.jti": "has no attribute",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What mypy says of the snippet, a line each."""
    folder: Path = tmp_path_factory.mktemp("types")
    (folder / "snippet.py").write_text(SNIPPET)
    options = ["--config-file=", f"--cache-dir={folder}", "--follow-imports=silent"]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MYPYPATH", str(ROOT))
        found, errors, _ = api.run([*options, str(folder / "snippet.py")])
    assert not errors, errors
    return list(found.splitlines())


def test_results_keep_their_types(report: list[str]) -> None:
    revealed = [line.split('"')[1] for line in report if "Revealed type" in line]
    assert [re.sub(r"(\w+\.)+", "", text) for text in revealed[: len(REVEALED)]] == REVEALED
    assert "def (" in revealed[len(REVEALED)]


@pytest.mark.parametrize("call", WRONG)
def test_wrong_arguments_are_reported(report: list[str], call: str) -> None:
    source = SNIPPET.splitlines()
    after = source.index("reveal_type(ipu.codelet_call)")
    number = next(n for n, line in enumerate(source, 1) if n > after and line.startswith(call))
    assert any(f"snippet.py:{number}: error" in line and WRONG[call] in line for line in report)
