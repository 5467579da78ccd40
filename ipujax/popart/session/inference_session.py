"""`InferenceSession`: anchors of a model for the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from ipujax.popart.devices import DeviceInfo
from ipujax.popart.exceptions import popart_exception
from ipujax.popart.flow import DataFlow, InputShapeInfo
from ipujax.popart.options import Patterns, SessionOptions
from ipujax.popart.session.legacy_losses import Loss, with_losses
from ipujax.popart.session.session import Session
from ipujax.popart.steps.runner import Runner
from ipujax.popart.steps.step_plan import StepPlan
from ipujax.popart.tensor_info import TensorInfo


class InferenceSession(Session):
    """Runs a model without gradients.

    Args:
        fnModel: serialised, a protobuf, or the name of a file.
        dataFlow: batches of a step, and anchors.
        deviceInfo: of a `DeviceManager`.
        inputShapeInfo: shapes of inputs that the model leaves open.
        patterns: PopART's rewrites, without effect.
        userOptions: options.
        name: of the session, in profiles.
        losses: losses of earlier releases, whose values can be anchors.
        dataFeed: as dataFlow, of earlier releases.

    Raises:
        popart_exception: no anchor; an unknown anchor or option, with the nearest; gradient accumulation; a model that
            cannot be evaluated.
    """

    def __init__(
        self,
        fnModel: Any,
        dataFlow: DataFlow | None = None,
        deviceInfo: DeviceInfo | None = None,
        inputShapeInfo: InputShapeInfo | None = None,
        patterns: Patterns | None = None,
        userOptions: SessionOptions | None = None,
        name: str = "inference",
        losses: Any = (),
        dataFeed: DataFlow | None = None,
    ) -> None:
        flow = dataFlow or dataFeed or DataFlow(1, {})
        model, _ = with_losses(fnModel, [loss for loss in losses if isinstance(loss, Loss)])
        assert deviceInfo is not None
        super().__init__(model, flow, deviceInfo, inputShapeInfo, userOptions, name, "")
        self._anchors_of_session = self._anchors((), is_training=False)
        self._buffers = self._updated_by_operators()
        self._check_work()
        self._anchor_infos()  # refuses a model that cannot be evaluated

    def _check_work(self) -> None:
        """Refuse a session that computes nothing, or whose options need training."""
        # The sentences are PopART's: programs compare them.
        if self._step.accumulation > 1:
            sentence = "Gradient Accumulation only available when training."
            hint = "more batches in the DataFlow"
            raise popart_exception(sentence, expected="accumulationFactor 1", got=self._step.accumulation, hint=hint)
        if not self._flow.nAnchors():
            sentence = "User must specify an anchor tensor when doing inference."
            raise popart_exception(sentence, expected="DataFlow(batchesPerStep, {name: AnchorReturnType(...)})")
        computed = {name for node in self._model.graph.node for name in node.output}
        if computed and computed.isdisjoint(self._flow.anchors()):
            sentence = "All operations in the main graph were pruned, nothing to compute"
            raise popart_exception(sentence, expected="an anchor that an operation computes", got=self._flow.anchors())

        if grouped := [name for name in self._buffers if name in self._store.grouped]:
            message = "a parameter with values for groups of replicas does not go with an operator that updates it"
            expected = "equal numbers on all replicas, or no VariableSettings"
            raise popart_exception(message, expected=expected, got=", ".join(grouped))

    @cached_property
    def _infos(self) -> dict[str, TensorInfo]:
        return self._tensor_infos(self._anchors_of_session.values)

    def _anchor_infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def _plan(self) -> StepPlan:
        return StepPlan(
            graph=self._graph,
            placement=self._placement,
            anchors=self._anchors_of_session,
            step=self._step,
            buffers=self._buffers,
            frozen=tuple(name for name in self._store.host if name not in self._buffers),
            grouped=self._store.grouped,
        )

    def _arguments(self) -> tuple[Any, ...]:
        buffers = {name: self._store.device[name] for name in self._buffers}
        return {name: x for name, x in self._store.device.items() if name not in buffers}, buffers, {}

    def _run(self, runner: Runner, rows: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        anchors = []
        for call in runner.calls(rows):
            # Weights in streaming memory are no result: they stay there.
            weights, buffers, anchors_of_call = runner.call(*self._arguments(), call)
            self._store.device = {**self._store.device, **weights, **buffers}
            anchors.append(anchors_of_call)
        return runner.anchors_by_name(anchors)

    def _changes_weights(self) -> bool:
        return bool(self._buffers)

    def _has_constant_weights(self) -> bool:
        return bool(self._options.constantWeights)
