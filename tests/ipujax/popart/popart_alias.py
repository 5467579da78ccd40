"""A plugin of pytest that runs PopART's own tests against `ipujax.popart`, by its name.

::

    cd popart   # a checkout of github:graphcore/popart
    PYTHONPATH=IPUJAX:IPUJAX/tests/ipujax/popart pytest -p popart_alias tests/integration/operators_test/relu_test.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import onnx
import onnx.backend.test.case.node.resize as onnx_resize

from ipujax import popart

sys.modules["popart"] = popart
sys.modules["popart_core"] = popart
onnx.load_from_string = onnx.load_model_from_string  # the name that PopART's tests use

_interpolate = onnx_resize.interpolate_nd


def _interpolate_nd(data: Any, get_coeffs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Interpolate with coefficients of a ratio alone, as onnx did when PopART's tests were written."""
    return _interpolate(data, lambda ratio, scale: get_coeffs(ratio), *args, **kwargs)


onnx_resize.interpolate_nd = _interpolate_nd
