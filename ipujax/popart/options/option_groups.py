"""Groups of session options: execution phases, memories of tensors, loss scaling and the like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ipujax.popart.enumerations import (
    AccumulateOuterFragmentSchedule,
    AutodiffStitchStrategy,
    BatchSerializationBatchSchedule,
    BatchSerializationMethod,
    BatchSerializationTransformContext,
    CommGroupType,
    ExecutionPhaseIOSchedule,
    ExecutionPhaseSchedule,
    GradientTensorTrackingMethod,
    ReplicatedTensorSharding,
    TensorStorage,
    TileSet,
)
from ipujax.popart.exceptions import popart_attribute_error, popart_exception, unknown_name


class OptionGroup:
    """Base of the groups: an attribute that a group lacks is refused, with the nearest one."""

    _names: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: object) -> None:
        names = self._names or tuple(getattr(type(self), "__dataclass_fields__", ()))
        if name not in names:
            raise unknown_name(f"{type(self).__name__} has an option", name, names, popart_attribute_error)
        object.__setattr__(self, name, value)


@dataclass
class CommGroup(OptionGroup):
    """Replicas of a collective.

    Args:
        type: how groups are formed.
        replicaGroupSize: replicas of a group; 0 for all.
    """

    type: CommGroupType = CommGroupType.All
    replicaGroupSize: int = 0


class TensorLocation(OptionGroup):
    """Memory of tensors, and whether replicas divide them.

    Args:
        storage: tiles, or streaming memory.
        settings: `ReplicatedTensorSharding`, tile sets (of loads, then of storage) and a `CommGroup`, in any order.
    """

    _names = ("storage", "loadTileSet", "storageTileSet", "replicatedTensorSharding", "shardingDomain")

    def __init__(self, storage: TensorStorage = TensorStorage.OnChip, *settings: object, **keywords: object) -> None:
        # PopART overloads the constructor ten times; the types of the settings tell them apart.
        values = [*settings, *keywords.values()]
        for value in values:
            if not isinstance(value, TileSet | ReplicatedTensorSharding | CommGroup):
                expected = "a TileSet, a ReplicatedTensorSharding or a CommGroup"
                raise popart_exception("unknown setting of a TensorLocation", expected=expected, got=repr(value))
        tile_sets = [value for value in values if isinstance(value, TileSet)]
        shardings = [value for value in values if isinstance(value, ReplicatedTensorSharding)]
        groups = [value for value in values if isinstance(value, CommGroup)]
        self.storage = TensorStorage(storage)
        self.loadTileSet = tile_sets[0] if tile_sets else TileSet.Compute
        self.storageTileSet = tile_sets[1] if len(tile_sets) > 1 else TileSet.Compute
        self.replicatedTensorSharding = shardings[0] if shardings else ReplicatedTensorSharding.Off
        self.shardingDomain = groups[0] if groups else CommGroup()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorLocation) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TensorLocation({self.storage.name}, sharding {self.replicatedTensorSharding.name})"


class TensorLocationSettings(OptionGroup):
    """Memory of one kind of tensors.

    Args:
        location: a `TensorLocation`, or a `TensorStorage`.
        minElementsForOffChip: smaller tensors stay in tile memory.
        minElementsForReplicatedTensorSharding: smaller tensors are whole on each replica.
    """

    _names = ("location", "minElementsForOffChip", "minElementsForReplicatedTensorSharding")

    def __init__(
        self,
        location: TensorLocation | TensorStorage | None = None,
        minElementsForOffChip: int = 2,
        minElementsForReplicatedTensorSharding: int = 8192,
        storage: TensorStorage | None = None,
    ) -> None:
        memory = location if storage is None else storage
        self.location = memory if isinstance(memory, TensorLocation) else TensorLocation(memory or TensorStorage.OnChip)
        self.minElementsForOffChip = minElementsForOffChip
        self.minElementsForReplicatedTensorSharding = minElementsForReplicatedTensorSharding

    def is_off_chip(self, elements: int) -> bool:
        """Return whether a tensor is in streaming memory.

        Args:
            elements: number of its elements.
        """
        return self.location.storage is TensorStorage.OffChip and elements >= self.minElementsForOffChip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorLocationSettings) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TensorLocationSettings({self.location!r}, {self.minElementsForOffChip})"


@dataclass
class ExecutionPhaseSettings(OptionGroup):
    """Execution phases.

    Args:
        phases: number of phases; 0 for none.
        stages: IPUs that alternate: 1, or 2.
        weightIOSchedule: when weights are loaded.
        activationIOSchedule: when activations are.
        optimizerStateIOSchedule: when the optimiser's state is.
        accumulatorIOSchedule: when accumulators are.
        schedule: order of loads, computation and stores.
    """

    phases: int = 0
    stages: int = 2
    weightIOSchedule: ExecutionPhaseIOSchedule = ExecutionPhaseIOSchedule.Preload
    activationIOSchedule: ExecutionPhaseIOSchedule = ExecutionPhaseIOSchedule.Preload
    optimizerStateIOSchedule: ExecutionPhaseIOSchedule = ExecutionPhaseIOSchedule.OnDemand
    accumulatorIOSchedule: ExecutionPhaseIOSchedule = ExecutionPhaseIOSchedule.Preload
    schedule: ExecutionPhaseSchedule = ExecutionPhaseSchedule.Interleaving

    def __post_init__(self) -> None:
        if self.phases < 0 or self.stages not in (1, 2):
            raise popart_exception(
                "phases or stages of ExecutionPhaseSettings are out of range",
                expected="phases ≥ 0, 1 or 2 stages",
                got=self,
            )


@dataclass
class AutomaticLossScalingSettings(OptionGroup):
    """Loss scaling that follows the gradients.

    Args:
        enabled: whether it is on.
        toTrackTensors: names of the tensors whose gradients are looked at; all when None.
        binEdgeLocation: share of the largest float16 above which a gradient counts as large.
        thresholdUpperCountProportion: share of large gradients above which the scale is halved; below, it is doubled.
        updatePeriod: batches between two changes.
        gradientTensorTrackingMethod: which gradients are looked at.
    """

    enabled: bool = False
    toTrackTensors: Sequence[str] | None = None
    binEdgeLocation: float = 0.125
    thresholdUpperCountProportion: float = 1e-7
    updatePeriod: int = 1
    gradientTensorTrackingMethod: GradientTensorTrackingMethod = (
        GradientTensorTrackingMethod.AllNonViewChangingGradientTensors
    )


@dataclass
class BatchSerializationSettings(OptionGroup):
    """PopART's serialisation of a batch; only without effect, `factor` 0."""

    factor: int = 0
    concatOnVirtualGraphChange: bool = True
    concatOnExecutionPhaseChange: bool = True
    concatOnPipelineStageChange: bool = True
    transformContext: BatchSerializationTransformContext = BatchSerializationTransformContext.Fwd
    method: BatchSerializationMethod = BatchSerializationMethod.UnrollDynamic
    batchSchedule: BatchSerializationBatchSchedule = BatchSerializationBatchSchedule.Isomorphic


@dataclass
class ReplicatedCollectivesSettings(OptionGroup):
    """PopART's merging of collectives; this compiler merges sums on its own."""

    prepareScheduleForMergingCollectives: bool = False
    mergeAllReduceCollectives: bool = False
    mergeReduceScatterCollectives: bool = False
    mergeAllGatherCollectives: bool = False


@dataclass
class AutodiffSettings(OptionGroup):
    """Settings of PopART's automatic differentiation; JAX differentiates here."""

    stitchStrategy: AutodiffStitchStrategy = AutodiffStitchStrategy.RecomputeAllNonInputs


@dataclass
class AccumulateOuterFragmentSettings(OptionGroup):
    """Order of PopART's updates after accumulation."""

    schedule: AccumulateOuterFragmentSchedule = AccumulateOuterFragmentSchedule.Serial
    excludedVirtualGraphs: list[int] = field(default_factory=list)


@dataclass
class ExperimentalSettings(OptionGroup):
    """PopART's own transforms."""

    customTransformApplierSettings: dict[str, list[str]] = field(default_factory=dict)
    createHostTransferableTensorWithOffset: bool = False
