"""`Session`, base of inference and training sessions: the model, its parameters, and the calls of their life."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx

from ipujax.front_end import Log, NotCopied, write_file
from ipujax.popart.building import read_model, use_strided_groups, weights_of
from ipujax.popart.devices import DeviceInfo
from ipujax.popart.enumerations import SyntheticDataMode
from ipujax.popart.exceptions import popart_exception, popart_runtime_error, unknown_name
from ipujax.popart.flow import DataFlow, InputShapeInfo, PyWeightsIO, StepIO, StepShape
from ipujax.popart.flow.step_io import synthetic_rows
from ipujax.popart.model_graph.annotated_graph import (
    AnnotatedGraph,
    annotated_graph,
    common_settings,
    ir_text,
    ir_text_of_failed,
    settings_without_effect,
    tensor_names,
)
from ipujax.popart.model_graph.evaluation import RANDOM_OPERATORS, evaluate_graph
from ipujax.popart.model_graph.stage_placement import Placement, placement_of
from ipujax.popart.options import WARNED, SessionOptions
from ipujax.popart.popart_log import logger
from ipujax.popart.session.reports import Reports, dump_ir
from ipujax.popart.session.weight_store import WeightStore, changed_model, save_arrays, saved_variables
from ipujax.popart.steps.grouped_weights import Grouped, grouped_weights, keep_one_group
from ipujax.popart.steps.runner import Runner, compiler_options
from ipujax.popart.steps.step_plan import KEY, StepPlan, anchors_of, base_names, state_of
from ipujax.popart.tensor_info import TensorInfo, whole_number

_LOG = logger("session")


_LOW = 0xFFFFFFFF  # bits of a seed of 64 that one of JAX takes


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of a session's random numbers: the seed, of 64 bits, and the steps that have run since."""

    seed: int = 0
    runs: int = 0

    def key(self) -> jax.Array:
        """Return the key of the next step."""
        key = jax.random.key(self.seed & _LOW)
        key = jax.random.fold_in(key, self.seed >> 32) if self.seed > _LOW else key
        # Folding in the number of the run gives each step other numbers, and `setRNGState` any of them again.
        return jax.random.fold_in(key, self.runs)


class Session(NotCopied, Reports):
    """Base of both kinds of sessions.

    Args:
        model: serialised, a protobuf, or the name of a file.
        flow: batches of a step, and anchors.
        device: of the session.
        shapes: of inputs that the model leaves open.
        options: of the session.
        name: of the session, in profiles.
        loss: name of the loss; empty in inference.
    """

    COPY_HINT = "session.modelToHost(path), and a session of its own for each process"

    def __init__(
        self,
        model: Any,
        flow: DataFlow,
        device: DeviceInfo,
        shapes: InputShapeInfo | None,
        options: SessionOptions | None,
        name: str,
        loss: str,
    ) -> None:
        if not isinstance(device, DeviceInfo):
            raise popart_exception("deviceInfo must be a device", expected="DeviceManager().create…", got=repr(device))
        self.name = name
        self._options = SessionOptions() if options is None else options
        self._options.check()
        self._device = device
        self._flow = flow
        self._model = read_model(model)
        grouped = grouped_weights(self._model, self._options.replicas)
        self._graph, self._placement = self._read(shapes or InputShapeInfo(), loss, grouped)
        self._step = StepShape(flow.batchesPerStep(), self._options.accumulation, self._options.replicas)
        weights = weights_of(self._model)
        # A model that was saved after training has the state of its optimiser among its initialisers.
        saved_states = {name: x for name, x in weights.items() if state_of(name, weights)}
        parameters = {name: x for name, x in weights.items() if name not in saved_states}
        self._store = WeightStore({}, {}, grouped)
        self._store.host = self._store.host_of_model(self._variables(parameters))
        self._store.saved_states = self._store.host_of_model(saved_states)
        self._random = RandomState()
        self._runner: Runner | None = None
        # A program of PopART copies weights that are trained to the device itself.
        self._has_weights = not loss or not self._store.host
        for each in self.optionsWithoutEffect:
            if each in WARNED:
                warnings.warn(f"option {each} has no effect here, see docs/popart.md", UserWarning, stacklevel=3)
        if entries := self._options.entries_without_effect():
            # PopART's own log is off by default, and nothing that is set may be dropped in silence.
            Log("compile").warning("options without effect here: %s", ", ".join(entries))
        if self.optionsWithoutEffect:
            _LOG.info("options without effect: %s", ", ".join(self.optionsWithoutEffect))

    def _read(self, shapes: InputShapeInfo, loss: str, grouped: Grouped) -> tuple[AnnotatedGraph, Placement]:
        """Read the model and place its nodes on IPUs; they compute its outputs, the anchors and the loss."""
        # Reading consumes its model, and `modelToHost` writes the original one with new weights.
        copied = onnx.ModelProto()
        copied.CopyFrom(self._model)
        keep_one_group(copied.graph, grouped)
        tensors = tensor_names(copied.graph)
        outputs = [value.name for value in copied.graph.output if value.name in tensors]
        results = dict.fromkeys([*outputs, *base_names(self._flow, tensors), *([loss] if loss else [])])
        if self._options.groupNormStridedChannelGrouping:
            use_strided_groups(copied.graph)
        try:
            graph = annotated_graph(copied, list(results), shapes)
        except popart_exception as error:
            # What cannot be prepared is what somebody wants to look at.
            dump_ir(ir_text_of_failed(self._model, error))
            raise
        dump_ir(ir_text(graph))
        return graph, placement_of(graph, self._options, self._device)

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        return common_settings(self._graph)

    def _variables(self, weights: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Return the parameters that are values of the step: not those that are constants."""
        return {name: value for name, value in weights.items() if name not in self._graph.constants}

    def _updated_by_operators(self) -> tuple[str, ...]:
        """Return the parameters that operators update."""
        nodes = self._graph.graph.nodes
        norms = (node for node in nodes if node.op_type == "BatchNormalization" and len(node.outputs) > 2)
        statistics = {name for node in norms for name in node.inputs[3:5]}
        copied = {node.inputs[0] for node in nodes if node.op_type == "CopyVarUpdate"}
        return tuple(name for name in self._store.host if name in statistics | copied)

    # Properties that a program may read before the session is prepared.

    @property
    def dataFlow(self) -> DataFlow:
        """Batches of a step, and anchors."""
        return self._flow

    @property
    def replicationFactor(self) -> int:
        """Number of replicas."""
        return self._step.replicas

    @property
    def accumulationFactor(self) -> int:
        """Micro-batches of a replica for one update."""
        return self._step.accumulation

    @property
    def optionsWithoutEffect(self) -> list[str]:
        """Options, fields ("option.field"), annotations and attributes that are set and have no effect here."""
        return [*self._options.without_effect(), *settings_without_effect(self._graph, self._settings)]

    def getInfo(self, name: str) -> TensorInfo:
        """Return element type and shape of a parameter, an input, an anchor or a part of the optimiser's state.

        Raises:
            popart_exception: an unknown name, with the nearest.
        """
        of_replica = {name: TensorInfo(x.dtype, x.shape) for name, x in self._store.replica_shapes().items()}
        infos = {**self._store.infos(), **of_replica, **self._graph.inputs, **self._anchor_infos()}
        if name not in infos:
            raise unknown_name("a session is asked for a tensor", name, infos)
        return infos[name]

    def getAllTensorIds(self) -> set[str]:
        """Return the names of all tensors of the model."""
        return set(self._graph.tensors)

    getTensorIds = getAllTensorIds

    def initAnchorArrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return an array for each anchor, [batches, accumulation, replicas, …] without dimensions of 1."""
        infos = self._anchor_infos()
        kinds = {name: self._flow.art(name) for name in self._flow.anchors()}
        return {
            name: np.empty(self._step.anchor_shape(kind, infos[name]), infos[name].dtype)
            for name, kind in kinds.items()
        }

    @abstractmethod
    def _anchor_infos(self) -> dict[str, TensorInfo]: ...

    def _tensor_infos(self, names: Sequence[str]) -> dict[str, TensorInfo]:
        """Return element types and shapes of tensors for one micro-batch."""
        shapes = {name: jax.ShapeDtypeStruct(i.dims, i.dtype) for name, i in self._graph.inputs.items()}
        shapes |= self._store.replica_shapes()

        def values(operands: Any) -> dict[str, Any]:
            evaluation = evaluate_graph(self._graph, Placement(), operands, {})
            return {name: evaluation.array(name) for name in names}

        return {name: TensorInfo(x.dtype, x.shape) for name, x in jax.eval_shape(values, shapes).items()}

    # Calls in the order in which a program makes them.

    def prepareDevice(self, loadEngine: bool = True) -> None:
        """Compile the session for its device and copy the parameters to it.

        Args:
            loadEngine: whether the engine is loaded now, or with the first step; a log line says when.

        Raises:
            OutOfMemoryException: it does not fit.
        """
        self._device.attach()
        self._store.to_device(self._new_states, self._placed_states)
        runner = Runner(
            self._plan(),
            self._device.device,
            compiler_options(self._options, self._settings),
            self._offloaded(),
            self.name,
            self._store.device,
            self._store.states,
        )
        # Only shapes and element types matter to the compiler.
        rows = synthetic_rows(self._inputs(), self._step, SyntheticDataMode.Zeros)
        runner.compile(*self._arguments(), rows={**rows, **self._keys()})
        self._runner = runner
        self._dump()
        _LOG.info("Graph compiled: %s, %d batches a step", self.name, self._step.batches)
        if loadEngine:
            self.loadEngineAndConnectStreams()

    def loadEngineAndConnectStreams(self) -> None:
        """Load the engine, which a session does by itself with its first step.

        Raises:
            popart_exception: a session that is not prepared.
        """
        if self._runner is None:
            message = f"session {self.name!r} has no compiled engine"
            raise popart_runtime_error(message, hint="session.prepareDevice() first")
        self._runner.is_loaded = True
        _LOG.info("Engine loaded: %s", self.name)

    def setEngineIsLoaded(self, isLoaded: bool) -> None:
        """Say whether the engine is on the device; the next step loads it if not."""
        self._prepared().is_loaded = bool(isLoaded)

    def _prepared(self) -> Runner:
        if self._runner is None:
            raise popart_runtime_error(f"session {self.name!r} is not prepared", hint="session.prepareDevice() first")
        return self._runner

    def run(self, stepio: StepIO, debugName: str = "") -> None:
        """Run a step.

        Args:
            stepio: inputs, and arrays for anchors.
            debugName: of the step, in log lines.

        Raises:
            popart_exception: a session that is not prepared, or data that do not fit; nothing has run then.
        """
        runner = self._prepared()
        if not self._has_weights:
            # The sentence begins as PopART's: programs compare it.
            sentence = "Must call weightsFromHost before run as the session trains weights"
            raise popart_exception(sentence, hint="session.weightsFromHost() first")
        if not runner.is_loaded:
            self.loadEngineAndConnectStreams()
        kinds = {name: self._flow.art(name) for name in self._flow.anchors()}
        infos = self._anchor_infos()
        # All checks come before the call, so that a refused step leaves weights and seed as they were.
        stepio.check_inputs(self._inputs())
        shapes = {name: self._step.anchor_shape(kind, infos[name]) for name, kind in kinds.items()}
        stepio.check_anchors({name: TensorInfo(infos[name].dtype, shape) for name, shape in shapes.items()})
        rows = {**self._rows(stepio), **self._keys()}
        _LOG.debug("run %s %s", self.name, debugName)
        # Before the step, which may change weights and then raise.
        self._store.is_in_sync = self._store.is_in_sync and not self._changes_weights()
        anchors = self._run(runner, rows)
        # JAX reads arrays of the program where they are, which may write others to them after the step.
        jax.block_until_ready(self._store.device)
        self._random = replace(self._random, runs=self._random.runs + 1)
        for name, kind in kinds.items():
            stepio.write(name, kind, _as_type(anchors[name], infos[name]))

    def _rows(self, stepio: StepIO) -> dict[str, np.ndarray[Any, Any]]:
        mode = self._options.syntheticDataMode
        if mode != SyntheticDataMode.Off:
            return synthetic_rows(self._inputs(), self._step, mode)
        return {name: stepio.read(name, info, self._step) for name, info in self._inputs().items()}

    def _inputs(self) -> Mapping[str, TensorInfo]:
        return self._graph.inputs

    def _keys(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return a key for each micro-batch, where operators draw numbers."""
        if not self._has_keys:
            return {}
        keys = jax.random.key_data(jax.random.split(self._random.key(), self._step.micro_batches))
        return {KEY: np.asarray(keys).reshape(*self._step.dims, -1)}

    @cached_property
    def _has_keys(self) -> bool:
        return any(node.op_type in RANDOM_OPERATORS for node in self._graph.graph.all_nodes())

    @abstractmethod
    def _plan(self) -> StepPlan: ...

    @abstractmethod
    def _arguments(self) -> tuple[Any, ...]: ...

    @abstractmethod
    def _run(self, runner: Runner, rows: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]: ...

    def _new_states(self, weights: Any) -> Any:
        return None

    def _placed_states(self, states: Any) -> Any:
        return states

    def _changes_weights(self) -> bool:
        return False

    def _anchors(self, trained: Sequence[str], is_training: bool) -> Any:
        try:
            return anchors_of(self._flow, self._graph.tensors, trained, is_training)
        except popart_exception:
            # PopART builds its graph before it looks at anchors: an operator that does not fit is the first error.
            self._tensor_infos(())
            raise

    def _offloaded(self) -> tuple[int, ...]:
        weights = self._options.weightTensorLocationSettings
        # Parameters are offloaded as one argument: all of them, if the largest is over the limit.
        largest = max((x.size for x in self._store.host.values()), default=0)
        return (0,) if weights.is_off_chip(largest) and not self._placement.has_phases else ()

    # Parameters.

    def weightsFromHost(self) -> None:
        """Copy the parameters of the host to the device."""
        self._store.to_device(self._new_states, self._placed_states)
        self._has_weights = True

    def weightsToHost(self) -> None:
        """Copy the parameters of the device to the host."""
        self._store.to_host()

    def areHostWeightsInSync(self) -> bool:
        """Return whether the parameters of the host are those of the device."""
        return self._store.is_in_sync

    def markHostWeightsInSync(self) -> None:
        """Say that the parameters of the host are those of the device."""
        self._store.is_in_sync = True

    def markHostWeightsOutOfSync(self) -> None:
        """Say that the parameters of the host are not those of the device."""
        self._store.is_in_sync = False

    copyDeviceWeightsToHost = weightsToHost  # PopART has two names for the two halves of its way

    def readWeights(self, weights: PyWeightsIO) -> None:
        """Write parameters of the host into a program's arrays; see `weightsToHost`."""
        self._store.read(weights)

    def writeWeights(self, weights: PyWeightsIO) -> None:
        """Read parameters of the host from a program's arrays; see `weightsFromHost`.

        Raises:
            popart_exception: constant parameters, an unknown name, or an array that does not fit.
        """
        self._refuse_constant_weights("writeWeights")
        self._store.write(weights)

    def modelToHost(self, fn: str | Path) -> None:
        """Copy the parameters to the host and save the model with them.

        Args:
            fn: name of the file.
        """
        self._store.to_host()
        write_file(Path(fn), changed_model(self._model, self._store).SerializeToString())

    def resetHostWeights(
        self, modelProtoOrFilename: Any, ignoreWeightsInModelWithoutCorrespondingHostWeight: bool = False
    ) -> None:
        """Replace the parameters of the host by those of a model; `weightsFromHost` copies them to the device.

        Args:
            modelProtoOrFilename: the model.
            ignoreWeightsInModelWithoutCorrespondingHostWeight: whether parameters that this session lacks are left out.

        Raises:
            popart_exception: constant parameters, or parameters that do not fit.
        """
        self._refuse_constant_weights("resetHostWeights")
        weights = self._store.host_of_model(self._variables(weights_of(read_model(modelProtoOrFilename))))
        self._store.reset(weights, ignoreWeightsInModelWithoutCorrespondingHostWeight)

    def _has_constant_weights(self) -> bool:
        return False

    def _refuse_constant_weights(self, call: str) -> None:
        if self._has_constant_weights():
            message = (
                f"Cannot call {call} when constantWeights is set. Set `constantWeights` to False in the"
                " `SessionOption`s when initialising the session to enable this behaviour."
            )
            raise popart_exception(message, hint="options.constantWeights = False")

    def saveExecutable(self, path: str, savePopartMetadata: bool = True, saveVariables: bool = True) -> None:
        """Save parameters and state; the program is compiled again when they are loaded.

        Args:
            path: of the file.
            savePopartMetadata: has no effect.
            saveVariables: whether parameters are saved.
        """
        self._prepared()
        save_arrays(_as_file(path), saved_variables(self._store) if saveVariables else {})

    def saveVariables(self, path: str) -> None:
        """Save parameters and state to a file."""
        save_arrays(_as_file(path), saved_variables(self._store))

    def loadExecutable(self, filename: str) -> None:
        """Prepare the session with parameters that were saved.

        Raises:
            popart_exception: parameters that do not fit.
        """
        with np.load(_as_file(filename)) as saved:
            self._store.reset({name: saved[name] for name in saved.files}, ignores_missing=False)
        self.prepareDevice()
        self._has_weights = True

    def compileAndExport(self, filename: str) -> None:
        """Compile the session and save parameters and state."""
        self.prepareDevice()
        self.saveExecutable(filename)

    # Random numbers.

    def setRandomSeed(self, seedValue: int) -> None:
        """Restart the random numbers from a seed.

        Raises:
            popart_exception: a session that is not prepared.
        """
        if self._runner is None:
            # The sentence is PopART's: programs compare it.
            sentence = "Devicex::prepare() must be called before Devicex::setRandomSeedFromHost(uint64_t) is called."
            raise popart_runtime_error(sentence, hint="session.prepareDevice() first")
        self._random = RandomState(whole_number("seed", seedValue) & (_LOW << 32 | _LOW))

    def getRandomSeed(self) -> int:
        """Return the seed."""
        return self._random.seed

    def getRNGState(self) -> list[int]:
        """Return the state of random numbers: the seed, and the steps that have run since."""
        return [self._random.seed, self._random.runs]

    def setRNGState(self, rngValue: Sequence[int]) -> None:
        """Set the state of random numbers, as `getRNGState` returns it."""
        if len(rngValue) != 2:
            raise popart_exception(
                "the state of random numbers must be two numbers", expected="two numbers", got=list(rngValue)
            )
        self._random = RandomState(*(whole_number("state of random numbers", n) for n in rngValue))


def _as_file(path: str) -> str:
    return path if str(path).endswith(".npz") else f"{path}.npz"


def _as_type(array: np.ndarray[Any, Any], info: TensorInfo) -> np.ndarray[Any, Any]:
    return array if array.dtype == info.dtype else array.astype(info.dtype)
