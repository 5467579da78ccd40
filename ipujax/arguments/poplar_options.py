"""Option dictionaries of Poplar, PopLibs and PopART: their names and values, in one table.

    read_options("engine", {"debug.instrument": "true"}, used) → ({"debug.instrument": True}, names without effect)

Unknown names and values out of range are refused. Which names have an effect is for the caller to say: a program brings
options of a compiler and a machine that are not here. Values are of Python's types, or text: "true", "4", "0.5".
Engine options of the environment, a JSON object, override those of the program, as Poplar's do.

Sources: Poplar & PopLibs user guide, "Profiling options" and "Environment variables"; github:graphcore/poplibs,
`ConvOptions.cpp`, `MatMul.cpp`, `Lstm.cpp`; programs in public repositories. `debug.exactSplits`, `streams.` are ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Mapping
from numbers import Real
from operator import index
from types import MappingProxyType
from typing import Any

from ipujax.runtime.errors import ArgumentError, IpuError
from ipujax.runtime.target import nearest

_NEAR_NAMES = 8  # in a message; groups have up to a hundred names


class _Invalid(Exception):
    """The description of a valid value, and what an invalid one is to be."""


Parser = Callable[[Any], Any]
Table = Mapping[str, Parser]


def _flag(value: Any) -> bool:
    flags = {"true": True, "false": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in flags:
        return flags[value.lower()]
    raise _Invalid("true or false", '"true" or "false"')


def _count_from(minimum: int) -> Parser:
    """Return the parser of whole numbers from a minimum."""

    def count(value: Any) -> int:
        # `index` takes integers of every library and refuses fractions, which `int` cuts off.
        try:
            number = int(value) if isinstance(value, str) else index(value)
        except (TypeError, ValueError):
            number = None
        if number is None or isinstance(value, bool) or number < minimum:
            raise _Invalid("a count", f"a whole number, at least {minimum}")
        return number

    return count


def _number_within(low: float, high: float) -> Parser:
    """Return the parser of numbers between bounds, which are included."""

    def number(value: Any) -> float:
        # True is no number, though Python counts it as one.
        try:
            result = float(value) if isinstance(value, str | Real) and not isinstance(value, bool) else None
        except (ValueError, OverflowError):
            result = None
        if result is None or not low <= result <= high:
            raise _Invalid("a number", f"a number from {low:g} to {high:g}")
        return result

    return number


def _name_of(*names: str) -> Parser:
    def name(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise _Invalid("a known name", " or ".join(f'"{each}"' for each in names))
        return value

    return name


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Invalid("text", "text")
    return value


_count = _count_from(0)
_proportion = _number_within(0, 1)
_partials = _name_of("half", "float")
_PASSES = ("NONE", "INFERENCE_FWD", "TRAINING_FWD", "TRAINING_BWD", "TRAINING_WU")

_ENGINE: Table = {
    **dict.fromkeys(
        (
            "autoReport.all",
            "autoReport.outputArchive",
            "autoReport.outputDebugInfo",
            "autoReport.outputExecutionProfile",
            "autoReport.outputGraphProfile",
            "autoReport.outputLoweredVars",
            "autoReport.outputSerializedGraph",
            "autoReport.streamAtEachRun",
            "debug.allowOutOfMemory",
            "debug.checkForSOCErrorAtRun",
            "debug.cpuMultiThreadExecution",
            "debug.exactSplits",
            "debug.floatPointOpException",
            "debug.instrument",
            "debug.instrumentCompute",
            "debug.instrumentControlFlow",
            "debug.instrumentExternalExchange",
            "debug.nanOverflowException",
            "debug.outputAllSymbols",
            "debug.retainDebugInformation",
            "debug.runtimeVerify",
            "debug.trace",
            "debug.verify",
            "exchange.enablePrefetch",
            "opt.enableInlining",
            "opt.enableMultiAccessCopies",
            "opt.limitVertexStateToLower256K",
            "opt.useAutoloader",
            "prng.enableStochasticRounding",
            "profiler.includeCycleEstimates",
            "profiler.includeFlopEstimates",
            "profiler.perExecutionStreamCopyCycles",
            "profiler.useZlib",
            "streamCallbacks.numaAware",
            "streams.splitLargeCopies",
            "target.deterministicWorkers",
            "target.extendedMemory",
            "target.gatewayMode",
            "target.gatewayWriteCombining",
            "target.syncReplicasIndependently",
            "target.useBufferedCompletions",
        ),
        _flag,
    ),
    **dict.fromkeys(
        (
            "autoReport.executionProfileProgramRunCount",
            "debug.branchRecordTile",
            "debug.profilingTile",
            "debug.supervisorStackSizeInBytes",
            "debug.workerStackSizeInBytes",
            "opt.maxCompilationThreads",
            "opt.maxLinkerThreads",
            "profiler.replicaToProfile",
            "streams.prefetchDepth",
            "target.hostSyncTimeout",
            "target.maxStreamCallbackThreadsPerNumaNode",
            "target.supervisorStackSizeInBytes",
            "target.workerStackSizeInBytes",
        ),
        _count,
    ),
    **dict.fromkeys(
        (
            "autoReport.directory",
            "debug.graphReportDestination",
            "debug.loweredVarDumpFile",
            "debug.traceFile",
            "profiler.blocks",
            "profiler.blocks.filter",
            "profiler.programs",
            "streamCallbacks.maxLookahead",
            "streamCallbacks.multiThreadMode",
            "target.saveArchive",
            "target.syncMethod",
        ),
        _text,
    ),
    "debug.computeInstrumentationLevel": _name_of("tile", "vertex", "device", "ipu"),
    "exchange.streamBufferOverlap": _name_of("any", "none", "hostRearrangeOnly"),
    "opt.internalExchangeOptimisationTarget": _name_of("balanced", "cycles", "memory"),
    "streamCallbacks.numWorkerThreads": _text,
}

_PLANNED: Table = {
    "availableMemoryProportion": _proportion,
    "partialsType": _partials,
    **dict.fromkeys(
        (
            "disableSRForAMPVertices",
            "enableFastReduce",
            "enableMultiStageReduce",
            "remapOutputTensor",
            "use128BitConvUnitLoad",
        ),
        _flag,
    ),
    "planConstraints": _text,
}

# What each dictionary is called in messages → its options.
GROUPS: Mapping[str, Table] = MappingProxyType(
    {
        "engine": _ENGINE,
        "convolution": {
            **_PLANNED,
            **dict.fromkeys(
                (
                    "disableTransformations",
                    "enableConvDithering",
                    "enableTileLevelExpandDims",
                    "experimental.convTransformsEstimates",
                    "experimental.slicVmac16",
                    "gatherConvOutput",
                    "insertTransformsCycleCountProgs",
                ),
                _flag,
            ),
            **dict.fromkeys(("partialsType.interIPU", "partialsType.interTile"), _partials),
            "planConstraintsOutputFilename": _text,
            "pass": _name_of(*_PASSES, "NONE_MATMUL", *(f"FC_{name}" for name in _PASSES[1:])),
        },
        "matmul": {
            **_PLANNED,
            **dict.fromkeys(("gatherOutput", "inputRHSIsPreArranged"), _flag),
            "fullyConnectedPass": _name_of(*_PASSES),
        },
        "LSTM": {
            "availableMemoryProportion": _proportion,
            "partialsType": _partials,
            **dict.fromkeys(("disableWUPartialInterleaving", "inferenceOnly", "preCalcWeights", "rnnCodeReuse"), _flag),
            "numShards": _count_from(1),
            "recomputationMode": _name_of("none", "cellAndTanh", "full"),
            "rnnStepsPerWU": _count_from(1),
            "weightAccumulatorsType": _partials,
        },
        "GCL": {
            **dict.fromkeys(
                (
                    "syncful.useForwardingToSupportStreams",
                    "syncful.useOptimisedLayout",
                    "useReplicatedImplementation",
                    "useSynclessCollectives",
                ),
                _flag,
            ),
            **dict.fromkeys(("maxBytesPerTile", "maxBroadcastSize", "syncful.maxBroadcastSize"), _count),
            **dict.fromkeys(("link", "method", "topology"), _text),
        },
        "report": dict.fromkeys(
            ("showExecutionSteps", "showOptimizations", "showPerIpuMemoryUsage", "showVarStorage"), _flag
        ),
        "device": {
            "accumulatorMode": _text,
            "compileIPUCode": _flag,
            "debug": _flag,
            "ipuVersion": _text,
            "numIPUs": _count_from(1),
            "tilesPerIPU": _count,
        },
    }
)

# Variables with engine options, the first that is set: Poplar's own name is there for its programs.
ENVIRONMENT = ("IPUJAX_ENGINE_OPTIONS", "POPLAR_ENGINE_OPTIONS")


def read_options(
    group: str,
    options: Mapping[Any, Any] | None,
    used: Container[str],
    kind: type[IpuError] = ArgumentError,
    environment: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of an option dictionary, and the names of those without effect.

    Args:
        group: a key of `GROUPS`.
        options: values by name; None for none.
        used: names that have an effect.
        kind: class of the errors.
        environment: variables, whose engine options override the program's; by default those of the process.

    Raises:
        IpuError: of the class, for another value than a dictionary, an unknown name, with the nearest, or a value out
            of range.
    """
    if not isinstance(options, Mapping | None):
        expected = "a mapping of option names to values, or None"
        raise kind(f"{group} options must be a mapping", expected=expected, got=repr(options))
    table = GROUPS[group]
    values = {}
    is_engine = group == "engine"
    overriding = _from_environment(os.environ if environment is None else environment, kind) if is_engine else {}
    for name, value in {**(options or {}), **overriding}.items():
        if name not in table:
            listed = sorted(table)[:_NEAR_NAMES]
            ellipsis = ", …" if len(table) > len(listed) else ""
            raise kind(
                f"no {group} option is called {name!r}",
                expected=f"one of {', '.join(listed)}{ellipsis}",
                got=repr(name),
                hint=nearest(str(name), table),
            )
        try:
            values[name] = table[name](value)
        except _Invalid as error:
            what, expected = error.args
            raise kind(f"{group} option {name} must be {what}", expected=expected, got=repr(value)) from None
    return values, [name for name in values if name not in used]


def _from_environment(environment: Mapping[str, str], kind: type[IpuError]) -> dict[str, Any]:
    """Return the engine options of the first of `ENVIRONMENT` that is set; none without any."""
    variable = next((name for name in ENVIRONMENT if environment.get(name)), None)
    if variable is None:
        return {}
    text = environment[variable]
    expected = """a JSON object, such as '{"debug.instrument": "true"}'"""
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise kind(f"{variable} must be JSON: {error}", expected=expected, got=text) from error
    if not isinstance(options, dict):
        raise kind(f"{variable} must be a JSON object", expected=expected, got=text)
    return options
