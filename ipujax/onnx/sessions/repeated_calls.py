"""Calls of a session in a loop on the device: each call's inputs are made of those and the outputs of the one before.

Input: what the first call reads, and a JAX function from one call to the next. Output: the outputs of all calls,
stacked, which leave the device one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import lax

import ipujax as ipu
from ipujax.front_end import NotCopied
from ipujax.onnx.graphs import ValueInfo
from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.sessions.states import State

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
