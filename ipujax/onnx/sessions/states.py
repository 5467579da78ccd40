"""Values that one call of a session hands to the next: inputs of a model, and the outputs that become them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from ipujax.front_end import nearest
from ipujax.onnx.call_arguments import check_mapping
from ipujax.onnx.element_types import canonical
from ipujax.onnx.graphs import ValueInfo
from ipujax.onnx.model import Model
from ipujax.onnx.onnx_errors import OnnxError

State = dict[str, dict[str, Any]]  # "params" and "states", arrays by name


@dataclass(frozen=True, slots=True)
class SessionStates:
    """States of a session.

    Args:
        pairs: names of inputs → names of outputs.
        infos: of the inputs, whose sizes are known.
    """

    pairs: Mapping[str, str]
    infos: Mapping[str, ValueInfo]

    @classmethod
    def of(cls, model: Model, pairs: Mapping[str, str]) -> SessionStates:
        """Return states of a model; refuse names that it does not have, one output for two inputs, and open sizes."""
        check_mapping(pairs, "states")
        inputs = {info.name: info for info in model.inputs}
        outputs = {info.name for info in model.outputs}
        for place, names, known in (("inputs", pairs.keys(), inputs), ("outputs", pairs.values(), outputs)):
            for name in names:
                if name not in known:
                    message = f"states names {name!r}, which is none of the {place}"
                    raise OnnxError(message, expected=", ".join(known), got=name, hint=nearest(name, list(known)))
        if len(set(pairs.values())) < len(pairs):
            raise OnnxError("states gives an output to two inputs", expected="an output for each", got=dict(pairs))
        for name in pairs:
            info = inputs[name]
            if info.shape is None or not all(isinstance(size, int) for size in info.shape):
                hint = f"input_shapes={{{name!r}: (…)}} sets them"
                raise OnnxError(f"state {name!r} has open sizes", expected="whole numbers", got=str(info), hint=hint)
        return cls(dict(pairs), {name: inputs[name] for name in pairs})

    def initial(self) -> dict[str, Any]:
        """Return zeros for each state."""
        return {name: jnp.zeros(info.shape or (), canonical(info.dtype)) for name, info in self.infos.items()}

    def after(self, before: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states after a call: outputs, cut to the last rows where they have more."""
        return {name: _last_rows(before[name], outputs[output], name) for name, output in self.pairs.items()}


def _last_rows(before: Any, after: Any, name: str) -> Any:
    """Return a value in the shape of the one before it, the last rows of its longer axis."""
    longer = [axis for axis, (old, new) in enumerate(zip(before.shape, after.shape, strict=False)) if new > old]
    is_alike = after.ndim == before.ndim and after.dtype == before.dtype
    sizes = [size for axis, size in enumerate(after.shape) if axis not in longer]
    if not is_alike or len(longer) > 1 or sizes != [n for axis, n in enumerate(before.shape) if axis not in longer]:
        message = f"the output for state {name!r} does not fit its input"
        expected = f"{before.dtype}{list(before.shape)}, or more along one axis"
        raise OnnxError(message, expected=expected, got=f"{after.dtype}{list(after.shape)}")
    for axis in longer:
        after = lax.slice_in_dim(after, after.shape[axis] - before.shape[axis], None, axis=axis)
    return after
