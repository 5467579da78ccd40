"""PopART programs as they are: modules of their names, libraries of operators, files of gcprofile, bad arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ipujax as ipu
from ipujax.popart import __main__ as command

ROOT = Path(__file__).resolve().parents[3]
OPERATORS = """
import jax.numpy as jnp
from ipujax.onnx import register

@register("custom.ops", "LeakyRelu")
def leaky_relu(x, *, alpha):
    return jnp.where(x > 0, x, alpha * x)
"""
PROGRAM = """
import ctypes, json, sys
import numpy as np
import popart
from popart.session import InferenceSession
from gcprofile import save_popart_report
from ctypes import cdll

library = cdll.LoadLibrary("/nowhere/build/custom_ops.so")
try:
    library.anything
    raise SystemExit("a function")
except AttributeError as error:
    print("functions:", str(error).splitlines()[0])
try:
    ctypes.CDLL("/nowhere/other.so")
except OSError as error:
    print("other:", str(error).splitlines()[-1])
assert ctypes.CDLL(None).abs(-3) == 3  # the libraries of the system are as they were

builder = popart.Builder()
x = builder.addInputTensor(popart.TensorInfo("FLOAT", [3]))
(y,) = builder.customOp(opName="LeakyRelu", opVersion=1, domain="custom.ops", inputs=[x], attributes={"alpha": 0.5})
options = popart.SessionOptions()
options.engineOptions = {"debug.instrument": "true"}
session = InferenceSession(
    builder.getModelProto(), popart.DataFlow(1, [y]),
    popart.DeviceManager().createIpuModelDevice({"tilesPerIPU": 4}), userOptions=options,
)
session.prepareDevice()
results = session.initAnchorArrays()
session.run(popart.PyStepIO({x: np.array([-2, 0, 2], np.float32)}, results))
save_popart_report(session)
json.dumps(session.getTensorTileMap())
print("popart is ipujax.popart:", popart is sys.modules["ipujax.popart"], popart.__spec__.name)
print(sys.argv[1:], results[y].tolist())
"""


def test_a_program_runs_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "operators.py").write_text(OPERATORS)
    library = f"custom_ops.so={tmp_path / 'operators.py'}"
    words = [sys.executable, "-m", "ipujax.popart", "--library", library, "program.py", "--alpha", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    functions, other, module, last = ran.stdout.splitlines()
    assert "operators are written in Python" in functions
    assert "--library NAME=FILE.py" in other
    assert module == "popart is ipujax.popart: True ipujax.popart"
    assert last == "['--alpha', '1'] [-1.0, 0.0, 2.0]"
    profile = ipu.Profile.load(tmp_path / "report.profile")
    execution = json.loads((tmp_path / "execution.json").read_text())
    assert execution["simulation"]["cycles"] == profile.cycles > 0
    assert json.loads((tmp_path / "graph.json").read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.py"], "no script nothing.py"),
        (["--library", "custom_ops.so", __file__], "expected NAME=FILE.py"),
        (["--library", "=x.py", __file__], "expected NAME=FILE.py"),
        (["--library", "custom_ops.so=nothing.py", __file__], "no operators for the library 'custom_ops.so'"),
        ([], "required: script"),
    ],
)
def test_bad_command_lines_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(words)
    assert message in capsys.readouterr().err
