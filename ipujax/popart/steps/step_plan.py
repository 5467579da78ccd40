"""`StepPlan`, the parts of a session that its functions read: graph, placement, anchors, batches, parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ipujax.popart.enumerations import MeanReductionStrategy, ReductionType
from ipujax.popart.flow import StepShape
from ipujax.popart.model_graph.annotated_graph import AnnotatedGraph
from ipujax.popart.model_graph.stage_placement import Placement
from ipujax.popart.optimisers import Optimizer
from ipujax.popart.options import AutomaticLossScalingSettings
from ipujax.popart.steps.anchor_names import Anchors
from ipujax.popart.tensor_info import TensorInfo

KEY = "session's random key"  # the row of keys among the inputs of a step; no tensor has a name with spaces


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
        has_keys: whether operators draw random numbers.
        loss: name of the loss; empty in inference.
        optimizer: of training.
        reduction: of gradients over accumulation and replicas.
        mean_strategy: when a mean divides.
        loss_scaling: settings of automatic loss scaling.
    """

    graph: AnnotatedGraph
    placement: Placement
    anchors: Anchors
    step: StepShape
    trained: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    zeros: Mapping[str, TensorInfo] = field(default_factory=lambda: MappingProxyType({}))
    has_keys: bool = False
    loss: str = ""
    optimizer: Optimizer | None = None
    reduction: ReductionType = ReductionType.Sum
    mean_strategy: MeanReductionStrategy = MeanReductionStrategy.Post
    loss_scaling: AutomaticLossScalingSettings = field(default_factory=AutomaticLossScalingSettings)

    @property
    def is_mean(self) -> bool:
        """True if gradients are averaged over accumulation and replicas."""
        return self.reduction == ReductionType.Mean

    @property
    def runs_batches_on_host(self) -> bool:
        """True if the host runs a step batch by batch: `ipu.pipeline`, stages and phases may not stand in a loop."""
        return self.placement.has_stages or self.placement.has_phases
