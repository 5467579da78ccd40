"""Graphcore's own PopART examples, as they are, by `python -m ipujax.popart`; and our examples of the same names.

They need a checkout of github:graphcore/examples at d180551, whose folder is that of IPUJAX_POPART_EXAMPLES. A copy of
the folder of an example takes the files that it writes. Digits of scikit-learn in the format of MNIST stand for MNIST.
Scripts of 2021 need `numpy.fromstring` for bytes, which NumPy of today lacks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from examples.popart import mnist

ROOT = Path(__file__).resolve().parents[3]
SOURCE = os.environ.get("IPUJAX_POPART_EXAMPLES", "")
pytestmark = pytest.mark.skipif(not SOURCE, reason="IPUJAX_POPART_EXAMPLES names no checkout of Graphcore's examples")

FROMSTRING = """
import numpy
_of_text = numpy.fromstring
def _fromstring(text, dtype=float, count=-1, *, sep=""):
    return numpy.frombuffer(text, dtype, count).copy() if sep == "" else _of_text(text, dtype, count, sep=sep)
numpy.fromstring = _fromstring
"""
LEAKY_RELU = """
import jax.numpy as jnp
from ipujax.onnx import register
register("custom.ops", "LeakyRelu")(lambda x, *, alpha: jnp.where(x > 0, x, alpha * x))
"""
# Script and flags, without operators in C++; a line of each mechanism.
RUNS = (
    "mnist/popart_mnist.py --epochs 1 --batches-per-step 20 --simulation",
    "mnist/popart_mnist.py --epochs 1 --batches-per-step 20 --num-ipus 4 --replication-factor 2 --pipeline",
    "mnist/popart_mnist.py --epochs 1 --batches-per-step 8 --test-mode training --syn-data-type zeros",
    "mnist/popart_mnist_conv.py --epochs 1 --batches-per-step 8 --batch-size 8 --test-mode inference",
    "sharding/multi_ipu.py --shards 2 --batch-size 4 --batches-per-step 10 --mode eval",
    "sharding/multi_ipu.py --shards 2 --mode infer --tensor-tile-mapping --save-graph --use-zero-values --report",
    "pipelining/pipelining.py --report --export model.onnx",
    "pipelining/pipelining.py --no_pipelining --test",
    "phased_execution/phased_execution.py --batches-per-step 2 --iters 1 --profile --profile-dir profiles",
    "phased_execution/phased_execution.py --batches-per-step 2 --iters 1 --sharded-execution",
    "recomputing/recomputing.py --recomputing AUTO --report --show-logs",
    "callbacks/callbacks.py --data-size 5000",
    "kernel_benchmarks/lstm.py --batches-per-step 10 --steps 1 --mode train --timesteps 4",
    "kernel_benchmarks/conv.py --batches-per-step 2 --steps 1 --input-width 32 --input-height 32 --mode train",
    "custom_operators/leaky_relu_example/run_leaky_relu.py --alpha 0.5 0.1 -0.1",
    "distributed_training/horovod/horovod_popart_mnist.py --epochs 1 --simulation",
)
# Our example → Graphcore's script, whose flags it has.
OURS: Mapping[str, str] = {
    "callbacks": "callbacks/callbacks.py",
    "custom_operators": "custom_operators/leaky_relu_example/run_leaky_relu.py",
    "distributed_training": "distributed_training/horovod/horovod_popart_mnist.py",
    "phased_execution": "phased_execution/phased_execution.py",
    "pipelining": "pipelining/pipelining.py",
    "recomputing": "recomputing/recomputing.py",
}


def save_digits(folder: Path) -> None:
    """Write the digits of our own example in the files of MNIST."""
    folder.mkdir(exist_ok=True)
    for name, (pictures, labels) in zip(("train", "t10k"), mnist.digits(), strict=True):
        header = np.array([2051, len(pictures), 28, 28], ">i4").tobytes()
        content = (255 * pictures).astype(np.uint8).tobytes()
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + content)
        header = np.array([2049, len(labels)], ">i4").tobytes()
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.astype(np.uint8).tobytes())


def run(words: list[str], folder: Path) -> str:
    """Run a program in its folder; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder.parent}", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return ran.stdout


def copied(script: str, tmp_path: Path) -> Path:
    """Copy the folder of a script, with what it needs beside it; return its path."""
    place = tmp_path / "code_examples" / "popart" / Path(script).parent
    shutil.copytree(Path(SOURCE) / "code_examples" / "popart" / Path(script).parent, place)
    shutil.copytree(Path(SOURCE) / "utils", tmp_path / "utils")
    (place.parent / "sitecustomize.py").write_text(FROMSTRING)
    return place / Path(script).name


@pytest.mark.parametrize("line", RUNS)
def test_founding_examples_run_as_they_are(line: str, tmp_path: Path) -> None:
    script, *flags = line.split()
    path = copied(script, tmp_path)
    if "mnist" in script:
        save_digits(path.parent / "data")
    library: list[str] = []
    if script.startswith("custom_operators/"):
        (path.parent / "build").mkdir(exist_ok=True)
        (path.parent / "build" / "custom_ops.so").touch()  # the script looks for it
        (tmp_path / "operators.py").write_text(LEAKY_RELU)
        library = ["--library", f"custom_ops.so={tmp_path / 'operators.py'}"]
    run(["-m", "ipujax.popart", *library, path.name, *flags], path.parent)
    if "--profile-dir" in flags:
        assert (path.parent / "profiles" / "inference.profile").is_file()


@pytest.mark.parametrize("name", OURS)
def test_our_examples_have_the_flags_of_the_founding_examples(name: str, tmp_path: Path) -> None:
    path = copied(OURS[name], tmp_path)
    if name == "custom_operators":  # whose script loads its library before it reads its arguments
        flags = set(re.findall(r'add_argument\("(--\w+)"', path.read_text(encoding="utf-8")))
    else:
        flags = set(re.findall(r"--[\w-]+", run(["-m", "ipujax.popart", path.name, "--help"], path.parent)))
    ours = set(re.findall(r"--[\w-]+", run([str(ROOT / "examples" / "popart" / f"{name}.py"), "--help"], tmp_path)))
    assert flags and flags <= ours, sorted(flags - ours)
