"""`session`: an ONNX model whose weights, and values that one call hands to the next, are state on the device.

Such values are inputs of a model, and the outputs that become them. State is a donated argument of the compiled
function, and a result: it is uploaded once, and no part of a call's cycles.
Repeated calls are a loop on the device: each call's inputs are made of those and the outputs of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import ipujax as ipu
from ipujax.front_end import NotCopied, nearest
from ipujax.onnx.budget import DEFAULT_MAX_BYTES, DEFAULT_MAX_UNROLLED_NODES
from ipujax.onnx.call_arguments import check_mapping
from ipujax.onnx.element_types import canonical
from ipujax.onnx.graphs import ValueInfo
from ipujax.onnx.model import Model, load
from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.reading import Source

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


class Session(NotCopied):
    """An ONNX model with its state on a device, made by `session`.

    Attributes:
        inputs: name, dtype and shape of each argument of a call: inputs of the model that are no state.
        outputs: the same of results.

    Example::

        session = ipujax.onnx.session("model.onnx")
        scores = session(images)
        print(session.profile(images).summary())
    """

    COPY_HINT: ClassVar[str] = "a session of its own: ipujax.onnx.session(path)"

    def __init__(
        self, model: Model, states: SessionStates, device: ipu.IPUModel | ipu.CPU | None, options: ipu.Options | None
    ) -> None:
        self._model = model
        self._states = states
        self._settings: dict[str, Any] = {"device": device, "options": options}
        self.inputs: tuple[ValueInfo, ...] = tuple(info for info in model.inputs if info.name not in states.pairs)
        results = set(states.pairs.values())
        self.outputs: tuple[ValueInfo, ...] = tuple(info for info in model.outputs if info.name not in results)
        self._state: State | None = None

        def step(state: State, *inputs: Any) -> tuple[State, tuple[Any, ...]]:
            return self.next_state(state, dict(zip([info.name for info in self.inputs], inputs, strict=True)))

        step.__name__ = model.__name__
        self._step = ipu.jit(step, **self._settings, donate_argnums=0)

    def __call__(self, *inputs: Any) -> Any:
        """Return the model's outputs.

        Args:
            inputs: one for each of `self.inputs`, as `Model` takes them.

        Returns:
            The output, or a tuple of them if there are several.

        Raises:
            OnnxError: arguments of other names, shapes or dtypes; a node that cannot be evaluated on its operands.
        """
        self._state, results = self._step(self.checked_state(inputs), *inputs)
        return results[0] if len(results) == 1 else results

    def run(self, names: Sequence[str] | None, feed: Mapping[str, Any]) -> list[Any]:
        """Return outputs by name, as onnxruntime's `InferenceSession.run`.

        Args:
            names: of outputs; None for all.
            feed: inputs by name.

        Raises:
            OnnxError: an unknown name, or as `__call__`.
        """
        check_mapping(feed, "feed")
        known = [info.name for info in self.outputs]
        for label, given, expected in (
            ("output", names or [], known),
            ("input", feed, [info.name for info in self.inputs]),
        ):
            for name in given:
                if name not in expected:
                    raise OnnxError(f"the session has no {label} {name!r}", expected=", ".join(expected), got=name)
        missing = [info.name for info in self.inputs if info.name not in feed]
        if missing:
            raise OnnxError(f"the feed has no input {missing[0]!r}", expected=", ".join(missing))
        # Ended as in onnxruntime, after which a program may write others to its arrays: JAX reads them where they are.
        results = jax.block_until_ready(self(*(feed[info.name] for info in self.inputs)))
        arrays = dict(zip(known, (results,) if len(known) == 1 else results, strict=True))
        return [arrays[name] for name in names or known]

    def reset(self) -> None:
        """Upload weights and initial states again, before the next call."""
        self._state = None

    def profile(self, *inputs: Any) -> ipu.Profile:
        """Return the static profile of a call on arrays or `jax.ShapeDtypeStruct`s; nothing is run."""
        return self.lower(*inputs).compile().profile

    def profile_call(self, *inputs: Any) -> tuple[Any, ipu.Profile]:
        """Return the results of a call and the profile of its run; the state stays as it is."""
        state = self.checked_state(inputs)
        (_, results), profile = self.lower(*inputs).compile().profile_call(state, *inputs)
        return results[0] if len(results) == 1 else results, profile

    def lower(self, *inputs: Any) -> Any:
        """Return the lowered program of a call, as `ipu.jit(…).lower`."""
        self.check_number(inputs)
        return self._step.lower(self.initial_state(), *inputs)

    def repeat(self, calls: int, between: Between) -> RepeatedCalls:
        """Return a number of calls as one program, in a loop on the device.

        Args:
            calls: number of them.
            between: JAX function of the inputs and the outputs of one call, both by name; returns the inputs of the
                next call that change, by name, with the same shapes: the token of the largest score, a position.

        Raises:
            OnnxError: a number of calls below 1.

        Example::

            def next_token(inputs, outputs):
                token = outputs["logits"][:, -1:].argmax(-1)
                return {"input_ids": token, "position_ids": inputs["position_ids"] + 1}

            decode = session.repeat(64, next_token)
            logits, following = decode(token, position)
        """
        if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
            raise OnnxError("calls must be a number of calls", expected="an int ≥ 1", got=repr(calls))
        return RepeatedCalls(self, calls, between, **self._settings)

    @property
    def name(self) -> str:
        """Of the model: that of its file."""
        return self._model.__name__

    def check_number(self, inputs: Sequence[Any]) -> None:
        """Refuse a call with another number of inputs."""
        if len(inputs) != len(self.inputs):
            expected = f"{len(self.inputs)}: {'; '.join(map(str, self.inputs)) or 'none'}"
            message = "the session was called with the wrong number of inputs"
            raise OnnxError(message, expected=expected, got=len(inputs))

    def checked_state(self, inputs: Sequence[Any]) -> State:
        """Return the state on the device, uploaded if need be, for a call with these inputs; refuse wrong ones."""
        self.check_number(inputs)
        by_name = dict(zip([info.name for info in self.inputs], inputs, strict=True))
        self._model.__check_arguments__({}, *(by_name.get(info.name, 0) for info in self._model.inputs))
        # Copies go to the device: a call consumes them, and the model keeps its own.
        # A call that failed while it ran has consumed them, too.
        is_lost = self._state is None or any(x.is_deleted() for x in jax.tree.leaves(self._state))
        state = jax.tree.map(jnp.array, self.initial_state()) if is_lost else self._state
        assert state is not None
        self._state = state
        return state

    def take_state(self, state: State) -> None:
        """Keep the state that calls have left on the device."""
        self._state = state

    def initial_state(self) -> State:
        """Return weights, and zeros for states."""
        return {"params": self._model.params, "states": self._states.initial()}

    def next_state(self, state: State, inputs: Mapping[str, Any]) -> tuple[State, tuple[Any, ...]]:
        """Return the state after a call, and the results that are no state."""
        values = {**state["states"], **inputs}
        outputs = self._model(state["params"], *(values[info.name] for info in self._model.inputs))
        arrays = (outputs,) if len(self._model.outputs) == 1 else outputs
        by_name = dict(zip([info.name for info in self._model.outputs], arrays, strict=True))
        states = self._states.after(state["states"], by_name)
        return {"params": state["params"], "states": states}, tuple(by_name[info.name] for info in self.outputs)

    def __repr__(self) -> str:
        inputs, outputs = ("; ".join(map(str, infos)) for infos in (self.inputs, self.outputs))
        sizes = [sum(np.size(x) * x.dtype.itemsize for x in part.values()) for part in self.initial_state().values()]
        parts = f"{sizes[0]:,} bytes of weights" + (f", {sizes[1]:,} of states" if self._states.pairs else "")
        return f"<ONNX session {self.name}: ({inputs}) → ({outputs}), {parts}>"


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
        session: Session,
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


def session(
    model: Source,
    device: ipu.IPUModel | ipu.CPU | None = None,
    options: ipu.Options | None = None,
    states: Mapping[str, str] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    static: Mapping[str, Any] | None = None,
    max_sizes: Mapping[str, int] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    max_unrolled_nodes: int = DEFAULT_MAX_UNROLLED_NODES,
) -> Session:
    """Return an inference session: an ONNX model whose weights are on the device, wherever its exporter put them.

    Args:
        model: path of a file, its bytes, or an `onnx.ModelProto`.
        device: it runs on; the default device if None.
        options: of the compiler.
        states: inputs that are state on the device, by name, and the output that each becomes for the next call: the
            caches of keys and values of a decoder. They begin with zeros, and must have whole sizes: `input_shapes`
            sets them. Where an output is longer than its input along one axis, as a cache with new rows behind the
            past ones, the last rows are kept: rows that stand for none must be hidden by the model's mask.
        input_shapes: as `load` has them.
        static: as `load`.
        max_sizes: as `load`.
        max_bytes: as `load`.
        max_unrolled_nodes: as `load`.

    Returns:
        A session, called with the model's other inputs.

    Raises:
        OnnxError: as `load`; states that do not belong to the model, or without a size.
    """
    loaded = load(model, input_shapes, static, max_sizes, max_bytes, max_unrolled_nodes)
    if isinstance(model, str | Path):
        loaded.__name__ = Path(model).stem
    weights = loaded.with_constant_scalars()
    return Session(weights, SessionStates.of(weights, states or {}), device, options)
