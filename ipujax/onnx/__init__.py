"""ONNX models as JAX functions.

::

    model = ipujax.onnx.load("model.onnx")
    step = ipu.jit(model)
    scores = step(model.params, images)
    print(step.profile(model.params, images).summary())

    session = ipujax.onnx.session("model.onnx")  # for inference: weights are on the device
    scores = session(images)
"""

from importlib.util import find_spec as _find_spec

if _find_spec("onnx") is None:
    raise ImportError("ipujax.onnx needs onnx: pip install 'ipujax[onnx]'", name="onnx")

from ipujax.front_end import public_names as _public_names
from ipujax.onnx.graphs import ValueInfo as ValueInfo
from ipujax.onnx.model import Model as Model, load as load
from ipujax.onnx.onnx_errors import (
    OnnxError as OnnxError,
    OnnxModelError as OnnxModelError,
    TracedOperandError as TracedOperandError,
    UnsupportedOperatorError as UnsupportedOperatorError,
)
from ipujax.onnx.registry import register as register
from ipujax.onnx.sessions import RepeatedCalls as RepeatedCalls, Session as Session, session as session

__dir__ = _public_names(globals())
