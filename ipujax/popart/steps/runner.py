"""A session's function on its device: compiled once, called for each step or, where it is pipelined, each batch.

Input: rows of micro-batches as NumPy arrays [batches, accumulation, replicas, …]. Output: anchors with the same leading
dimensions.

The step of an inference session is a JAX function here: anchors of all micro-batches, in a loop or a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.front_end import IpuFunction, Recompute
from ipujax.popart.building.annotations import AVAILABLE_MEMORY
from ipujax.popart.enumerations import RecomputationType
from ipujax.popart.exceptions import OutOfMemoryException, popart_exception
from ipujax.popart.flow import AnchorReturnType, AnchorReturnTypeId
from ipujax.popart.model_graph.annotated_graph import partials_of
from ipujax.popart.model_graph.evaluation import evaluate_graph
from ipujax.popart.operators.domain import REPLICA_AXIS, of_replicas, seeded
from ipujax.popart.options import SessionOptions
from ipujax.popart.steps.grouped_weights import as_rows, local, local_states, specs, states_as_rows
from ipujax.popart.steps.micro_batches import Results, in_loop, in_pipeline, reductions
from ipujax.popart.steps.step_plan import KEY, StepPlan, key_of
from ipujax.popart.steps.training_step import TrainingStep


class InferenceStep:
    """Functions of an inference session.

    Args:
        plan: of the session.
        count: micro-batches of a call.
    """

    def __init__(self, plan: StepPlan, count: int) -> None:
        self.plan = plan
        reduce = reductions(plan.anchors)
        if plan.placement.has_stages:
            self._run = in_pipeline(self.micro_batch, count, reduce, plan.placement)
        else:
            self._run = in_loop(self.micro_batch, count, reduce)

    def micro_batch(self, weights: Any, buffers: Any, frozen: Any, scale: Any, rows: Any) -> Results:
        """Return the anchors of one micro-batch.

        Args:
            weights: parameters by name.
            buffers: parameters that operators update.
            frozen: other parameters.
            scale: has no effect.
            rows: inputs, with a first axis of one.
        """
        plan = self.plan
        inputs = {name: value[0] for name, value in rows.items() if name != KEY}
        with seeded(key_of(rows), has_masks=False), of_replicas(plan.step.replicas):
            evaluation = evaluate_graph(plan.graph, plan.placement, {**inputs, **weights, **buffers, **frozen}, {})
        anchored = {name: evaluation.array(name) for name in plan.anchors.values}
        return {"anchors": anchored, "buffers": {**buffers, **evaluation.updates}}

    def step(self, weights: Any, buffers: Any, frozen: Any, rows: Any) -> Results:
        """Return the anchors of several micro-batches, and the buffers after them.

        Args:
            weights: by name.
            buffers: by name.
            frozen: by name.
            rows: inputs of a replica, [micro-batches, …].
        """
        scale = jnp.ones((), jnp.float32)
        return self._run(weights, buffers, frozen, scale, rows)


Array = np.ndarray[Any, Any]
Arrays = dict[str, Any]  # on the device, by name
Rows = Mapping[str, Array]  # of a step, [batches, accumulation, replicas, …]


class Runner:
    """The function of a session, compiled for its device.

    Args:
        plan: of the session.
        device: of the session.
        options: of the compiler.
        offload: positions of the arguments that are in streaming memory: 0 for weights, 1 for the optimiser's state.
        name: of the session, for profiles.
        weights: parameters as they are on the device.
        states: the optimiser's state there.
    """

    def __init__(
        self,
        plan: StepPlan,
        device: ipu.IPUModel | ipu.CPU,
        options: ipu.Options,
        offload: tuple[int, ...],
        name: str,
        weights: Arrays,
        states: Any = None,
    ) -> None:
        self.plan = plan
        self.is_loaded = False  # as a program sees it: whether the engine is on the device
        self.unreported_calls = 0  # calls of the function since the last report that resets the profile
        self._device = device
        replicas = plan.step.replicas
        self._is_resident = 0 not in offload  # weights in streaming memory are loaded from there, and stay there
        function = self._training() if plan.loss else self._inference()
        function.__name__ = name
        is_training = bool(plan.loss)
        donated = (0, 1) if self._is_resident else (1,)
        # Weights and state are replicated, but for shards of the state and what groups of replicas have of their own;
        # inputs and anchors are divided by replica.
        of_states = ipu.optim.shard_specs(states)
        if plan.grouped and states is not None:
            of_states = {**of_states, "optimizer": specs(states["optimizer"], weights, plan.grouped)}
        trained, frozen = ({name: weights[name] for name in names} for names in (plan.trained, plan.frozen))
        of_weights = specs(trained if is_training else frozen, weights, plan.grouped)
        of_frozen = specs(frozen, weights, plan.grouped)
        same = (of_weights, of_states, P(), of_frozen, P()) if is_training else (of_weights, P(), P())
        split = P(REPLICA_AXIS)
        settings: dict[str, Any] = {}
        if replicas > 1:
            settings = {"replicas": replicas, "in_specs": (*same, split)}
            of_resident = of_weights if self._is_resident else P()
            settings["out_specs"] = (of_weights, of_states, P(), split) if is_training else (of_resident, P(), split)
        self._function: IpuFunction[..., Any] = ipu.jit(
            function,
            device=self._device,
            # Donated arguments stay on the device. Old weights, states and buffers are freed for the new ones;
            # inference returns its weights as they are.
            donate_argnums=(0, 1, 2) if is_training else donated,
            offload_argnums=offload,
            options=options,
            **settings,
        )
        self._function.unused_settings.ignore_options()  # the session names those of PopART
        self._compiled: Any = None

    def _training(self) -> Callable[..., Any]:
        """Return the function of a training step on one replica; grouped weights come and go as rows by group."""
        step = TrainingStep(self.plan)
        run = step.batch if self.plan.runs_batches_on_host else step.step

        def train(weights: Any, states: Any, buffers: Any, frozen: Any, values: Any, rows: Any) -> Any:
            grouped = self.plan.grouped
            of_replica = local_states(states, weights, grouped)
            before = local(weights, grouped), of_replica, buffers, local(frozen, grouped)
            *after, anchors = run(*before, values, self._rows_of_replica(rows))
            after[:2] = as_rows(after[0], grouped), states_as_rows(after[1], states) if grouped else after[1]
            after[2] = self._equal_on_replicas(after[2])
            return (*after, self._by_replica(anchors))

        return train

    def _inference(self) -> Callable[..., Any]:
        """Return the function of a step of inference on one replica."""
        # Phases stand in no loop: the host runs one micro-batch after another.
        step = InferenceStep(self.plan, 1 if self.plan.placement.has_phases else self._rows_of_inference)

        def infer(weights: Any, buffers: Any, frozen: Any, rows: Any) -> Any:
            of_replica = local(weights, self.plan.grouped)
            results = step.step(of_replica, buffers, frozen, self._rows_of_replica(rows))
            after = self._equal_on_replicas(results["buffers"])
            return weights if self._is_resident else {}, after, self._by_replica(results["anchors"])

        return infer

    @property
    def _rows_of_inference(self) -> int:
        return self.plan.step.batches * self.plan.step.accumulation

    def _rows_of_replica(self, rows: Any) -> Any:
        return jax.tree.map(lambda x: x[0], rows) if self.plan.step.replicas > 1 else rows

    def _by_replica(self, anchors: Any) -> Any:
        return jax.tree.map(lambda x: x[None], anchors) if self.plan.step.replicas > 1 else anchors

    def _equal_on_replicas(self, buffers: Any) -> Any:
        # Running statistics are means over the replicas; PopART returns those of the first replica. So are counts here,
        # of which a mean is no whole number.
        if self.plan.step.replicas == 1:
            return buffers
        return {name: _equal_on_replicas(x) for name, x in buffers.items()}

    @property
    def is_compiled(self) -> bool:
        """True once the function is compiled."""
        return self._compiled is not None

    def compile(self, *arguments: Any, rows: Rows) -> None:
        """Compile the function.

        Args:
            arguments: before the rows, arrays or their shapes.
            rows: of a step; their values do not matter.

        Raises:
            OutOfMemoryException: the program does not fit the device.
        """
        if isinstance(self._device, ipu.CPU):
            self._compiled = False
            return
        try:
            self._compiled = self._function.lower(*arguments, next(self.calls(rows))).compile()
        except (ipu.TileMemoryError, ipu.StreamingMemoryError) as error:
            raise OutOfMemoryException(error.what, expected=error.expected, got=error.got, hint=error.hint) from error
        except ipu.IpuError as error:
            if isinstance(error, popart_exception):
                raise
            raise popart_exception(error.what, expected=error.expected, got=error.got, hint=error.hint) from error

    @property
    def profile(self) -> ipu.Profile | None:
        """The profile of one call; None on a CPU."""
        return self._compiled.profile if self._compiled else None

    def tile_map(self) -> dict[str, Any]:
        """Return the tile mapping of each variable; empty on a CPU."""
        return dict(self._compiled.lowered.tile_map()) if self._compiled else {}

    @property
    def calls_of_step(self) -> int:
        """Calls of the function in a step."""
        if not self.plan.loss:
            return self._rows_of_inference if self.plan.placement.has_phases else 1
        return self.plan.step.batches if self.plan.runs_batches_on_host else 1

    def call(self, *arguments: Any) -> Any:
        """Run the function on weights, states, buffers and other arguments, and the rows of one of `calls`."""
        results = self._function(*arguments)
        self.unreported_calls += 1
        return results

    def calls(self, rows: Rows) -> Any:
        """Yield the rows of each call, as a replica sees them: the axis of replicas first, where there is one."""
        plan = self.plan
        replicas = plan.step.replicas
        by_replica = {name: np.moveaxis(x, 2, 0) if replicas > 1 else x[:, :, 0] for name, x in rows.items()}
        batches = 1 if replicas > 1 else 0
        if not plan.loss:
            number = self._rows_of_inference
            flat = {
                name: x.reshape(*x.shape[:batches], number, *x.shape[batches + 2 :]) for name, x in by_replica.items()
            }
            count = self.calls_of_step
            size = number // count
            for call in range(count):
                part = (slice(None),) * batches + (slice(call * size, (call + 1) * size),)
                yield {name: x[part] for name, x in flat.items()}
        elif plan.runs_batches_on_host:
            for batch in range(plan.step.batches):
                yield {name: x[:, batch] if replicas > 1 else x[batch] for name, x in by_replica.items()}
        else:
            yield by_replica

    def anchors_by_name(self, calls: list[Any]) -> dict[str, Array]:
        """Return the anchors of a step from those of its calls."""
        kinds = self.plan.anchors.kinds
        return {name: self._anchor([call[name] for call in calls], kind) for name, kind in kinds.items()}

    def _anchor(self, values: list[Any], kind: AnchorReturnType) -> Array:
        """Return an anchor as [batches, accumulation, replicas, …], with leading dimensions as PopART has them."""
        plan = self.plan
        replicas = plan.step.replicas
        if kind.id() is AnchorReturnTypeId.Final:
            last = np.asarray(values[-1])
            return (last if replicas > 1 else last[None])[None, None]
        if kind.id() is AnchorReturnTypeId.Sum:
            total = np.asarray(values[0] if len(values) == 1 else sum(values[1:], values[0]))
            return (total if replicas > 1 else total[None])[None, None]
        arrays = [np.asarray(value) for value in values]
        arrays = [array if replicas > 1 else array[None] for array in arrays]
        is_inference = not plan.loss
        if is_inference:
            array = np.concatenate(arrays, axis=1)
            array = array.reshape(replicas, plan.step.batches, plan.step.accumulation, *array.shape[2:])
        else:
            array = np.stack(arrays, axis=1) if plan.runs_batches_on_host else arrays[0]
        # The n-th of every n micro-batches is returned, so the first value is that of micro-batch n − 1.
        by_batch = array.transpose(1, 2, 0, *range(3, array.ndim))
        batches, accumulation = by_batch.shape[:2]
        flat = by_batch.reshape(batches * accumulation, *by_batch.shape[2:])[kind.rp() - 1 :: kind.rp()]
        # NumPy cannot infer a dimension of −1 for tensors without elements.
        return flat.reshape(batches // kind.rp(), *by_batch.shape[1:])


def _equal_on_replicas(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.floating):
        mean: jax.Array = jax.lax.pmean(x, REPLICA_AXIS)
        return mean
    of_replicas: jax.Array = jax.lax.all_gather(x, REPLICA_AXIS)
    return of_replicas[0]


# PopART's recomputation → `Options.recompute`. Norms are among what "standard" computes again.
_RECOMPUTE: dict[RecomputationType, Recompute] = {
    RecomputationType.NoRecompute: "none",
    RecomputationType.Standard: "standard",
    RecomputationType.NormOnly: "standard",
    RecomputationType.Pipeline: "standard",
    RecomputationType.RecomputeAll: "all",
}


def compiler_options(options: SessionOptions, settings: Mapping[str, Any]) -> ipu.Options:
    """Return the options of the compiler.

    Args:
        options: of the session.
        settings: annotations that all products of the model share, see `common_settings`.
    """
    return ipu.Options(
        recompute=_RECOMPUTE[RecomputationType(options.autoRecomputation)],
        io_tiles=int(options.numIOTiles),
        partials=partials_of(settings, options.partialsTypeMatMuls),
        available_memory_proportion=settings.get(AVAILABLE_MEMORY),
        progress=False,
        cache_dir=str(options.cachePath) if options.enableEngineCaching else None,
        stream_loops=True,  # as PopART: a batch is on the device in its own turn
    )


def as_device_values(values: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, jax.Array]]:
    """Return an optimiser's values as arrays on the device: transferred once, not with each batch.

    Args:
        values: by weight and name.
    """
    return {weight: {name: jnp.asarray(x) for name, x in named.items()} for weight, named in values.items()}
