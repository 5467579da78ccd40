"""Parameters and optimiser state of a session: those on the host, and those on the device.

A program moves them: `weightsFromHost`, `weightsToHost`, `writeWeights`, `readWeights`. Between these calls the two may
differ, as on a machine.

Parameters are read from models, and written back after training.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import onnx

import ipujax as ipu
from ipujax.front_end import write_file
from ipujax.popart.building import tensor_proto
from ipujax.popart.exceptions import popart_exception, unknown_name
from ipujax.popart.flow import PyWeightsIO, as_element_type
from ipujax.popart.tensor_info import TensorInfo

Arrays = dict[str, Any]


class WeightStore:
    """Parameters and optimiser state.

    Args:
        weights: parameters by name.
        saved_states: parts of the optimiser's state that the model has, by name.
    """

    def __init__(
        self, weights: Mapping[str, np.ndarray[Any, Any]], saved_states: Mapping[str, np.ndarray[Any, Any]]
    ) -> None:
        self.saved_states = saved_states
        self.host: dict[str, np.ndarray[Any, Any]] = {name: np.array(value) for name, value in weights.items()}
        self.host_states: dict[str, np.ndarray[Any, Any]] = {}
        self.device: Arrays = {}
        self.is_on_device = False
        self.is_in_sync = False  # whether host and device have the same values
        self.states: Any = None

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
        self.device = {name: jnp.array(value) for name, value in self.host.items()}
        self.is_on_device = True
        self.is_in_sync = True
        states = new_states(self.device)
        self.states = placed(_with_named(states, self.host_states))

    def to_host(self) -> None:
        """Copy parameters and state of the device to the host."""
        if not self.is_on_device:
            message = "Devicex::prepare() must be called before Devicex::weightsToHost"
            raise popart_exception(message, got="no weights on the device", hint="session.prepareDevice() first")
        self.host = {name: np.asarray(value) for name, value in self.device.items()}
        self.host_states = {name: np.asarray(x) for name, x in named_states(ipu.optim.unshard(self.states)).items()}
        self.is_in_sync = True

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
    values = {**store.host, **store.host_states}
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
