"""A plugin of pytest that runs PopART's own tests against `ipujax.popart`, by its name.

::

    cd popart   # a checkout of github:graphcore/popart
    PYTHONPATH=IPUJAX:IPUJAX/tests/ipujax/popart pytest -p popart_alias tests/integration/operators_test/relu_test.py
"""

from __future__ import annotations

import sys

import onnx

from ipujax import popart

sys.modules["popart"] = popart
sys.modules["popart_core"] = popart
onnx.load_from_string = onnx.load_model_from_string  # the name that PopART's tests use
