"""Parameters in models: read from them, and written back after training."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from ipujax.front_end import write_file
from ipujax.popart.building import tensor_proto
from ipujax.popart.onnx_failures import popart_step
from ipujax.popart.session.weight_store import WeightStore


def weights_of(model: onnx.ModelProto) -> dict[str, np.ndarray[Any, Any]]:
    """Return the parameters of a model by name.

    Args:
        model: with its weights in itself, or in files of their own.
    """
    with popart_step("the parameters of the model cannot be read"):
        return {tensor.name: np.array(onnx.numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}


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
