"""Types as a checker infers them: functions keep their arguments and results through ipujax's decorators."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import ipujax as ipu
from ipujax import distributed
from ipujax.lowering.schedules import SCHEDULE_NAMES, SCHEDULES
from ipujax.popnn.loss import LOSSES, LossType
from ipujax.popnn.non_linearity import NON_LINEARITIES, NonLinearity
from ipujax.popnn.rnn import ACTIVATIONS, Activation
from ipujax.popops.reductions import _REDUCTIONS, Reduction
from ipujax.runtime.target import IPU_VERSIONS, PRESETS, Arch, IpuVersion, TargetChanges

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
ipu.IPUModel(arch="mk3")
ipu.IPUModel(tiles_per_ipux=2)
ipu.IPUModel(bytes_per_tile="large")
ipu.IPUModel(global_exchange="locked")
ipu.Options(recompute="al")
ipu.Options(partials="float8")
ipu.pipeline(add, micro_batches=2, schedule="1f1bb")
ipu.pipeline(add, micro_batches=2, stages="automatic")
ipu.pipeline_plan(add, x, micro_batches=2, schedules=["gpip"])
ipu.distributed.all_reduce(x, "average")
bare.profile(x).summary(by="lines")
ipu.poplar.IPUModel("ipu3")
ipu.popnn.PoolParams(pooling_type="maximum")
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
    "ipu.IPUModel(arch": "expected \"Literal['mk1', 'mk2', 'bow']\"",
    "ipu.IPUModel(tiles_per_ipux": 'Unexpected keyword argument "tiles_per_ipux"',
    "ipu.IPUModel(bytes": 'incompatible type "str"; expected "int"',
    "ipu.IPUModel(global": "expected \"Literal['lockstep', 'buffered']\"",
    "ipu.Options(recompute": "expected \"Literal['none', 'all', 'standard', 'auto']\"",
    "ipu.Options(partials": "expected \"Literal['float32', 'float16'] | None\"",
    "ipu.pipeline(add, micro_batches=2, schedule": "'1f1b'",
    "ipu.pipeline(add, micro_batches=2, stages": "'auto'",
    "ipu.pipeline_plan": "'gpipe'",
    "ipu.distributed": "'mean', 'sum', 'max', 'min'",
    "bare.profile": "'line', 'layer'",
    "ipu.poplar": "'ipu1', 'ipu2', 'ipu21'",
    "ipu.popnn": "'max', 'avg', 'sum'",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Messages of mypy on the snippet, a line each."""
    folder: Path = tmp_path_factory.mktemp("types")
    (folder / "snippet.py").write_text(SNIPPET)
    options = ["--config-file=", f"--cache-dir={folder}", "--follow-imports=silent"]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MYPYPATH", str(ROOT))
        actual, errors, _ = api.run([*options, str(folder / "snippet.py")])
    assert not errors, errors
    return list(actual.splitlines())


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


def test_changes_of_a_target_are_its_fields() -> None:
    constants = {field.name for field in fields(ipu.Target)} - {"num_ipus", "sources"}
    types = get_type_hints(ipu.Target)
    assert get_type_hints(TargetChanges) == {name: types[name] for name in constants}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (get_args(Arch), PRESETS),
        (get_args(IpuVersion), IPU_VERSIONS),
        (SCHEDULE_NAMES, SCHEDULES),
        (get_args(get_type_hints(distributed.all_reduce)["op"]), distributed._OPERATIONS),
        (get_args(LossType), LOSSES),
        (get_args(NonLinearity), NON_LINEARITIES),
        (get_args(Activation), ACTIVATIONS),
        (get_args(Reduction), _REDUCTIONS),
    ],
)
def test_words_of_options_are_those_that_are_accepted(words: Collection[Any], names: Collection[str]) -> None:
    assert sorted(words) == sorted(names)
