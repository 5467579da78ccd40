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
            "off chip only together with the state of the optimiser",
        ),
        "activationTensorLocationSettings": (
            TensorLocationSettings,
            "on chip; off chip only between execution phases",
        ),
        "autoRecomputation": (_is(RecomputationType.NoRecompute), "`Options(recompute=)`"),
        "automaticLossScalingSettings": (AutomaticLossScalingSettings, "loss scaling that follows the gradients"),
        "cachePath": (_is("session_cache"), "`Options(cache_dir=)`, with `enableEngineCaching`"),
        "constantWeights": (_yes, "weights cannot be changed during inference"),
        "dotChecks": (set, "graphs as DOT files in `logDir`"),
        "enableEngineCaching": (_no, "programs are stored in `cachePath` and read from it"),
        "enableGradientAccumulation": (_no, "`accumulationFactor` has an effect only with it"),
        "enablePipelining": (_no, "`ipu.pipeline`"),
        "enableReplicatedGraphs": (_no, "`replicatedGraphCount` has an effect only with it"),
        "engineOptions": (
            dict,
            "`debug.instrument` and `autoReport.all` turn reports on, `autoReport.directory` says where the profile is"
            " saved; others are warned of, unknown ones refused",
        ),
        "executionPhaseSettings": (ExecutionPhaseSettings, "`ipu.phase`; `phases` bounds the annotations"),
        "groupNormStridedChannelGrouping": (_no, "groups of every n-th channel"),
        "hostAllReduce": (_no, "gradients go to callbacks of the host and back, `ipujax.popart.horovod`"),
        "logDir": (_is(""), "folder of dumps"),
        "meanAccumulationAndReplicationReductionStrategy": (
            _is(MeanReductionStrategy.Post),
            'a "running_mean" of gradients, or their mean',
        ),
        "numIOTiles": (_is(0), "`Options(io_tiles=)`"),
        "optimizerStateTensorLocationSettings": (
            TensorLocationSettings,
            "`offload_argnums` of the state; `ipu.optim.shard` of it, with `ReplicatedTensorSharding.On`",
        ),
        "partialsTypeMatMuls": (_is(""), "`Options(partials=)`, for convolutions too"),
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
            "a batch is computed at once; see `accumulationFactor`",
        ),
        "bufferingDepthMap": (dict, "host streams are buffered by the engine"),
        "compilationProgressTotal": (_is(100), "compilation has its own progress line"),
        "convolutionOptions": (dict, "planned by the compiler"),
        "createImplicitPipeliningFwdOnlyProgram": (_no, "sessions have one program"),
        "decomposeGradSum": (_no, "sums of gradients are planned by the compiler"),
        "defaultBufferingDepth": (_is(1), "host streams are buffered by the engine"),
        "defaultPrefetchBufferingDepth": (_is(1), "host streams are buffered by the engine"),
        "delayVarUpdates": (_yes, "updates are scheduled by the compiler"),
        "disableGradAccumulationTensorStreams": (_no, "accumulators are not streamed"),
        "disableOptimizerStateTensorStreams": (_no, "the state is read on request"),
        "dotOpNames": (_no, "names are in the DOT files"),
        "enableConstantFoldingOfMultipleConsumers": (_yes, "constants are folded"),
        "enableEfficientOverlapIOTopoCons": (_no, "scheduled by the compiler"),
        "enableExplicitMainLoops": (_no, "graphs have a single form"),
        "enableFullyConnectedPass": (_yes, "planned by the compiler"),
        "enableInplaceAmbiguityChecking": (_no, "values are immutable"),
        "enableLoadAndOffloadRNGState": (_no, "the state of random numbers is an argument"),
        "enableMergeExchange": (_yes, "scheduled by the compiler"),
        "enableNonStableSoftmax": (_no, "softmax subtracts the maximum"),
        "enableOutlining": (_yes, "outlined by the compiler"),
        "enableOutliningCopyCostPruning": (_yes, "outlined by the compiler"),
        "enablePrefetchDatastreams": (_yes, "host streams are buffered by the engine"),
        "enableSerializedMatmuls": (_yes, "planned by the compiler"),
        "enableStableNorm": (_no, "norms subtract the mean"),
        "enableStochasticRounding": (_no, "numbers are rounded to the nearest"),
        "enableSupportedDataTypeCasting": (_yes, "64-bit types are computed with 32 bits"),
        "enableVariablesCaching": (_yes, "weights are not cached"),
        "ensureFp32LossScaleTensor": (_no, "the loss scale is float32"),
        "explicitRecomputation": (_no, "graphs have a single form"),
        "exportPoplarComputationGraph": (_no, "use IPUJAX_DUMP"),
        "exportPoplarVertexGraph": (_no, "use IPUJAX_DUMP"),
        "finalDotOp": (_is(10000), "graphs are drawn completely"),
        "firstDotOp": (_is(0), "graphs are drawn completely"),
        "gclOptions": (dict, "collectives are planned by the compiler"),
        "groupHostSync": (_no, "scheduled by the compiler"),
        "hardwareInstrumentations": (lambda: {Instrumentation.Outer}, "`getCycleCount` is always available"),
        "instrumentWithHardwareCycleCounter": (_no, "`getCycleCount` is always available"),
        "kahnTieBreaker": (_is("greedy"), "scheduled by the compiler"),
        "looseThresholdAtPeak": (_is(8000), "the compiler merges operations by its own rules"),
        "lstmOptions": (dict, "planned by the compiler"),
        "matmulOptions": (dict, "planned by the compiler"),
        "mergeVarUpdate": (_is(MergeVarUpdateType.Off), "the compiler merges operations by its own rules"),
        "mergeVarUpdateMemThreshold": (_is(1000000), "the compiler merges operations by its own rules"),
        "opxAliasChecking": (_no, "values are immutable"),
        "opxModifyChecking": (_no, "values are immutable"),
        "outlineSequenceBreakCost": (_is(10000.0), "outlined by the compiler"),
        "outlineThreshold": (_is(1.0), "outlined by the compiler"),
        "prefetchBufferingDepthMap": (dict, "host streams are buffered by the engine"),
        "rearrangeAnchorsOnHost": (_yes, "scheduled by the compiler"),
        "rearrangeStreamsOnHost": (_no, "scheduled by the compiler"),
        "replicatedCollectivesSettings": (ReplicatedCollectivesSettings, "sums are merged by the compiler"),
        "reportOptions": (dict, "reports have a single form"),
        "scheduleNonWeightUpdateGradientConsumersEarly": (_no, "scheduled by the compiler"),
        "separateCallOpPdfs": (_yes, "graphs are drawn completely"),
        "serializedPoprithmsAnnealGraphsDir": (_is(""), "an option of PopART's scheduler, which does not run"),
        "serializedPoprithmsShiftGraphsDir": (_is(""), "an option of PopART's scheduler, which does not run"),
        "stashAllTensorsInferencePipeline": (_no, "stashes are chosen by the compiler"),
        "strictOpVersions": (_yes, "models are converted to one opset"),
        "subgraphCopyingStrategy": (_is(SubgraphCopyingStrategy.OnEnterAndExit), "values are immutable"),
        "swapLimitScheduler": (_is(10**9), "an option of PopART's scheduler, which does not run"),
        "tensorLocationSettingsOverride": (dict, "tensors of a kind are in one memory"),
        "throwIfLog2ScaleTensorNotInRange": (_yes, "float8 is not supported"),
        "timeLimitScheduler": (_is(1e9), "an option of PopART's scheduler, which does not run"),
        "transitiveClosureOptimizationThreshold": (_is(100000), "an option of PopART's scheduler, which does not run"),
        "useHostCopyOps": (_no, "graphs have a single form"),
        "useLoopCandidateCreator": (_no, "loops are not unrolled"),
        "virtualGraphSplitRatios": (list, "stages are cut where they take least time"),
        "_enableRngStateManagement": (_no, "the state of random numbers is an argument"),
    }
)

# Option → (its default, what to do instead).
REFUSED: Mapping[str, tuple[Default, str]] = MappingProxyType(
    {
        "compilationProgressLogger": (_is(None), "popart.getLogger()"),
        "compileEngine": (_yes, "session.run compiles when needed"),
        "customCodeletCompileFlags": (_is(""), "codelets are Python: ipujax.onnx.register"),
        "customCodelets": (list, "codelets are Python: ipujax.onnx.register"),
        "developerSettings": (_is(None), "nothing"),
        "enableDistributedReplicatedGraphs": (_no, "replicatedGraphCount"),
        "enableFloatingPointChecks": (_no, "jax.debug_nans"),
        "experimentalSettings": (ExperimentalSettings, "nothing"),
        "globalReplicaOffset": (_is(0), "replicatedGraphCount"),
        "globalReplicationFactor": (_is(1), "replicatedGraphCount"),
        "updatableNamedBuffers": (list, "session.writeWeights"),
    }
)

_TILE_SETS = "tiles are chosen by the compiler, see `numIOTiles`"
_DOMAIN = "only the state of the optimiser is divided among replicas"
_IO_SCHEDULE = "loads and stores of phases are scheduled by the compiler"
_LOCATIONS = (
    "accumulatorTensorLocationSettings",
    "activationTensorLocationSettings",
    "optimizerStateTensorLocationSettings",
    "weightTensorLocationSettings",
)

_WHOLE = tuple(name for name in _LOCATIONS if not name.startswith("optimizerState"))  # on all replicas

# Field of a mapped option → why it has no effect; the other fields of the option have one.
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
        **{f"{name}.location.replicatedTensorSharding": _DOMAIN for name in _WHOLE},
        **{f"{name}.location.shardingDomain": "all replicas divide tensors" for name in _LOCATIONS},
        **{f"{name}.location.storageTileSet": _TILE_SETS for name in _LOCATIONS},
        **{f"{name}.minElementsForReplicatedTensorSharding": _DOMAIN for name in _WHOLE},
    }
)

# Options and fields without effect that would change the memory or the rounding of a program: a session warns of them.
WARNED = frozenset(
    {
        "batchSerializationSettings",
        "enableStochasticRounding",
        "tensorLocationSettingsOverride",
        *(f"{name}.location.replicatedTensorSharding" for name in _WHOLE),
        *(f"{name}.location.shardingDomain" for name in _LOCATIONS),
    }
)

ALL_OPTIONS: Mapping[str, tuple[Default, str]] = MappingProxyType({**MAPPED, **WITHOUT_EFFECT, **REFUSED})
