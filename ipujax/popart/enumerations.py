"""PopART's enumerations, with its names and values.

Source: `willow/include/popart` of github:graphcore/popart. Members are integers, as programs store them in attributes.
"""

from enum import IntEnum


class ReductionType(IntEnum):
    """Reduction of the elements of a loss, and of gradients over accumulation and replicas."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(IntEnum):
    """Time of the division of a mean of gradients: at each accumulation, or after the last."""

    Running = 0
    Post = 1


class ScatterReduction(IntEnum):
    """Reduction of values that are scattered to one index."""

    Sum = 0
    Max = 1
    Min = 2
    Mul = 3
    NoReduction = 4


class RecomputeType(IntEnum):
    """Recomputation of one operation's result in the backward part."""

    Undefined = 0
    Checkpoint = 1
    Recompute = 2
    Recomputed = 3


class RecomputationType(IntEnum):
    """Activations that a session recomputes."""

    NoRecompute = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


class VirtualGraphMode(IntEnum):
    """Source of the assignment of operations to IPUs."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3


class SyntheticDataMode(IntEnum):
    """Values that stand for inputs, so that no data come from the host."""

    Off = 0
    Zeros = 1
    RandomNormal = 2
    RandomUniform = 3


class TensorStorage(IntEnum):
    """Memory of a tensor: tiles, or streaming memory."""

    OnChip = 0
    OffChip = 1


class ReplicatedTensorSharding(IntEnum):
    """Division of a tensor among replicas, each of which stores its part."""

    Off = 0
    On = 1


class TileSet(IntEnum):
    """Tiles of a transfer."""

    Compute = 0
    IO = 1


class ExchangeStrategy(IntEnum):
    """Time of the exchange of a stream with the host."""

    JustInTime = 0
    OverlapInnerLoop = 1
    OverlapLoops = 2
    OverlapStep = 3


class ReplicatedStreamMode(IntEnum):
    """Streams of an input: one for each replica, or one for all."""

    Replicate = 0
    Broadcast = 1


class ExecutionPhaseIOSchedule(IntEnum):
    """Time of an execution phase's loads from streaming memory: a phase ahead, or when it starts."""

    Preload = 0
    OnDemand = 1


class ExecutionPhaseSchedule(IntEnum):
    """Order of loads, computation and stores of a phase."""

    Interleaving = 0
    Batch = 1
    BatchClusteredIO = 2


class MergeVarUpdateType(IntEnum):
    """Modes of PopART's merging of weight updates."""

    Off = 0
    All = 1
    AutoLoose = 2
    AutoTight = 3


class SubgraphCopyingStrategy(IntEnum):
    """Time at which a call copies its operands."""

    OnEnterAndExit = 0
    JustInTime = 1


class AccumulateOuterFragmentSchedule(IntEnum):
    """Order of updates after gradient accumulation."""

    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class BatchSerializationTransformContext(IntEnum):
    """Part of the training step whose batch PopART serialises."""

    Fwd = 0
    Bwd = 1
    Forward = 0
    Backward = 1


class BatchSerializationMethod(IntEnum):
    """Form of a serialised batch."""

    UnrollDynamic = 0
    UnrollStatic = 1
    Loop = 2


class BatchSerializationBatchSchedule(IntEnum):
    """Order of the parts of a serialised batch."""

    Scheduler = 0
    Isomorphic = 1
    OverlapOnIo = 2
    OverlapOnCompute = 3


class AutodiffStitchStrategy(IntEnum):
    """Modes of PopART's connection of a backward subgraph with its forward one."""

    RecomputeMinimal = 0
    RecomputeAllNonInputs = 1
    AddFwdOutputs = 2
    SafeAddFwdOutputs = 3


class GradientTensorTrackingMethod(IntEnum):
    """Gradients that automatic loss scaling looks at."""

    AllNonViewChangingGradientTensors = 0
    ConvAndMatmulGradients = 1
    GradientsOfUserSpecifiedTensors = 2


class Instrumentation(IntEnum):
    """Parts of a step whose cycles are counted."""

    Outer = 0
    Inner = 1


class PatternsLevel(IntEnum):
    """Sets of PopART's graph rewrites."""

    NoPatterns = 0
    Minimal = 1
    Default = 2
    All = 3


class SGDAccumulatorAndMomentum(IntEnum):
    """Storage of SGD's accumulator and momentum, as one tensor or two; the updates are equal."""

    Combined = 0
    Separate = 1


class WeightDecayMode(IntEnum):
    """Term that weight decay is added to: the update, or the gradient."""

    Decay = 0
    L2Regularization = 1


class AdamMode(IntEnum):
    """Variants of Adam."""

    Adam = 0
    AdamNoBias = 1
    AdaMax = 2
    Lamb = 3
    LambNoBias = 4


class AdaptiveMode(IntEnum):
    """Variants of the adaptive optimisers."""

    AdaGrad = 0
    RMSProp = 1
    CenteredRMSProp = 2
    AdaDelta = 3


class InitType(IntEnum):
    """First value of a tensor's memory: undefined, or zero."""

    NoInit = 0
    Zero = 1


class TensorRemapType(IntEnum):
    """Parts of the training step in which a tensor changes its layout."""

    FwdBwdReverse = 0
    FwdBwd = 1
    Fwd = 2


class CommGroupType(IntEnum):
    """Replicas of a collective."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    Ungrouped = 3


class CollectiveOperator(IntEnum):
    """Reduction of a collective."""

    Add = 0
    Mean = 1
    Mul = 2
    Min = 3
    Max = 4
    LogicalAnd = 5
    LogicalOr = 6
    SquareAdd = 7
    Local = 8


class DeviceType(IntEnum):
    """Kinds of devices; `Ipu` are simulated here."""

    IpuModel = 0
    Cpu = 1
    Ipu = 2
    OfflineIpu = 3
    Sim = 4


class DeviceConnectionType(IntEnum):
    """Time at which a program attaches to a device."""

    Always = 0
    OnDemand = 1
    Never = 2


class DeviceSelectionCriterion(IntEnum):
    """Choice among several free devices."""

    First = 0
    Random = 1


class SyncPattern(IntEnum):
    """Sync groups of the IPUs of a device; `PingPong` is the earlier name of `ReplicaAndLadder`."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2
    PingPong = 2


class VariableRetrievalMode(IntEnum):
    """Replicas whose weights are read."""

    OnePerGroup = 0
    AllReduceReplicas = 1
    AllReplicas = 2


class RecoveryAction(IntEnum):
    """What an error of hardware needs; simulated hardware has none."""

    IPU_RESET = 0
    LINK_RESET = 1
    PARTITION_RESET = 2
    FULL_RESET = 3


class IrSerializationFormat(IntEnum):
    """Format of a serialised graph."""

    JSON = 0


class DataType(IntEnum):
    """Element types, with ONNX's numbers."""

    UNDEFINED = 0
    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    STRING = 8
    BOOL = 9
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BFLOAT16 = 16
