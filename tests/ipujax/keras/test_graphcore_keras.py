"""The examples of the documentation of Graphcore's Keras, run with their lines of imports changed.

They need TensorFlow, for their data, and a checkout of github:graphcore/keras: the folder is that of
IPUJAX_KERAS_SOURCE. Pictures and weights that they would download are made up. Those that stock Keras 3 cannot run are
listed with the reason, and with a word of its error.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = os.environ.get("IPUJAX_KERAS_SOURCE", "")
FOLDER = Path(SOURCE) / "keras" / "ipu" / "docs"
_IMPORTS = (
    (r"^from tensorflow\.python import ipu$", "import ipujax.keras as ipu"),
    (r"^import keras$", "from ipujax.keras import keras"),
)
# Runs a file with data of the shapes that it would download.
_RUN = """
import runpy, sys
import keras
import numpy as np
from keras.applications import resnet
rng = np.random.default_rng(0)
pictures = rng.integers(0, 256, (6400, 28, 28), np.uint8), rng.integers(0, 10, 6400).astype(np.uint8)
keras.datasets.mnist.load_data = lambda: (pictures, pictures)
ResNet50 = resnet.ResNet50
resnet.ResNet50 = lambda weights: ResNet50(weights=None)
runpy.run_path(sys.argv[1], run_name="__main__")
"""
RUNS = (
    *(f"example{n}.py" for n in (1, 2, 3, 4, 5, 6, 9, 10)),
    "exporting_model_example.py",
    "exporting_pipelined_model_example.py",
)
_SHAPES = "its loss compares labels [32] with outputs [32, 28, 1], which Keras 3 refuses", "must have the same shape"
_CONSTRUCTOR = "it passes the model to the constructor of keras.Model, which Keras 3 refuses", "positional argument"
_OPTIMIZER = "its optimizer is a class of Graphcore's Keras, for optimizers of Keras 2", "No module named 'keras."
_LOOPS = (
    "it trains in a loop of Graphcore's TensorFlow, without a Keras model",
    "No module named 'tensorflow.python.ipu",
)
_STRINGS = "it exports functions of TensorFlow over strings with the model", "keyword argument 'preprocessing_step'"
_LAMBDAS = "its Lambda layers call functions of TensorFlow, which take no arrays of JAX", "Lambda.call()"
# File → why stock Keras 3 cannot run it, and a word of the error.
CANNOT_RUN = {
    "example7.py": _SHAPES,
    "example8.py": _SHAPES,
    "example11.py": _CONSTRUCTOR,
    "example12.py": _CONSTRUCTOR,
    **{f"als_example{n}.py": _OPTIMIZER for n in (1, 2, 3)},
    **{f"als_example{n}_non_keras.py": _LOOPS for n in (1, 2)},
    "exporting_model_preprocessing_postprocessing_cpu_example.py": _STRINGS,
    "exporting_pipelined_model_preprocessing_postprocessing_cpu_example.py": _STRINGS,
    "exporting_model_preprocessing_postprocessing_example.py": _LAMBDAS,
    "exporting_pipelined_model_preprocessing_postprocessing_example.py": _LAMBDAS,
}

pytestmark = [
    pytest.mark.skipif(not SOURCE, reason="IPUJAX_KERAS_SOURCE names no checkout of Graphcore's Keras"),
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="the examples read data by tf.data: needs tensorflow"),
]


def run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an example in a folder, with its lines of imports changed."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    for line, replacement in _IMPORTS:
        text = re.sub(line, replacement, text, flags=re.MULTILINE)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    environment = {**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", _RUN, str(path)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_every_example_is_listed() -> None:
    names = {path.name for path in FOLDER.glob("*example*.py")}
    assert names == {*RUNS, *CANNOT_RUN}


@pytest.mark.parametrize("name", RUNS)
def test_runs(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", CANNOT_RUN)
def test_cannot_run(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path)
    _, _, error = done.stderr.rpartition("Traceback (most recent call last)")
    assert done.returncode != 0 and CANNOT_RUN[name][1] in error, done.stderr
