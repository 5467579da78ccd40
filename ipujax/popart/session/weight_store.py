"""Parameters and optimiser state of a session: those on the host, and those on the device.

A program moves them: `weightsFromHost`, `weightsToHost`, `writeWeights`, `readWeights`. Between these calls the two may
differ, as on a machine.

Parameters are read from models, and written back after training.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx

import ipujax as ipu
from ipujax.front_end import write_file
from ipujax.popart.building import tensor_proto
from ipujax.popart.exceptions import popart_exception, unknown_name
from ipujax.popart.flow import PyWeightsIO, as_element_type
from ipujax.popart.steps.grouped_weights import Grouped, GroupedWeight
from ipujax.popart.steps.step_plan import STATE_PREFIXES
from ipujax.popart.tensor_info import TensorInfo

Arrays = dict[str, Any]


class WeightStore:
    """Parameters and optimiser state.

    Args:
        weights: parameters by name.
        saved_states: parts of the optimiser's state that the model has, by name.
        grouped: parameters that replicas have values of their own of.
    """

    def __init__(
        self,
        weights: Mapping[str, np.ndarray[Any, Any]],
        saved_states: Mapping[str, np.ndarray[Any, Any]],
        grouped: Grouped,
    ) -> None:
        self.saved_states = saved_states
        self.grouped = grouped
        self.host: dict[str, np.ndarray[Any, Any]] = {name: np.array(value) for name, value in weights.items()}
        self.host_states: dict[str, np.ndarray[Any, Any]] = {}
        self.device: Arrays = {}
        self.is_on_device = False
        self.is_in_sync = False  # whether host and device have the same values
        self.states: Any = None

    def replica_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return element types and shapes of the parameters of a replica."""
        rows = {name: x[:1] if name in self.grouped else x[None] for name, x in self.host.items()}
        return {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in rows.items()}

    def device_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return element types and shapes of the parameters as they are on the device."""
        replicas = {name: each.grouping.numReplicas for name, each in self.grouped.items()}
        return {
            name: jax.ShapeDtypeStruct((replicas[name], *x.shape) if name in replicas else x.shape, x.dtype)
            for name, x in self.replica_shapes().items()
        }

    def rows_of(self, name: str) -> GroupedWeight | None:
        """Return the rows of a parameter or of a part of its state; None where all replicas have the same."""
        weights = (name.removeprefix(each) for each in ("", *STATE_PREFIXES) if name.startswith(each))
        return next((self.grouped[weight] for weight in weights if weight in self.grouped), None)

    def infos(self) -> dict[str, TensorInfo]:
        """Return element types and shapes by name, those of the state too."""
        return {name: TensorInfo(value) for name, value in {**self.host, **self.host_states}.items()}

    def to_device(self, new_states: Callable[[Arrays], Any], placed: Callable[[Any], Any]) -> None:
        """Copy parameters and state of the host to the device.

        Args:
            new_states: makes the optimiser's state for parameters on the device.
            placed: the state as the device has it, which may be shards of replicas.
        """
        # Copies: the step donates its arguments, which would free the host's arrays.
        self.device = {name: jnp.array(self._device_of_host(name, value)) for name, value in self.host.items()}
        self.is_on_device = True
        self.is_in_sync = True
        states = new_states(self.device)
        named = {name: self._device_of_host(name, value) for name, value in self.host_states.items()}
        self.states = placed(_with_named(states, named))

    def to_host(self) -> None:
        """Copy parameters and state of the device to the host."""
        if not self.is_on_device:
            message = "Devicex::prepare() must be called before Devicex::weightsToHost"
            raise popart_exception(message, got="no weights on the device", hint="session.prepareDevice() first")
        if any(x.is_deleted() for x in jax.tree.leaves((self.device, self.states))):
            hint = "session.weightsFromHost(), to go on with those of the host"
            raise popart_exception("the weights on the device were lost in a step that raised", hint=hint)
        states = named_states(ipu.optim.unshard(self.states))
        self.host = {name: self.host_of_device(name, np.asarray(x)) for name, x in self.device.items()}
        self.host_states = {name: self.host_of_device(name, np.asarray(x)) for name, x in states.items()}
        self.is_in_sync = True

    def _device_of_host(self, name: str, array: Any) -> Any:
        rows = self.rows_of(name)
        return array if rows is None or not array.ndim else rows.device_of_host(array)

    def host_of_device(self, name: str, array: Any) -> Any:
        """Return a parameter, or a part of its state, as the host has it; counters of steps have no rows."""
        rows = self.rows_of(name)
        return array if rows is None or not array.ndim else rows.host_of_device(array)

    def host_of_model(self, weights: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Return the parameters, or parts of states, of a model as the host has them."""

        def on_host(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            rows = self.rows_of(name)
            return array if rows is None or not array.ndim else rows.host_of_model(array)

        return {name: on_host(name, x) for name, x in weights.items()}

    def read(self, weights: PyWeightsIO) -> None:
        """Write parameters of the host into a program's arrays.

        Args:
            weights: the arrays.

        Raises:
            popart_exception: an unknown name, with the nearest, or another size.
        """
        values = {**self.host, **self.host_states}
        for name in weights.weights:
            if name not in values:
                raise unknown_name("PyWeightsIO has a weight", name, values)
            weights.write(name, values[name])

    def write(self, weights: PyWeightsIO) -> None:
        """Read parameters of the host from a program's arrays; all are checked before one changes.

        Args:
            weights: the arrays.

        Raises:
            popart_exception: an unknown name, with the nearest, or another size or element type.
        """
        infos = self.infos()
        for name in weights.weights:
            if name not in infos:
                raise unknown_name("PyWeightsIO has a weight", name, infos)
        # All are read before one is set: a wrong size changes nothing.
        values = {name: weights.read(name, infos[name]) for name in weights.weights}
        self.is_in_sync = False
        for name, value in values.items():
            (self.host if name in self.host else self.host_states)[name] = value

    def reset(self, weights: Mapping[str, np.ndarray[Any, Any]], ignores_missing: bool) -> None:
        """Replace parameters of the host by those of a model.

        Args:
            weights: of the model, by name.
            ignores_missing: whether parameters that this session lacks are left out.

        Raises:
            popart_exception: a parameter that this session lacks, or of another shape or element type.
        """
        infos = self.infos()
        for name, value in weights.items():
            if name not in infos and not ignores_missing:
                hint = "ignoreWeightsInModelWithoutCorrespondingHostWeight=True"
                raise popart_exception(
                    f"resetWeights, no tensor '{name}' in tensors", expected=", ".join(infos), hint=hint
                )
            if name in infos and TensorInfo(value) != infos[name]:
                message = f"weight {name!r} of the model does not fit"
                raise popart_exception(message, expected=infos[name], got=TensorInfo(value))
            if name in infos:
                as_element_type(f"weight {name!r}", value, infos[name])
        self.is_in_sync = False
        for name, value in weights.items():
            if name in self.host:
                self.host[name] = np.array(value)
            elif name in self.host_states:
                self.host_states[name] = np.array(value)


def named_states(states: Any) -> dict[str, Any]:
    """Return the optimiser's state by the names of its tensors: prefix and weight.

    Args:
        states: of a session; None for none.
    """
    by_weight = {} if states is None else states["optimizer"]
    return {prefix + weight: value for weight, parts in by_weight.items() for prefix, value in parts.items()}


def _with_named(states: Any, named: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    if states is None or not named:
        return states
    replaced = {
        weight: {prefix: jnp.array(named.get(prefix + weight, value)) for prefix, value in parts.items()}
        for weight, parts in states["optimizer"].items()
    }
    return {**states, "optimizer": replaced}


def changed_model(model: onnx.ModelProto, store: WeightStore) -> onnx.ModelProto:
    """Return a model with the parameters of the host; the optimiser's state is among them, by PopART's names.

    Args:
        model: of the session.
        store: its parameters.
    """
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    unchanged = [tensor for tensor in changed.graph.initializer if tensor.name not in store.host]
    rows = {name: store.rows_of(name) for name in (*store.host, *store.host_states)}
    values = {
        name: each.model_of_host(x) if (each := rows[name]) and x.ndim else x
        for name, x in {**store.host, **store.host_states}.items()
    }
    # The state goes into the initialisers, so that training can go on from a saved model.
    written = [tensor_proto(np.asarray(value), name) for name, value in values.items()]
    untouched = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in unchanged]
    del changed.graph.initializer[:]
    changed.graph.initializer.extend([*written, *untouched])
    return changed


def saved_variables(store: WeightStore) -> dict[str, np.ndarray[Any, Any]]:
    """Return parameters and state of the device for a file.

    Args:
        store: of the session.
    """
    store.to_host()
    return {**store.host, **store.host_states}


def save_arrays(path: str, arrays: Mapping[str, Any]) -> None:
    """Save arrays to a file of NumPy.

    Args:
        path: of the file.
        arrays: by name.
    """
    content = io.BytesIO()
    np.savez(content, **dict(arrays))
    write_file(path, content.getvalue())
