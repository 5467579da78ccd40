"""Functions exported for several devices: the numbers of plain JAX, and the prices of the function itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ipujax.lowering.passes.inline import inline

SCRIPT = Path(__file__).parent / "sharded_exports.py"
SPLIT = ("result", "both", "constraint", "open dimension", "loop")
LINE = r"at: sharded_exports.py:\d+(.|\n)*"
ERRORS = {
    "small device": r"GraphError: shardings are over (.|\n)*larger than the device",
    "shard_map": rf"GraphError: (.|\n)*exported for 4 devices(.|\n)*{LINE}manual_computation",
    "GSPMD": rf"GraphError: (.|\n)*exported for 4 devices(.|\n)*{LINE}GSPMD",
}


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", SPLIT)
def test_exported_is_partitioned_and_priced_as_plain(printed: dict[str, Any], name: str) -> None:
    outcome = printed["outcomes"][name]
    exported_cycles, plain_cycles = outcome["cycles"]
    assert exported_cycles == pytest.approx(plain_cycles, rel=0.02)
    assert outcome["unpriced"] == 0
    assert outcome["difference"] < 1e-4


@pytest.mark.parametrize("name", ["explicit axes", "gradient"])
def test_numbers_are_those_of_jax(printed: dict[str, Any], name: str) -> None:
    assert printed["differences"][name] < 1e-3


AUTO = AxisType.Auto
EXPLICIT = AxisType.Explicit


def stored(mesh: AbstractMesh, of_results: NamedSharding | None = None) -> Any:
    """A stored function of an array whose rows are split over an axis x, exported where no devices are needed."""
    operand = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("x")))
    fun = jax.jit(jnp.sin, out_shardings=of_results)
    return export.deserialize(export.export(fun, platforms=["cpu"])(operand).serialize())


MESH = AbstractMesh((2, 2), ("x", "y"), (AUTO, AUTO))
STORED = {
    "compiler's axes": lambda: stored(MESH),
    "explicit axes": lambda: stored(AbstractMesh((2, 2), ("x", "y"), (EXPLICIT, EXPLICIT))),
    "two meshes": lambda: stored(MESH, NamedSharding(AbstractMesh((4,), ("z",), (AUTO,)), PartitionSpec("z"))),
}


@pytest.mark.parametrize("name", STORED)
def test_a_stored_function_is_split_whatever_its_meshes(name: str) -> None:
    jaxpr = jax.make_jaxpr(STORED[name]().call)(jnp.zeros((8, 16)))
    constraints = [eqn for eqn in inline(jaxpr).eqns if eqn.primitive.name == "sharding_constraint"]
    assert constraints and "x" in constraints[0].params["sharding"].mesh.axis_names


@pytest.mark.parametrize("name", ERRORS)
def test_refused_when_compiled(printed: dict[str, Any], name: str) -> None:
    assert re.match(ERRORS[name], printed["errors"][name])
