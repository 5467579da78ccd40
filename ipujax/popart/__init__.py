"""PopART in Python on this compiler: `import ipujax.popart as popart`.

    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [8, 784]))
    w = builder.addInitializedInputTensor(np.zeros((784, 10), np.float32))
    y = builder.aiOnnx.matmul([x, w])

Names are PopART's, in camelCase, in this package alone.

Source: PopART user guide; names and numbers of github:graphcore/popart.
"""

from re import findall as _findall

import ipujax as _ipu
from ipujax.popart.building import (
    DEFAULT_OPSET as _DEFAULT_OPSET,
    AiGraphcore as _AiGraphcore,
    Builder as Builder,
    DebugContext as DebugContext,
)
from ipujax.popart.devices import (
    DeviceInfo as DeviceInfo,
    DeviceManager as DeviceManager,
    syncPatternFromString as syncPatternFromString,
    syncPatternToString as syncPatternToString,
)
from ipujax.popart.enumerations import (
    AccumulateOuterFragmentSchedule as AccumulateOuterFragmentSchedule,
    AdamMode as AdamMode,
    AdaptiveMode as AdaptiveMode,
    AutodiffStitchStrategy as AutodiffStitchStrategy,
    BatchSerializationBatchSchedule as BatchSerializationBatchSchedule,
    BatchSerializationMethod as BatchSerializationMethod,
    BatchSerializationTransformContext as BatchSerializationTransformContext,
    CollectiveOperator as CollectiveOperator,
    CommGroupType as CommGroupType,
    DataType as DataType,
    DeviceConnectionType as DeviceConnectionType,
    DeviceSelectionCriterion as DeviceSelectionCriterion,
    DeviceType as DeviceType,
    ExchangeStrategy as ExchangeStrategy,
    ExecutionPhaseIOSchedule as ExecutionPhaseIOSchedule,
    ExecutionPhaseSchedule as ExecutionPhaseSchedule,
    GradientTensorTrackingMethod as GradientTensorTrackingMethod,
    InitType as InitType,
    Instrumentation as Instrumentation,
    IrSerializationFormat as IrSerializationFormat,
    MeanReductionStrategy as MeanReductionStrategy,
    MergeVarUpdateType as MergeVarUpdateType,
    PatternsLevel as PatternsLevel,
    RecomputationType as RecomputationType,
    RecomputeType as RecomputeType,
    RecoveryAction as RecoveryAction,
    ReductionType as ReductionType,
    ReplicatedStreamMode as ReplicatedStreamMode,
    ReplicatedTensorSharding as ReplicatedTensorSharding,
    ScatterReduction as ScatterReduction,
    SGDAccumulatorAndMomentum as SGDAccumulatorAndMomentum,
    SubgraphCopyingStrategy as SubgraphCopyingStrategy,
    SyncPattern as SyncPattern,
    SyntheticDataMode as SyntheticDataMode,
    TensorRemapType as TensorRemapType,
    TensorStorage as TensorStorage,
    TileSet as TileSet,
    VariableRetrievalMode as VariableRetrievalMode,
    VirtualGraphMode as VirtualGraphMode,
    WeightDecayMode as WeightDecayMode,
)
from ipujax.popart.exceptions import (
    OutOfMemoryException as OutOfMemoryException,
    popart_exception as popart_exception,
    popart_internal_exception as popart_internal_exception,
    popart_runtime_error as popart_runtime_error,
    poplar_exception as poplar_exception,
    poplar_runtime_error as poplar_runtime_error,
    poplibs_exception as poplibs_exception,
)
from ipujax.popart.flow import (
    AnchorReturnType as AnchorReturnType,
    AnchorReturnTypeId as AnchorReturnTypeId,
    DataFlow as DataFlow,
    InputSettings as InputSettings,
    InputShapeInfo as InputShapeInfo,
    PyStepIO as PyStepIO,
    PyStepIOCallback as PyStepIOCallback,
    PyWeightsIO as PyWeightsIO,
    StepIO as _StepIO,
)
from ipujax.popart.graph_transformer import GraphTransformer as GraphTransformer
from ipujax.popart.numerics_report import NumericsReport as NumericsReport
from ipujax.popart.optimisers import (
    SGD as SGD,
    Adam as Adam,
    Adaptive as Adaptive,
    ClipNormSettings as ClipNormSettings,
    ConstSGD as ConstSGD,
    Optimizer as Optimizer,
    OptimizerValue as OptimizerValue,
    OptimizerValueMap as OptimizerValueMap,
)
from ipujax.popart.options import (
    AccumulateOuterFragmentSettings as AccumulateOuterFragmentSettings,
    AutodiffSettings as AutodiffSettings,
    AutomaticLossScalingSettings as AutomaticLossScalingSettings,
    BatchSerializationSettings as BatchSerializationSettings,
    CommGroup as CommGroup,
    ExecutionPhaseSettings as ExecutionPhaseSettings,
    ExperimentalSettings as ExperimentalSettings,
    Patterns as Patterns,
    ReplicatedCollectivesSettings as ReplicatedCollectivesSettings,
    SessionOptions as SessionOptions,
    TensorLocation as TensorLocation,
    TensorLocationSettings as TensorLocationSettings,
    VariableSettings as VariableSettings,
)
from ipujax.popart.popart_log import (
    Logger as Logger,
    closePoplarDebugInfo as closePoplarDebugInfo,
    getLogger as getLogger,
    initializePoplarDebugInfo as initializePoplarDebugInfo,
)
from ipujax.popart.reserved_names import prefix_functions as _prefix_functions
from ipujax.popart.session import (
    IdentityLoss as IdentityLoss,
    InferenceSession as InferenceSession,
    L1Loss as L1Loss,
    NllLoss as NllLoss,
    TrainingSession as TrainingSession,
)
from ipujax.popart.supported_operations import (
    OpDefinition as OpDefinition,
    OperatorIdentifier as OperatorIdentifier,
    getSupportedOperations as getSupportedOperations,
    getSupportedOperationsDefinition as getSupportedOperationsDefinition,
    getUnsupportedOperations as getUnsupportedOperations,
)
from ipujax.popart.tensor_info import TensorInfo as TensorInfo, getTensorInfo as getTensorInfo

globals().update(_prefix_functions())  # reservedGradientPrefix() and its like

defaultAiOnnxOpset = _DEFAULT_OPSET
defaultAiOnnxMlOpset = 1
defaultAiGraphcoreOpset = 1
AiGraphcoreOpset1 = _AiGraphcore
IStepIO = _StepIO
IWeightsIO = PyWeightsIO  # PopART's base class, which has no other subclass
NumIOTiles = int  # as `SessionOptions.numIOTiles` returns it


def versionString() -> str:
    """Return the version of ipujax: no version of PopART is behind these names."""
    return _ipu.__version__


def versionNumber() -> tuple[int, int, int]:
    """Return the three numbers of the version of ipujax."""
    major, minor, point = (int(number) for number in _findall(r"\d+", versionString())[:3])
    return major, minor, point
