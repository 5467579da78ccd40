"""`NumericsReport`: how far two trainings of one model are apart, by their changes of each parameter.

    report = popart.NumericsReport("start_a.onnx", "end_a.onnx", "start_b.onnx", "end_b.onnx")
    print(report.fullReport())

Input: models before and after, of training A and of training B. Output: |ΔA − ΔB|² / (|ΔA| |ΔB| + 1e-8) by parameter,
with Δ the change of a parameter, and |·| the root of the sum of squares.
Source: PopART's `NumericsReport`.
Limits: parameters of whole numbers are left out.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.popart.building import read_model, weights_of
from ipujax.popart.exceptions import popart_exception, unknown_name
from ipujax.popart.tensor_info import TensorInfo

_EPSILON = 1e-8  # published: PopART's, for parameters that do not change


class NumericsReport:
    """Differences between the changes of parameters in two trainings.

    Args:
        A0: name of the file of the model before training A.
        A1: after training A.
        B0: before training B.
        B1: after training B.

    Raises:
        popart_exception: a file that is no model, or models with other parameters.
    """

    def __init__(self, A0: str, A1: str, B0: str, B1: str) -> None:
        models = [weights_of(read_model(path)) for path in (A0, A1, B0, B1)]
        expected = {name: TensorInfo(value) for name, value in models[0].items()}
        for path, parameters in zip((A1, B0, B1), models[1:], strict=True):
            infos = {name: TensorInfo(value) for name, value in parameters.items()}
            if infos != expected:
                message = f"parameters of {path} are not those of {A0}"
                raise popart_exception(message, expected=expected, got=infos)
        self._norms = {
            name: _norms(*(parameters[name].astype(np.float64) for parameters in models))
            for name, value in models[0].items()
            if jnp.issubdtype(value.dtype, jnp.floating)  # of bfloat16 too, which NumPy does not count
        }

    def getRelativeErrors(self) -> dict[str, float]:
        """Return the relative difference of the changes of each parameter."""
        return {
            name: difference**2 / (of_a * of_b + _EPSILON) for name, (of_a, of_b, difference) in self._norms.items()
        }

    def report(self, id: str) -> str:
        """Return a line about a parameter.

        Raises:
            popart_exception: an unknown parameter, with the nearest.
        """
        if id not in self._norms:
            raise unknown_name("a NumericsReport has a parameter", id, self._norms)
        of_a, of_b, _ = self._norms[id]
        error = self.getRelativeErrors()[id]
        return f"|dA - dB|^2 / (|dA||dB| + 1e-8) = {error:.16g} and |dA| = {of_a:.16g} and |dB| = {of_b:.16g}"

    def fullReport(self) -> str:
        """Return the lines about all parameters."""
        return "".join(f"\n{name}:\n{self.report(name)}" for name in self._norms)


def _norms(a0: Any, a1: Any, b0: Any, b1: Any) -> tuple[float, float, float]:
    """Return the norms of the change in training A, of that in training B, and of their difference."""
    of_a, of_b = a1 - a0, b1 - b0
    return float(np.linalg.norm(of_a)), float(np.linalg.norm(of_b)), float(np.linalg.norm(of_a - of_b))
