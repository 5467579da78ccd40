"""Options of a session in three tables: mapped to this compiler, without effect here, and refused if set.

Source of names and defaults: `willow/include/popart/sessionoptions.hpp` of github:graphcore/popart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ipujax.popart.enumerations import (
    Instrumentation,
    MeanReductionStrategy,
    MergeVarUpdateType,
    RecomputationType,
    ReductionType,
    SubgraphCopyingStrategy,
    SyntheticDataMode,
    VirtualGraphMode,
)
from ipujax.popart.options.option_groups import (
    AccumulateOuterFragmentSettings,
    AutodiffSettings,
    AutomaticLossScalingSettings,
    BatchSerializationSettings,
    ExecutionPhaseSettings,
    ExperimentalSettings,
    ReplicatedCollectivesSettings,
    TensorLocationSettings,
)

Default = Callable[[], Any]


def _is(value: Any) -> Default:
    return lambda: value


_no = _is(False)
_yes = _is(True)

# Option → (its default, its meaning here).
MAPPED: Mapping[str, tuple[Default, str]] = MappingProxyType(
    {
        "accumulationAndReplicationReductionType": (_is(ReductionType.Sum), "sum or mean of gradients"),
        "accumulationFactor": (_is(1), "micro-batches of a replica for one update: `ipu.pipeline(micro_batches=)`"),
        "accumulatorTensorLocationSettings": (
            TensorLocationSettings,
            "off chip with the state of the optimiser, and not without it",
        ),
        "activationTensorLocationSettings": (
            TensorLocationSettings,
            "on chip; off chip between execution phases, and refused without them",
        ),
        "autoRecomputation": (_is(RecomputationType.NoRecompute), "`Options(recompute=)`"),
        "automaticLossScalingSettings": (AutomaticLossScalingSettings, "loss scaling that follows the gradients"),
        "cachePath": (_is("session_cache"), "`Options(cache_dir=)`, with `enableEngineCaching`"),
        "constantWeights": (_yes, "weights of inference do not change"),
        "dotChecks": (set, "graphs as DOT files in `logDir`"),
        "enableEngineCaching": (_no, "programs are stored in `cachePath` and read from it"),
        "enableGradientAccumulation": (_no, "whether `accumulationFactor` counts"),
        "enablePipelining": (_no, "`ipu.pipeline`"),
        "enableReplicatedGraphs": (_no, "whether `replicatedGraphCount` counts"),
        "engineOptions": (
            dict,
            "`debug.instrument` and `autoReport.all` turn reports on; others are listed as without effect",
        ),
        "executionPhaseSettings": (ExecutionPhaseSettings, "`ipu.phase`; `phases` bounds the annotations"),
        "groupNormStridedChannelGrouping": (_no, "groups of every n-th channel"),
        "logDir": (_is(""), "folder of dumps"),
        "meanAccumulationAndReplicationReductionStrategy": (
            _is(MeanReductionStrategy.Post),
            'a "running_mean" of gradients, or their mean',
        ),
        "numIOTiles": (_is(0), "`Options(io_tiles=)`"),
        "optimizerStateTensorLocationSettings": (TensorLocationSettings, "`offload_argnums` of the state"),
        "partialsTypeMatMuls": (_is(""), "`Options(partials=)`, which convolutions follow too"),
        "replicatedGraphCount": (_is(1), "`ipu.jit(replicas=)`"),
        "syntheticDataMode": (_is(SyntheticDataMode.Off), "inputs that the session generates"),
        "virtualGraphMode": (
            _is(VirtualGraphMode.Off),
            "`ipu.stage`, `ipu.phase`, or stages that `ipu.pipeline` chooses",
        ),
        "weightTensorLocationSettings": (
            TensorLocationSettings,
            "`offload_argnums` of the weights; with execution phases they are off chip anyway",
        ),
    }
)

# Option → (its default, why it has no effect).
WITHOUT_EFFECT: Mapping[str, tuple[Default, str]] = MappingProxyType(
    {
        "accumulateOuterFragmentSettings": (AccumulateOuterFragmentSettings, "updates are scheduled by the compiler"),
        "aliasZeroCopy": (_no, "values are not aliased"),
        "autodiffSettings": (AutodiffSettings, "JAX differentiates"),
        "batchSerializationSettings": (
            BatchSerializationSettings,
            "a batch is computed in one; see `accumulationFactor`",
        ),
        "bufferingDepthMap": (dict, "host streams are buffered by the engine"),
        "compilationProgressTotal": (_is(100), "compiling shows its own progress"),
        "convolutionOptions": (dict, "plans are the compiler's"),
        "createImplicitPipeliningFwdOnlyProgram": (_no, "sessions have one program"),
        "decomposeGradSum": (_no, "sums of gradients are the compiler's"),
        "defaultBufferingDepth": (_is(1), "host streams are buffered by the engine"),
        "defaultPrefetchBufferingDepth": (_is(1), "host streams are buffered by the engine"),
        "delayVarUpdates": (_yes, "updates are scheduled by the compiler"),
        "disableGradAccumulationTensorStreams": (_no, "accumulators are not streamed"),
        "disableOptimizerStateTensorStreams": (_no, "the state is read when it is asked for"),
        "dotOpNames": (_no, "names are in the DOT files"),
        "enableConstantFoldingOfMultipleConsumers": (_yes, "constants are folded"),
        "enableEfficientOverlapIOTopoCons": (_no, "scheduled by the compiler"),
        "enableExplicitMainLoops": (_no, "one form of the graph"),
        "enableFullyConnectedPass": (_yes, "plans are the compiler's"),
        "enableInplaceAmbiguityChecking": (_no, "values are immutable"),
        "enableLoadAndOffloadRNGState": (_no, "the state of random numbers is an argument"),
        "enableMergeExchange": (_yes, "scheduled by the compiler"),
        "enableNonStableSoftmax": (_no, "softmax subtracts the maximum"),
        "enableOutlining": (_yes, "outlining is the compiler's"),
        "enableOutliningCopyCostPruning": (_yes, "outlining is the compiler's"),
        "enablePrefetchDatastreams": (_yes, "host streams are buffered by the engine"),
        "enableSerializedMatmuls": (_yes, "plans are the compiler's"),
        "enableStableNorm": (_no, "norms subtract the mean"),
        "enableStochasticRounding": (_no, "numbers are rounded to the nearest"),
        "enableSupportedDataTypeCasting": (_yes, "64 bits are 32 bits"),
        "enableVariablesCaching": (_yes, "weights are not cached"),
        "ensureFp32LossScaleTensor": (_no, "the loss scale is float32"),
        "explicitRecomputation": (_no, "one form of the graph"),
        "exportPoplarComputationGraph": (_no, "see IPUJAX_DUMP"),
        "exportPoplarVertexGraph": (_no, "see IPUJAX_DUMP"),
        "finalDotOp": (_is(10000), "graphs are drawn whole"),
        "firstDotOp": (_is(0), "graphs are drawn whole"),
        "gclOptions": (dict, "collectives are planned by the compiler"),
        "groupHostSync": (_no, "scheduled by the compiler"),
        "hardwareInstrumentations": (lambda: {Instrumentation.Outer}, "`getCycleCount` is always there"),
        "instrumentWithHardwareCycleCounter": (_no, "`getCycleCount` is always there"),
        "kahnTieBreaker": (_is("greedy"), "scheduled by the compiler"),
        "looseThresholdAtPeak": (_is(8000), "updates are not merged by hand"),
        "lstmOptions": (dict, "plans are the compiler's"),
        "matmulOptions": (dict, "plans are the compiler's"),
        "mergeVarUpdate": (_is(MergeVarUpdateType.Off), "updates are not merged by hand"),
        "mergeVarUpdateMemThreshold": (_is(1000000), "updates are not merged by hand"),
        "opxAliasChecking": (_no, "values are immutable"),
        "opxModifyChecking": (_no, "values are immutable"),
        "outlineSequenceBreakCost": (_is(10000.0), "outlining is the compiler's"),
        "outlineThreshold": (_is(1.0), "outlining is the compiler's"),
        "prefetchBufferingDepthMap": (dict, "host streams are buffered by the engine"),
        "rearrangeAnchorsOnHost": (_yes, "scheduled by the compiler"),
        "rearrangeStreamsOnHost": (_no, "scheduled by the compiler"),
        "replicatedCollectivesSettings": (ReplicatedCollectivesSettings, "sums are merged by the compiler"),
        "reportOptions": (dict, "reports have one form"),
        "scheduleNonWeightUpdateGradientConsumersEarly": (_no, "scheduled by the compiler"),
        "separateCallOpPdfs": (_yes, "graphs are drawn whole"),
        "serializedPoprithmsAnnealGraphsDir": (_is(""), "PopART's scheduler"),
        "serializedPoprithmsShiftGraphsDir": (_is(""), "PopART's scheduler"),
        "stashAllTensorsInferencePipeline": (_no, "stashes are the compiler's"),
        "strictOpVersions": (_yes, "models are converted to one opset"),
        "subgraphCopyingStrategy": (_is(SubgraphCopyingStrategy.OnEnterAndExit), "values are immutable"),
        "swapLimitScheduler": (_is(10**9), "PopART's scheduler"),
        "tensorLocationSettingsOverride": (dict, "tensors of a kind are in one memory"),
        "throwIfLog2ScaleTensorNotInRange": (_yes, "no float8"),
        "timeLimitScheduler": (_is(1e9), "PopART's scheduler"),
        "transitiveClosureOptimizationThreshold": (_is(100000), "PopART's scheduler"),
        "useHostCopyOps": (_no, "one form of the graph"),
        "useLoopCandidateCreator": (_no, "loops are not unrolled"),
        "virtualGraphSplitRatios": (list, "stages are cut where they take least time"),
        "_enableRngStateManagement": (_no, "the state of random numbers is an argument"),
    }
)

# Option → (its default, what to do instead).
REFUSED: Mapping[str, tuple[Default, str]] = MappingProxyType(
    {
        "compilationProgressLogger": (_is(None), "popart.getLogger()"),
        "compileEngine": (_yes, "session.run compiles when it needs to"),
        "customCodeletCompileFlags": (_is(""), "codelets are Python: ipujax.onnx.register"),
        "customCodelets": (list, "codelets are Python: ipujax.onnx.register"),
        "developerSettings": (_is(None), "no option"),
        "enableDistributedReplicatedGraphs": (_no, "replicatedGraphCount"),
        "enableFloatingPointChecks": (_no, "jax.debug_nans"),
        "experimentalSettings": (ExperimentalSettings, "no option"),
        "globalReplicaOffset": (_is(0), "replicatedGraphCount"),
        "globalReplicationFactor": (_is(1), "replicatedGraphCount"),
        "hostAllReduce": (_no, "replicatedGraphCount"),
        "updatableNamedBuffers": (list, "session.writeWeights"),
    }
)

_TILE_SETS = "tiles are chosen by the compiler, see `numIOTiles`"
_DOMAIN = "tensors are not divided among replicas"
_IO_SCHEDULE = "loads and stores of phases are scheduled by the compiler"
_LOCATIONS = (
    "accumulatorTensorLocationSettings",
    "activationTensorLocationSettings",
    "optimizerStateTensorLocationSettings",
    "weightTensorLocationSettings",
)

# Field of a mapped option → why it has no effect: the rest of the option has one.
FIELDS_WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "automaticLossScalingSettings.gradientTensorTrackingMethod": "gradients of weights are tracked",
        "executionPhaseSettings.accumulatorIOSchedule": _IO_SCHEDULE,
        "executionPhaseSettings.activationIOSchedule": _IO_SCHEDULE,
        "executionPhaseSettings.optimizerStateIOSchedule": _IO_SCHEDULE,
        "executionPhaseSettings.schedule": _IO_SCHEDULE,
        "executionPhaseSettings.stages": "a phase is computed by the IPUs of its replica",
        "executionPhaseSettings.weightIOSchedule": _IO_SCHEDULE,
        **{f"{name}.location.loadTileSet": _TILE_SETS for name in _LOCATIONS},
        **{f"{name}.location.replicatedTensorSharding": _DOMAIN for name in _LOCATIONS},
        **{f"{name}.location.shardingDomain": _DOMAIN for name in _LOCATIONS},
        **{f"{name}.location.storageTileSet": _TILE_SETS for name in _LOCATIONS},
        **{f"{name}.minElementsForReplicatedTensorSharding": _DOMAIN for name in _LOCATIONS},
    }
)

# Options and fields without effect that would change the memory or the rounding of a program: a session warns of them.
WARNED = frozenset(
    {
        "batchSerializationSettings",
        "enableStochasticRounding",
        "tensorLocationSettingsOverride",
        *(f"{name}.location.replicatedTensorSharding" for name in _LOCATIONS),
    }
)

ALL_OPTIONS: Mapping[str, tuple[Default, str]] = MappingProxyType({**MAPPED, **WITHOUT_EFFECT, **REFUSED})
