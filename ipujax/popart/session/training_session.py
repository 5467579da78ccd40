"""`TrainingSession`: gradients and updates for the batches of a step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ipujax as ipu
from ipujax.popart.building.annotations import RECOMPUTE
from ipujax.popart.devices import DeviceInfo
from ipujax.popart.enumerations import RecomputationType, RecomputeType, ReplicatedTensorSharding
from ipujax.popart.exceptions import popart_exception, unknown_name
from ipujax.popart.flow import DataFlow, InputShapeInfo
from ipujax.popart.flow.host_streams import Callback, HostStreams
from ipujax.popart.model_graph.gradient_paths import missing_pattern, names_with_gradients
from ipujax.popart.optimisers import Optimizer, state_type
from ipujax.popart.options import Patterns, SessionOptions
from ipujax.popart.popart_log import logger
from ipujax.popart.reserved_names import ACCUMULATOR, GRADIENT, UPDATED
from ipujax.popart.session.legacy_losses import Loss, with_losses
from ipujax.popart.session.session import Session
from ipujax.popart.session.weight_store import named_states
from ipujax.popart.steps.runner import Runner, as_device_values
from ipujax.popart.steps.step_plan import StepPlan
from ipujax.popart.steps.training_step import DEFAULT_VALUES, Transformation, sharded
from ipujax.popart.tensor_info import TensorInfo

_LOG = logger("session")


class TrainingSession(Session):
    """Trains a model.

    Args:
        fnModel: serialised, a protobuf, or the name of a file.
        dataFlow: batches of a step, and anchors.
        loss: name of the loss, a scalar; or losses of earlier releases.
        optimizer: of the parameters.
        deviceInfo: of a `DeviceManager`.
        inputShapeInfo: shapes of inputs that the model leaves open.
        patterns: PopART's rewrites; one that makes a gradient of the model may not be turned off.
        userOptions: options.
        name: of the session, in profiles.
        losses: losses of earlier releases; several are added.
        dataFeed: as dataFlow, of earlier releases.

    Raises:
        popart_exception: an unknown loss, anchor or option, with the nearest; stages that run backwards; a model that
            cannot be evaluated.
    """

    def __init__(
        self,
        fnModel: Any,
        dataFlow: DataFlow | None = None,
        loss: Any = None,
        optimizer: Optimizer | None = None,
        deviceInfo: DeviceInfo | None = None,
        inputShapeInfo: InputShapeInfo | None = None,
        patterns: Patterns | None = None,
        userOptions: SessionOptions | None = None,
        name: str = "training",
        losses: Any = (),
        dataFeed: DataFlow | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise popart_exception("a TrainingSession needs an optimiser", expected="SGD, Adam…", got=repr(optimizer))
        losses_of_program = [loss, *losses] if loss is not None else list(losses)
        earlier = [each for each in losses_of_program if isinstance(each, Loss)]
        model, added = with_losses(fnModel, earlier)
        name_of_loss = added if earlier else loss
        if not isinstance(name_of_loss, str) or not name_of_loss:
            raise popart_exception("a TrainingSession needs a loss", expected="the name of a tensor", got=repr(loss))
        assert deviceInfo is not None
        self._loss = name_of_loss
        self._optimizer = optimizer
        flow = dataFlow or dataFeed or DataFlow(1, {})
        super().__init__(model, flow, deviceInfo, inputShapeInfo, userOptions, name, name_of_loss)
        self._trained, self._buffers = self._roles()
        self._anchors_of_session = self._anchors(self._trained, is_training=True)
        self._check_patterns(patterns)
        self._check_recomputation()
        self._check_specific_values()
        self._check_tracked_tensors()
        self._host_streams = HostStreams(self._trained if self._options.hostAllReduce else ())
        if self._options.hostAllReduce and self._step.replicas > 1:
            message = "hostAllReduce takes gradients of one replica in each process"
            raise popart_exception(message, expected="replicatedGraphCount = 1", got=self._step.replicas)
        self._check_grouped_weights()
        self._constants = optimizer.constants(self._trained)
        self._device_values = self._values()
        self._anchor_infos()  # refuses anchors without gradients, and a model that cannot be evaluated
        states = named_states(jax.eval_shape(self._new_states, self._store.device_shapes()))
        zeros = {name: self._store.host_of_device(name, np.zeros(x.shape, x.dtype)) for name, x in states.items()}
        self._store.host_states = {name: self._store.saved_states.get(name, x) for name, x in zeros.items()}
        if self._placement.is_pipelined and self._step.accumulation == 1:
            _LOG.warning("pipelining without gradient accumulation: batches run one after another, updates are exact")

    def _roles(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the parameters that are trained, and those that operators update."""
        updated = self._updated_by_operators()
        # Whole numbers have no gradient, and statistics are updated by their operators.
        # A weight that the loss does not depend on has no gradient: it does not decay either.
        paths = names_with_gradients(self._graph, self._loss)
        trained = (name for name, x in self._store.host.items()
                   if name in paths and name not in updated and jnp.issubdtype(x.dtype, jnp.floating))  # fmt: skip
        return tuple(trained), updated

    def _check_patterns(self, patterns: Patterns | None) -> None:
        if not isinstance(patterns, Patterns):
            return
        sources = {*self._trained, *self._anchors_of_session.gradients}
        missing = missing_pattern(self._graph, self._loss, sources, patterns.isPatternEnabled)
        if missing is not None:
            raise popart_exception(f"This op should have been removed by pattern {missing}", got=patterns)

    def _check_recomputation(self) -> None:
        is_manual = any(notes.get(RECOMPUTE) == RecomputeType.Recompute for notes in self._graph.annotations)
        if is_manual and self._options.autoRecomputation != RecomputationType.NoRecompute:
            # The sentence is PopART's: programs compare it.
            sentence = "A mixture of auto and manual recomputation is not supported"
            hint = "autoRecomputation, or builder.recomputeOutputInBackwardPass"
            raise popart_exception(sentence, got=self._options.autoRecomputation, hint=hint)

    def _check_specific_values(self) -> None:
        for name in self._optimizer.specific_weights:
            if name not in self._store.host:
                raise unknown_name("the optimiser has values of a weight", name, self._store.host)

    def _check_tracked_tensors(self) -> None:
        settings = self._options.automaticLossScalingSettings
        for name in settings.toTrackTensors or () if settings.enabled else ():
            if name not in self._trained:
                place = "automaticLossScalingSettings.toTrackTensors has a weight"
                raise unknown_name(place, name, self._trained)

    def _check_grouped_weights(self) -> None:
        """Refuse features of training that read weights of all replicas, where groups have values of their own."""
        grouped = self._store.grouped
        refused = {
            "automaticLossScalingSettings": self._options.automaticLossScalingSettings.enabled,
            "clip_norm_settings": bool(self._optimizer.clipNormSettings),
            "replicatedTensorSharding": bool(self._least_sharded()),
            "an operator that updates it": any(name in grouped for name in self._buffers),
        }
        for feature, is_used in refused.items():
            if grouped and is_used:
                message = f"a parameter with values for groups of replicas does not go with {feature}"
                expected = "equal numbers on all replicas, or no VariableSettings"
                raise popart_exception(message, expected=expected, got=", ".join(grouped))

    @cached_property
    def _infos(self) -> dict[str, TensorInfo]:
        """Return type and shape of each anchor; refuse a loss that is no scalar, and anchors that the step lacks."""
        anchors = self._anchors_of_session
        names = [*anchors.values, *anchors.gradients, *anchors.weights, *anchors.accumulators, self._loss]
        infos = self._tensor_infos(names)
        if infos[self._loss].nelms() != 1:
            message = f'Loss tensor, "{self._loss}", must be a scalar tensor'
            hint = "a reduction of the loss: ReductionType.Sum or Mean"
            raise popart_exception(message, expected="one element", got=infos[self._loss], hint=hint)
        with_gradients = names_with_gradients(self._graph, self._loss)
        for name in anchors.gradients:
            if name not in with_gradients or not jnp.issubdtype(infos[name].dtype, jnp.floating):
                # The first sentence is PopART's: programs compare it.
                sentence = f"Anchor tensor `{GRADIENT}{name}' not in Ir Tensors."
                message = f"{sentence} No path with gradients leads to the loss."
                expected = "floating-point elements that the loss depends on"
                raise popart_exception(message, expected=expected, got=f"{name}: {infos[name]}")
        infos_by_anchor = {name: infos[name] for name in (*anchors.values, *anchors.weights)}
        infos_by_anchor |= {GRADIENT + name: infos[name] for name in anchors.gradients}
        weights = self._shapes()
        for name in anchors.accumulators:
            dtype = infos[name].dtype
            is_summed = self._step.accumulation > 1
            accumulated = state_type(self._optimizer.accum_type, dtype) if is_summed else dtype
            infos_by_anchor[ACCUMULATOR + name] = TensorInfo(accumulated, infos[name].dims)
        states = jax.eval_shape(self._new_states, weights)["optimizer"]
        for name, (prefix, weight) in anchors.states.items():
            parts = {UPDATED: weights[weight]} if prefix == UPDATED else states.get(weight, {})
            if prefix not in parts:
                raise unknown_name("DataFlow has an anchor", name, [p + w for w, s in states.items() for p in s])
            infos_by_anchor[name] = TensorInfo(parts[prefix].dtype, parts[prefix].shape)
        return infos_by_anchor

    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self._store.replica_shapes()

    def _anchor_infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def _plan(self) -> StepPlan:
        """Return all that the functions of a step depend on, which is fixed when the session is prepared."""
        anchors = self._anchors_of_session
        inner = [name for name in anchors.gradients if name not in self._trained]
        options = self._options
        return StepPlan(
            graph=self._graph,
            placement=self._placement,
            anchors=anchors,
            step=self._step,
            trained=self._trained,
            buffers=self._buffers,
            frozen=self._frozen(),
            zeros={name: self._infos[GRADIENT + name] for name in inner},
            loss=self._loss,
            optimizer=self._optimizer,
            reduction=options.accumulationAndReplicationReductionType,
            mean_strategy=options.meanAccumulationAndReplicationReductionStrategy,
            loss_scaling=options.automaticLossScalingSettings,
            least_sharded=self._least_sharded(),
            host_streams=self._host_streams,
            grouped=self._store.grouped,
        )

    def _least_sharded(self) -> int:
        """Return the elements of the smallest parameter whose state is sharded; 0 for none, as on one replica."""
        settings = self._options.optimizerStateTensorLocationSettings
        is_on = settings.location.replicatedTensorSharding == ReplicatedTensorSharding.On
        return max(int(settings.minElementsForReplicatedTensorSharding), 1) if is_on and self._step.replicas > 1 else 0

    def _placed_states(self, states: Any) -> Any:
        plan = self._plan()
        # The state is made already, whole: only its division is needed.
        return sharded(Transformation(lambda _: states, lambda *_: None), plan).init(
            {name: self._store.device[name] for name in self._trained}
        )

    def _frozen(self) -> tuple[str, ...]:
        return tuple(name for name in self._store.host if name not in self._trained and name not in self._buffers)

    def _new_states(self, weights: Any) -> Any:
        """Return the optimiser's state before the first step, and that of loss scaling."""
        values = self._optimizer.hyperparameters(self._trained)
        states: dict[str, Any] = {
            "optimizer": {
                name: self._optimizer.initial_state(weights[name], values.get(name, values[DEFAULT_VALUES]))
                for name in self._trained
            }
        }
        if self._options.automaticLossScalingSettings.enabled:
            scale = self._optimizer.getLossScalingVal()
            states |= {"scale": jnp.asarray(scale, jnp.float32), "batches": jnp.zeros((), jnp.int32)}
        return states

    def _values(self) -> Any:
        values = self._optimizer.hyperparameters(self._trained)
        # Those that the first optimiser calls constant are a part of the compiled step.
        changing = {
            weight: {name: x for name, x in named.items() if name not in self._constants.get(weight, {})}
            for weight, named in values.items()
        }
        return as_device_values(changing)

    def _arguments(self) -> tuple[Any, ...]:
        device = self._store.device
        groups = (self._trained, self._buffers, self._frozen())
        trained, buffers, frozen = ({name: device[name] for name in names} for names in groups)
        return trained, self._store.states, buffers, frozen, self._device_values

    def _offloaded(self) -> tuple[int, ...]:
        """Return the offloaded arguments, 0 for weights, 1 for the optimiser's state: whole, by the largest weight."""
        options = self._options
        sizes = [x.size for x in self._store.host.values()]
        largest = max(sizes, default=0)
        settings = (options.weightTensorLocationSettings, options.optimizerStateTensorLocationSettings)
        if self._placement.has_phases:
            return ()
        return tuple(position for position, each in enumerate(settings) if each.is_off_chip(largest))

    def _run(self, runner: Runner, rows: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        self._host_streams.check()
        anchors = []
        for call in runner.calls(rows):
            weights, self._store.states, buffers, anchors_of_call = runner.call(*self._arguments(), call)
            self._store.device = {**self._store.device, **weights, **buffers}
            anchors.append(anchors_of_call)
        return runner.anchors_by_name(anchors)

    def _changes_weights(self) -> bool:
        return True

    def updateEngineCache(self) -> None:
        """Return at once: each compilation reads the directory of programs (`cachePath`) as it is then."""

    def updateOptimizerFromHost(self, optimizer: Optimizer | None = None) -> None:
        """Go on with other values of the optimiser; nothing is compiled.

        Args:
            optimizer: of the kind the session has; None for the one it has.

        Raises:
            popart_exception: another kind, or a constant value that changes.
        """
        if optimizer is not None:
            self._optimizer.check_successor(optimizer)
            # A refused optimiser must not stay: the session goes on with the one it had.
            previous = self._optimizer
            self._optimizer = optimizer
            unknown = [name for name in optimizer.specific_weights if name not in self._store.host]
            if unknown:
                self._optimizer = previous
                raise unknown_name("the optimiser has values of a weight", unknown[0], self._store.host)
        self._device_values = self._values()

    def getHostReduceStreamIds(self) -> list[str]:
        """Return the streams of gradients, all to the host, then all back; none without `hostAllReduce`."""
        return self._host_streams.handles

    def connectStreamToCallback(self, streamHandle: str, callback: Callback, index: int = 0) -> None:
        """Set the function of a stream of gradients.

        Args:
            streamHandle: one of `getHostReduceStreamIds`.
            callback: takes the buffer as an array; reads it, or writes it where the stream goes to the device.
            index: of the replica, 0.

        Raises:
            popart_exception: an unknown stream or replica, or no function.
        """
        if index != 0:
            raise popart_exception("streams of gradients have one replica", expected="index 0", got=index)
        self._host_streams.connect(streamHandle, callback)

    def broadcastWeights(self, rootRank: int = 0) -> None:
        """Give all processes the weights and the optimiser's state of one, on the host and on the device.

        Args:
            rootRank: number of the process with the weights.
        """
        self.weightsToHost()
        store = self._store
        host, states = ipu.distributed.broadcast((store.host, store.host_states), rootRank)
        store.host, store.host_states = ({name: np.array(x) for name, x in each.items()} for each in (host, states))
        self.weightsFromHost()
