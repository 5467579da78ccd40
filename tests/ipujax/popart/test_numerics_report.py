"""`NumericsReport`: the numbers of its formula, and files that do not fit each other."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ipujax import popart


def model(path: Path, **weights: object) -> str:
    """Save a model with parameters; return the name of its file."""
    builder = popart.Builder()
    for name, value in weights.items():
        builder.addInitializedInputTensor(np.asarray(value), name)
    builder.saveModelProto(path)
    return str(path)


def test_errors_are_those_of_the_changes(tmp_path: Path) -> None:
    ones = np.ones(4, np.float32)
    count = np.arange(3, dtype=np.int32)
    starts, ends = (model(tmp_path / f"{name}.onnx", w=x, n=count) for name, x in (("a0", ones), ("a1", 3 * ones)))
    other = model(tmp_path / "b1.onnx", w=2 * ones, n=count)
    report = popart.NumericsReport(starts, ends, starts, other)
    # |ΔA| = 4, |ΔB| = 2, |ΔA − ΔB| = 2
    assert report.getRelativeErrors() == {"w": pytest.approx(4 / 8)}
    assert report.report("w") in report.fullReport()
    assert "|dA| = 4 and |dB| = 2" in report.report("w")
    with pytest.raises(popart.popart_exception, match="a NumericsReport has a parameter"):
        report.report("v")


def test_parameters_of_bfloat16_are_reported(tmp_path: Path) -> None:
    start, end = (model(tmp_path / f"{factor}.onnx", w=jnp.full(4, factor, jnp.bfloat16)) for factor in (1, 3))
    assert popart.NumericsReport(start, end, start, end).getRelativeErrors() == {"w": 0}


def test_models_with_other_parameters_are_refused(tmp_path: Path) -> None:
    one = model(tmp_path / "one.onnx", w=np.ones(4, np.float32))
    other = model(tmp_path / "other.onnx", w=np.ones(5, np.float32))
    with pytest.raises(popart.popart_exception, match=r"other\.onnx are not those of .*one\.onnx"):
        popart.NumericsReport(one, one, one, other)
    with pytest.raises(popart.popart_exception):
        popart.NumericsReport(one, one, one, str(tmp_path / "nothing.onnx"))
