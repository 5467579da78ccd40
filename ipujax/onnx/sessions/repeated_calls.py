"""Values that one call of a session hands to the next, and calls in a loop on the device.

States are inputs of a model, and the outputs that become them. A loop makes each call's inputs of those and the outputs
of the one before; the outputs of all calls are stacked, and leave the device one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import lax

import ipujax as ipu
from ipujax.front_end import NotCopied, nearest
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


Values = Mapping[str, Any]
Between = Callable[[Values, Values], Values]


class StatefulModel(Protocol):
    """What the loop needs of a session, see `Session`."""

    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]

    @property
    def name(self) -> str:
        """Of the model."""

    def check_number(self, inputs: Sequence[Any]) -> None:
        """Refuse a call with another number of inputs."""

    def initial_state(self) -> State:
        """Return weights, and zeros for states."""

    def checked_state(self, inputs: Sequence[Any]) -> State:
        """Return the state on the device for a call with these inputs."""

    def take_state(self, state: State) -> None:
        """Keep the state that calls have left."""

    def next_state(self, state: State, inputs: Values) -> tuple[State, tuple[Any, ...]]:
        """Return the state after a call, and its outputs."""


class RepeatedCalls(NotCopied):
    """A number of calls of a session as one program, made by `Session.repeat`.

    Args:
        session: whose state the calls read and change.
        calls: number of them.
        between: of inputs and outputs of one call, by name, the inputs of the next: those that change.
        device: of the session.
        options: of the session.
    """

    COPY_HINT: ClassVar[str] = "those of another session: ipujax.onnx.session(path).repeat(calls)"

    def __init__(
        self,
        session: StatefulModel,
        calls: int,
        between: Between,
        device: ipu.IPUModel | ipu.CPU | None,
        options: ipu.Options | None,
    ) -> None:
        self._session = session
        self._names = [info.name for info in session.inputs]

        def loop(state: State, *inputs: Any) -> tuple[State, tuple[Any, Any]]:
            start = (state, dict(zip(self._names, map(jnp.asarray, inputs), strict=True)))

            def call(carried: Any, _: None) -> tuple[Any, Any]:
                before, named = carried
                after, outputs = session.next_state(before, named)
                by_name = dict(zip([info.name for info in session.outputs], outputs, strict=True))
                return (after, _followed(named, between(named, by_name))), outputs

            (after, last), outputs = lax.scan(call, start, None, length=calls)
            return after, (outputs[0] if len(outputs) == 1 else outputs, tuple(last[name] for name in self._names))

        loop.__name__ = f"{session.name}_{calls}_calls"
        self._loop = ipu.jit(loop, device=device, options=options, donate_argnums=0)

    def __call__(self, *inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        """Run the calls.

        Args:
            inputs: of the first call, one for each of the session's.

        Returns:
            The outputs of all calls, with a first axis of calls, as one call returns them; the inputs of the call that
            would follow.

        Raises:
            OnnxError: as a call of the session; inputs of the next call that are not like those of the last.
        """
        state = self._session.checked_state(inputs)
        after, results = self._loop(state, *inputs)
        self._session.take_state(after)
        return results

    def profile(self, *inputs: Any) -> ipu.Profile:
        """Return the static profile of all calls on arrays or `jax.ShapeDtypeStruct`s; nothing is run."""
        self._session.check_number(inputs)
        return self._loop.profile(self._session.initial_state(), *inputs)


def _followed(before: Values, changes: Values) -> dict[str, Any]:
    """Return the inputs of the next call; refuse names, shapes and kinds that the last call's do not have."""
    unknown = sorted(set(changes) - set(before))
    if unknown:
        message = f"the function between calls returns {unknown[0]!r}, which is no input of the session"
        raise OnnxError(message, expected=", ".join(before), got=unknown[0])
    return {name: _alike(name, value, changes.get(name, value)) for name, value in before.items()}


def _alike(name: str, before: Any, after: Any) -> jax.Array:
    array = jnp.asarray(after)
    is_floating: Sequence[bool] = [jnp.issubdtype(x.dtype, jnp.floating) for x in (before, array)]
    if array.shape != before.shape or is_floating[0] != is_floating[1]:
        message = f"the function between calls changes the shape or the kind of input {name!r}"
        expected = f"{before.dtype}{list(before.shape)}"
        raise OnnxError(message, expected=expected, got=f"{array.dtype}{list(array.shape)}")
    return array.astype(before.dtype)
