"""Weights that groups of replicas have values of their own of: `VariableSettings`.

Such a weight has a first axis: of groups in a model, of the replicas that return it on the host, and of all replicas on
the device, where it is divided among them. So has the optimiser's state of it. A replica computes with its own row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import onnx
from jax.sharding import PartitionSpec as P

from ipujax.popart.building import tensor_proto, variable_settings_of
from ipujax.popart.enumerations import VariableRetrievalMode
from ipujax.popart.operators.domain import REPLICA_AXIS
from ipujax.popart.options import ReplicaGrouping

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Rows of a weight in a model, on the host and on the device.

    Args:
        grouping: groups of replicas with equal values.
        returns_all: whether all replicas return it, not one of each group.
    """

    grouping: ReplicaGrouping
    returns_all: bool

    @property
    def groups(self) -> list[list[int]]:
        """Replicas of each group."""
        return [self.grouping.getReplicasAt(group) for group in range(self.grouping.getNumGroups())]

    def host_of_model(self, array: Array) -> Array:
        """Return the rows of the replicas that return the weight."""
        by_group = array if self.grouping.getNumGroups() > 1 else array[None]
        return by_group[self._group_of_replica()] if self.returns_all else by_group

    def model_of_host(self, rows: Array) -> Array:
        """Return the rows of the groups; the values themselves of a single group."""
        by_group = rows[self._first_of_group()] if self.returns_all else rows
        return by_group if self.grouping.getNumGroups() > 1 else by_group[0]

    def device_of_host(self, rows: Any) -> Any:
        """Return the rows of all replicas."""
        return rows if self.returns_all else rows[np.array(self._group_of_replica())]

    def host_of_device(self, rows: Array) -> Array:
        """Return the rows of the replicas that return the weight."""
        return rows if self.returns_all else rows[self._first_of_group()]

    def _group_of_replica(self) -> list[int]:
        return [self.grouping.getGroupAt(replica) for replica in range(self.grouping.numReplicas)]

    def _first_of_group(self) -> list[int]:
        return [group[0] for group in self.groups]


Grouped = Mapping[str, GroupedWeight]  # by the name of the weight


def grouped_weights(model: onnx.ModelProto, replicas: int) -> dict[str, GroupedWeight]:
    """Return the weights of a model that differ between replicas, or that all replicas return.

    Args:
        model: of a builder or a file.
        replicas: of the session.

    Raises:
        popart_exception: groups that do not divide the replicas, or an array of another number of groups.
    """
    settings = variable_settings_of(model)
    # One replica has the values of one group, as they are in the model.
    if replicas == 1:
        return {}
    for tensor in model.graph.initializer:
        if tensor.name in settings:
            settings[tensor.name].shapeOnReplica(tensor.dims, replicas, tensor.name)
    rows = {
        name: GroupedWeight(each.getReplicaGrouping(replicas), each.getRetrievalMode() == _ALL)
        for name, each in settings.items()
    }
    return {name: each for name, each in rows.items() if each.returns_all or each.grouping.getNumGroups() > 1}


_ALL = VariableRetrievalMode.AllReplicas


def keep_one_group(graph: onnx.GraphProto, grouped: Grouped) -> None:
    """Leave the values of the first group in a graph, which is then that of a replica.

    Args:
        graph: graph to change in place.
        grouped: weights of it.
    """
    names = {name for name, each in grouped.items() if each.grouping.getNumGroups() > 1}
    for tensor in graph.initializer:
        if tensor.name in names:
            tensor.CopyFrom(tensor_proto(onnx.numpy_helper.to_array(tensor)[0], tensor.name))
    # Models name initializers among their inputs too, with the shape of all groups.
    for value in graph.input:
        if value.name in names:
            kind = value.type.tensor_type
            dims = next(list(tensor.dims) for tensor in graph.initializer if tensor.name == value.name)
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind.elem_type, dims))


def local(weights: Mapping[str, Any], grouped: Grouped) -> dict[str, Any]:
    """Return the weights of a replica: of grouped ones its row."""
    # The leading axis is that of replicas, of which each has one row.
    return {name: x[0] if name in grouped else x for name, x in weights.items()}


def as_rows(weights: Mapping[str, Any], grouped: Grouped) -> dict[str, Any]:
    """Return the weights of a replica as the rows that they are on the device."""
    return {name: x[None] if name in grouped else x for name, x in weights.items()}


def local_states(states: Any, weights: Mapping[str, Any], grouped: Grouped) -> Any:
    """Return the optimiser's state of a replica; counters of steps are equal on all replicas, and have no row."""
    by_weight = {
        name: {prefix: x[0] if name in grouped and x.shape == weights[name].shape else x for prefix, x in parts.items()}
        for name, parts in states["optimizer"].items()
    }
    return {**states, "optimizer": by_weight} if grouped else states


def states_as_rows(states: Any, rows: Any) -> Any:
    """Return the optimiser's state of a replica as the rows that it is on the device.

    Args:
        states: of a replica.
        rows: the state as it was on the device.
    """
    return jax.tree.map(lambda x, row: x[None] if row.ndim > x.ndim else x, states, rows)


def specs(values: Mapping[str, Any], weights: Mapping[str, Any], grouped: Grouped) -> dict[str, Any]:
    """Return the division of weights, or of parts of their state, among replicas.

    Args:
        values: arrays or trees of them, by name of the weight.
        weights: weights on the device.
        grouped: those that are divided.
    """

    def spec(name: str, x: Any) -> P:
        return P(REPLICA_AXIS) if name in grouped and x.shape == weights[name].shape else P()

    return {name: jax.tree.map(partial(spec, name), value) for name, value in values.items()}


def summed(gradients: Mapping[str, jax.Array], grouped: Grouped, replicas: int, is_mean: bool) -> dict[str, jax.Array]:
    """Return gradients summed over replicas, of grouped weights over the replicas of a group.

    Args:
        gradients: of a replica, by weight; of a loss that is divided by the number of replicas, if they are averaged.
        grouped: grouped weights.
        replicas: number of all replicas.
        is_mean: whether they are averaged.
    """
    # One all-reduce for each update, behind the accumulation: not one for each micro-batch.
    common = jax.lax.psum({name: g for name, g in gradients.items() if name not in grouped}, REPLICA_AXIS)
    own_group = {}
    for name, each in grouped.items():
        if name in gradients:
            total = jax.lax.psum(gradients[name], REPLICA_AXIS, axis_index_groups=each.groups)
            factor = replicas // each.grouping.groupSize if is_mean else 1
            own_group[name] = total if factor == 1 else total * factor
    return {name: own_group.get(name, common.get(name)) for name in gradients}
