"""`StepPlan`, the parts of a session that its functions read: graph, placement, anchors, batches, parameters.

Anchors are named in a `DataFlow`: tensors of the model, gradients, weights and the state of the optimiser. Another name
is an error with the nearest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax

from ipujax.popart.enumerations import MeanReductionStrategy, ReductionType
from ipujax.popart.exceptions import unknown_name
from ipujax.popart.flow import AnchorReturnType, DataFlow, StepShape
from ipujax.popart.flow.host_streams import HostStreams
from ipujax.popart.model_graph.annotated_graph import AnnotatedGraph
from ipujax.popart.model_graph.stage_placement import Placement
from ipujax.popart.optimisers import Optimizer
from ipujax.popart.options import AutomaticLossScalingSettings
from ipujax.popart.reserved_names import ACCUMULATOR, GRADIENT, PREFIXES, UPDATED
from ipujax.popart.steps.grouped_weights import Grouped
from ipujax.popart.tensor_info import TensorInfo

# Prefixes of the state that an optimiser has for each weight.
STATE_PREFIXES = tuple(
    PREFIXES[f"reserved{name}Prefix"] for name in ("Accl", "Accl1", "Accl2", "Accl3", "Step", "Accum")
)


def state_of(name: str, weights: Iterable[str]) -> tuple[str, str] | None:
    """Return prefix and weight of the name of a part of the optimiser's state; None for other names.

    Args:
        name: of a tensor.
        weights: names that may follow the prefix.
    """
    names = set(weights)
    pairs = ((prefix, name.removeprefix(prefix)) for prefix in STATE_PREFIXES if name.startswith(prefix))
    return next((pair for pair in pairs if pair[1] in names), None)


@dataclass(frozen=True, slots=True)
class Anchors:
    """Anchors by kind: values, gradients, weights, state.

    Args:
        kinds: return type of each anchor, in the order of the data flow.
        values: names of tensors of a micro-batch.
        gradients: names of tensors whose gradients are anchored.
        weights: names of parameters, as they are after an update.
        states: prefix and weight by anchor, of the optimiser's state; of updated weights, too.
        accumulators: names of parameters whose sums of gradients are anchored, as they are after each micro-batch.
    """

    kinds: Mapping[str, AnchorReturnType]
    values: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    states: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    accumulators: tuple[str, ...] = ()

    @property
    def of_micro_batches(self) -> tuple[str, ...]:
        """Anchors that each micro-batch has a value of."""
        return (*self.values, *(GRADIENT + name for name in self.gradients))

    @property
    def of_batches(self) -> tuple[str, ...]:
        """Anchors that each update of the weights has a value of."""
        return (*self.weights, *self.states)


def anchors_of(flow: DataFlow, tensors: Iterable[str], weights: Sequence[str], is_training: bool) -> Anchors:
    """Return the anchors of a data flow.

    Args:
        flow: of the session.
        tensors: names of all tensors of the model.
        weights: names of the parameters that are trained.
        is_training: whether there are gradients.

    Raises:
        popart_exception: a tensor that does not exist, with the nearest.
    """
    names = set(tensors)
    kinds = {name: flow.art(name) for name in flow.anchors()}
    values: list[str] = []
    gradients: list[str] = []
    updated: list[str] = []
    accumulators: list[str] = []
    states: dict[str, tuple[str, str]] = {}
    for name in kinds:
        # A tensor of the model goes before a state: its name may begin with a reserved prefix.
        state = state_of(name, names)
        if name in names:
            (updated if is_training and name in weights else values).append(name)
        elif is_training and name.startswith(GRADIENT) and name.removeprefix(GRADIENT) in names:
            gradients.append(name.removeprefix(GRADIENT))
        elif is_training and name.startswith(UPDATED) and name.removeprefix(UPDATED) in weights:
            states[name] = (UPDATED, name.removeprefix(UPDATED))
        elif is_training and name.startswith(ACCUMULATOR) and name.removeprefix(ACCUMULATOR) in weights:
            accumulators.append(name.removeprefix(ACCUMULATOR))
        elif is_training and state is not None:
            states[name] = state
        else:
            gradients_of_tensors = {GRADIENT + tensor for tensor in names} if is_training else set()
            raise unknown_name("DataFlow has an anchor", name, names | gradients_of_tensors)
    return Anchors(kinds, tuple(values), tuple(gradients), tuple(updated), states, tuple(accumulators))


def base_names(flow: DataFlow, tensors: Iterable[str]) -> list[str]:
    """Return the tensors of the model that anchors name, directly or by their gradients.

    Args:
        flow: of the session.
        tensors: names of all tensors of the model.
    """
    names = set(tensors)
    stripped = [name if name in names else name.removeprefix(GRADIENT) for name in flow.anchors()]
    return [name for name in stripped if name in names]


KEY = "session's random key"  # the row of keys among the inputs of a step; no tensor has a name with spaces


def key_of(rows: Mapping[str, Any]) -> jax.Array | None:
    """Return the key of a micro-batch by its rows; None without random operators."""
    return jax.random.wrap_key_data(rows[KEY][0]) if KEY in rows else None


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Parts of a session that its functions read.

    Args:
        graph: with annotations.
        placement: stages and phases.
        anchors: results.
        step: batches, accumulation and replicas.
        trained: names of the parameters that the optimiser updates.
        buffers: names of the parameters that operators update.
        frozen: names of all other parameters.
        zeros: element type and shape of the tensors whose gradients are anchored, without parameters.
        loss: name of the loss; empty in inference.
        optimizer: of training.
        reduction: of gradients over accumulation and replicas.
        mean_strategy: when a mean divides.
        loss_scaling: settings of automatic loss scaling.
        least_sharded: elements of the smallest parameter whose optimiser state is sharded over replicas; 0 for none.
        host_streams: of gradients, for `hostAllReduce`.
        grouped: parameters that groups of replicas have values of their own of.
    """

    graph: AnnotatedGraph
    placement: Placement
    anchors: Anchors
    step: StepShape
    trained: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    zeros: Mapping[str, TensorInfo] = field(default_factory=lambda: MappingProxyType({}))
    loss: str = ""
    optimizer: Optimizer | None = None
    reduction: ReductionType = ReductionType.Sum
    mean_strategy: MeanReductionStrategy = MeanReductionStrategy.Post
    loss_scaling: AutomaticLossScalingSettings = field(default_factory=AutomaticLossScalingSettings)
    least_sharded: int = 0
    host_streams: HostStreams = field(default_factory=lambda: HostStreams(()))
    grouped: Grouped = field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_mean(self) -> bool:
        """True if gradients are averaged over accumulation and replicas."""
        return self.reduction == ReductionType.Mean

    @property
    def runs_batches_on_host(self) -> bool:
        """True if the host runs a step batch by batch: `ipu.pipeline`, stages and phases may not stand in a loop."""
        return self.placement.has_stages or self.placement.has_phases
