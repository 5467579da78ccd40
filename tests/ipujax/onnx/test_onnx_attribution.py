"""Attribution of ONNX models: nodes are lines and layers, also of equal nodes that are compiled once."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

import ipujax as ipu
import ipujax.onnx

WIDTH, DEPTH = 128, 6
X = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(0).standard_normal
    value = "x"
    nodes, weights = [], []
    for n in range(DEPTH):
        weights.append(numpy_helper.from_array(draw((WIDTH, WIDTH)).astype(np.float32), f"w{n}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{n}"], [f"h{n}"], f"/block{n}/MatMul"))
        nodes.append(helper.make_node("Gelu", [f"h{n}"], [f"y{n}"], f"/block{n}/act/Gelu"))
        value = f"y{n}"
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, WIDTH])],
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, [64, WIDTH])],
        weights,
    )
    file = tmp_path_factory.mktemp("onnx") / "net.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), file)
    return file


def nodes_of(profile: ipu.Profile) -> set[tuple[str, str]]:
    """Line and layer of each operation that has a line."""
    return {(row.origin.line, row.origin.layer) for row in profile.step_costs if row.cycles and row.origin.line}


EXPECTED = {
    (f"net.onnx:/block{n}/{name} ({name.rpartition('/')[2]})", f"block{n}/{name}")
    for n in range(DEPTH)
    for name in ("MatMul", "act/Gelu")
}


def test_attribution_of_nodes(path: Path) -> None:
    model = ipujax.onnx.load(path)
    assert nodes_of(ipu.jit(model).profile(model.params, X)) == EXPECTED


def test_attribution_of_gradients_of_nodes(path: Path) -> None:
    model = ipujax.onnx.load(path)

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean(model(params, x) ** 2)

    profile = ipu.jit(jax.grad(loss)).profile(model.params, X)
    assert {pair for pair in nodes_of(profile) if "onnx:" in pair[0]} == EXPECTED
    others = {line for line, _ in nodes_of(profile) if "onnx:" not in line}
    assert others and all(line.endswith("(loss)") for line in others)


def test_attribution_of_a_command_is_never_its_script(path: Path) -> None:
    script = Path(sysconfig.get_path("scripts")) / "ipujax"
    if not script.exists():
        pytest.skip("ipujax is not installed as a command")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script), "report", path.name]
    done = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, check=True)
    assert "net.onnx:/block" in done.stdout
    assert "ipujax:" not in done.stdout and "(ipujax)" not in done.stdout
