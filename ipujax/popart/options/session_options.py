"""`SessionOptions`: attributes with PopART's names and defaults, and the checks of a session."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from enum import Enum
from numbers import Integral, Real
from operator import attrgetter
from os import PathLike
from typing import Any

import numpy as np

import ipujax as ipu
from ipujax.front_end import read_options
from ipujax.popart.enumerations import PatternsLevel, TensorStorage, VirtualGraphMode
from ipujax.popart.exceptions import popart_attribute_error, popart_exception, unknown_name
from ipujax.popart.options.tables import ALL_OPTIONS, FIELDS_WITHOUT_EFFECT, REFUSED, WITHOUT_EFFECT

# Options of earlier releases → the ones in their place, and the value for True.
_EARLIER = {"autoVirtualGraph": ("virtualGraphMode", VirtualGraphMode.Auto),
            "enableVirtualGraphs": ("virtualGraphMode", VirtualGraphMode.Manual)}  # fmt: skip
# Deprecated options → the ones of another name that take their values.
_DEPRECATED = {"prefetchBufferingDepthMap": "bufferingDepthMap",
               "defaultPrefetchBufferingDepth": "defaultBufferingDepth"}  # fmt: skip
# Options that are dictionaries → their groups in `poplar_options`.
OPTION_DICTIONARIES = {
    "convolutionOptions": "convolution",
    "engineOptions": "engine",
    "gclOptions": "GCL",
    "lstmOptions": "LSTM",
    "matmulOptions": "matmul",
    "reportOptions": "report",
}
# Options of Poplar's engine that turn reports on; all others but the directory steer a compiler that is not there.
REPORT_SWITCHES = (
    "debug.instrument",
    "debug.instrumentCompute",
    "autoReport.all",
    "autoReport.outputExecutionProfile",
    "autoReport.outputGraphProfile",
)
REPORT_DIRECTORY = "autoReport.directory"


# Types of defaults, a type before those it derives from → types of other values.
_CONVERTED: Mapping[type, Any] = {
    bool: Integral | np.bool_,
    int: Integral,
    float: Real,
    str: PathLike,
    list: Collection,
    set: Collection,
    dict: Mapping,
}


class SessionOptions:
    """Options of a session: attributes that may be set one by one.

    Three tables list them: `popart.options.MAPPED`, `WITHOUT_EFFECT` and `REFUSED`; the last ones raise when a session
    is made with another value than their default.

    Raises:
        popart_exception: at setting an attribute, for an unknown option, with the nearest.
    """

    def __init__(self) -> None:
        # Defaults are functions: a shared dict or list would carry changes from one session to the next.
        for name, (default, _) in ALL_OPTIONS.items():
            object.__setattr__(self, name, default())

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _EARLIER:
            option, mode = _EARLIER[name]
            value = mode if value else VirtualGraphMode.Off
            name = option
        if name in _DEPRECATED:
            warnings.warn(f"{name} has been deprecated: use {_DEPRECATED[name]}", DeprecationWarning, stacklevel=2)
            name = _DEPRECATED[name]
        if name not in ALL_OPTIONS:
            raise unknown_name("SessionOptions has an option", name, ALL_OPTIONS, popart_attribute_error)
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unknown_name("SessionOptions has an option", name, ALL_OPTIONS, popart_attribute_error)

    def enableExplicitIR(self, enable: bool) -> None:
        """Set the three options of PopART's explicit graph, which have no effect here."""
        self.useHostCopyOps = enable
        self.enableExplicitMainLoops = enable
        self.explicitRecomputation = enable

    def getGlobalReplicationFactor(self) -> int:
        """Return the number of replicas."""
        return self.replicas

    @property
    def accumulation(self) -> int:
        """Micro-batches of a replica for one update."""
        return int(self.accumulationFactor) if self.enableGradientAccumulation else 1

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return int(self.replicatedGraphCount) if self.enableReplicatedGraphs else 1

    def changed(self) -> list[str]:
        """Return the names of the options that differ from their defaults."""
        return [name for name, (default, _) in ALL_OPTIONS.items() if getattr(self, name) != default()]

    def without_effect(self) -> list[str]:
        """Return the options, fields of options and engine options that are set and have no effect here."""
        options = [name for name in self.changed() if name in WITHOUT_EFFECT]
        fields = [path for path in FIELDS_WITHOUT_EFFECT if self._has_changed(path)]
        return [*options, *fields, *(f"engineOptions[{key!r}]" for key in self._read("engineOptions"))]

    def entries_without_effect(self) -> list[str]:
        """Return the entries of option dictionaries that are set and have no effect here, as `option['entry']`."""
        return [f"{option}[{key!r}]" for option in OPTION_DICTIONARIES for key in self._read(option)]

    def _read(self, option: str) -> list[str]:
        """Return the entries without effect of an option dictionary; refuse unknown ones."""
        if option == "engineOptions":
            return self._read_engine()[1]
        return read_options(OPTION_DICTIONARIES[option], getattr(self, option), (), popart_exception)[1]

    def _read_engine(self) -> tuple[dict[str, Any], list[str]]:
        """Return the engine options, of the program and of the environment, and those without effect."""
        used = (*REPORT_SWITCHES, REPORT_DIRECTORY)
        values, without_effect = read_options("engine", self.engineOptions, used, popart_exception)
        has_reports = any(values.get(name) for name in REPORT_SWITCHES)
        unused = [REPORT_DIRECTORY] if REPORT_DIRECTORY in values and not has_reports else []
        return values, [*without_effect, *unused]

    @property
    def has_reports(self) -> bool:
        """True if an engine option turns reports on."""
        values, _ = self._read_engine()
        return any(values.get(name) for name in REPORT_SWITCHES)

    @property
    def report_directory(self) -> str:
        """Directory of the saved profile; empty for none."""
        values, _ = self._read_engine()
        return str(values.get(REPORT_DIRECTORY, "")) if self.has_reports else ""

    def _has_changed(self, path: str) -> bool:
        option, _, field = path.partition(".")
        read = attrgetter(field)
        return bool(read(getattr(self, option)) != read(ALL_OPTIONS[option][0]()))

    def check(self) -> None:
        """Refuse options that no session has, and combinations that contradict each other.

        Raises:
            popart_exception: with the option's name and its replacement, or the nearest entry of a dictionary.
        """
        for name in self.changed():
            if name in REFUSED:
                default, instead = REFUSED[name]
                expected = repr(default())
                got = repr(getattr(self, name))
                raise popart_exception(f"option {name} is not supported", expected=expected, got=got, hint=instead)
        self._check_kinds()
        self.entries_without_effect()
        self._check_memories()
        self._check_counts()

    def _check_kinds(self) -> None:
        for name, (default, _) in ALL_OPTIONS.items():
            value = getattr(self, name)
            if not is_of_kind(value, default()):
                expected = type(default()).__name__
                raise popart_exception(f"option {name} cannot have this value", expected=expected, got=repr(value))

    def _check_memories(self) -> None:
        """Refuse tensors off chip where no program has them: outside of phases, or without the optimiser's state."""
        off_chip = TensorStorage.OffChip
        has_phases = self.virtualGraphMode == VirtualGraphMode.ExecutionPhases
        if self.executionPhaseSettings.phases > 0 and not has_phases:
            message = "executionPhaseSettings.phases is set, but virtualGraphMode is not ExecutionPhases"
            raise popart_exception(message, expected="VirtualGraphMode.ExecutionPhases", got=self.virtualGraphMode)
        if self.activationTensorLocationSettings.location.storage is off_chip and not has_phases:
            message = "activationTensorLocationSettings: activations can be off chip only between execution phases"
            hint = "VirtualGraphMode.ExecutionPhases, or autoRecomputation"
            raise popart_exception(message, expected="TensorStorage.OnChip", got="OffChip", hint=hint)
        # An accumulator is a part of the optimiser's state, which is offloaded as one argument.
        of_state = self.optimizerStateTensorLocationSettings.location.storage
        if self.accumulatorTensorLocationSettings.location.storage is off_chip and of_state is not off_chip:
            message = "accumulatorTensorLocationSettings: accumulators can be off chip only if the optimiser's state is"
            hint = "optimizerStateTensorLocationSettings, too"
            raise popart_exception(message, expected="TensorStorage.OnChip", got="OffChip", hint=hint)

    def _check_counts(self) -> None:
        """Refuse counts of replicas and micro-batches below one, and those whose switch is off."""
        counts = (
            ("accumulationFactor", self.accumulationFactor, "enableGradientAccumulation"),
            ("replicatedGraphCount", self.replicatedGraphCount, "enableReplicatedGraphs"),
        )
        for name, count, switch in counts:
            if isinstance(count, bool) or count < 1:
                raise popart_exception(f"{name} must be a positive number", expected="at least 1", got=count)
            if count > 1 and not getattr(self, switch):
                message = f"{switch} is false, but {name} > 1."
                raise popart_exception(message, expected=f"{switch} = True", got=count)
        if self.replicas > 1 and (num_processes := ipu.distributed.num_instances()) > 1:
            message = f"a session has one replica in each process: this is one of {num_processes} processes"
            hint = "ipujax.popart.horovod, without replicatedGraphCount"
            raise popart_exception(message, expected="replicatedGraphCount = 1", got=self.replicas, hint=hint)


def is_of_kind(value: Any, default: Any) -> bool:
    """Return whether an option may have a value: it is of the type of its default, or converts to it without loss."""
    kind = type(default)
    if default is None or isinstance(value, kind):
        return True
    if isinstance(default, Enum):
        return isinstance(value, Integral) and not isinstance(value, bool | Enum) and value in list(type(default))
    for base, others in _CONVERTED.items():
        if isinstance(default, base):
            return isinstance(value, others) and not isinstance(value, str)  # a text is a collection of letters
    return False


class Patterns:
    """PopART's graph rewrites, by their names; the compiler has passes of its own.

    One thing depends on them: training refuses an operator whose gradient is made by a rewrite that is turned off.

    Args:
        patterns: a `PatternsLevel`, or names of rewrites.
    """

    def __init__(self, patterns: Any = None) -> None:
        self._patterns = patterns
        self._settings: dict[str, bool] = {}

    def enablePattern(self, name: str, value: bool = True) -> Patterns:
        """Turn a rewrite on or off; return this object."""
        self._settings[name] = value
        return self

    def isPatternEnabled(self, name: str) -> bool:
        """Return whether a rewrite is on: as it was set, else as the level or the list of names says."""
        if name in self._settings:
            return self._settings[name]
        if isinstance(self._patterns, list | tuple | set | frozenset):
            return name in self._patterns
        return self._patterns != PatternsLevel.NoPatterns

    def enableRuntimeAsserts(self, value: bool) -> Patterns:
        """Return this object."""
        return self

    def __getattr__(self, name: str) -> bool:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.isPatternEnabled(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            self._settings[name] = bool(value)
