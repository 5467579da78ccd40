"""Errors of ONNX models, all `ipujax.IpuError`s."""

from ipujax.front_end import ArgumentValueError


class OnnxError(ArgumentValueError):
    """An ONNX model that cannot be read, or cannot be evaluated with these arguments."""


class OnnxModelError(OnnxError):
    """A file or model that is not valid ONNX, or is refused for safety."""


class UnsupportedOperatorError(OnnxError):
    """Operators, or attributes of operators, without an implementation; all of a model in one error."""


class TracedOperandError(OnnxError):
    """A traced operand where the shape of a result, or a branch, depends on its values."""


class WideValueError(OnnxError):
    """A 64-bit value that 32 bits do not hold, where JAX is not set to 64 bits."""


class OutsideError(OnnxError):
    """An index, axis or length that a node's operands do not have, known while the model is read or traced."""
