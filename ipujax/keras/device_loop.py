"""Executions: functions that Keras' loops call once for `steps_per_execution` batches, run by one call of the device.

Input: a function of a step, see `model_steps`, and a device. Output: an `Execution`, which reads batches from an
iterator, and runs their steps as a loop on the device. Batches of another shape, as the last of an epoch may be, are
compiled once, and logged. Batches that replicas cannot share are evaluated and predicted by one replica. During a fit
the time of the host for its batches is measured, and added to the profile.

Limits: each update of a model with stages is a separate call, as no loop goes around a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby, islice
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.front_end import IpuFunction, Log
from ipujax.keras.layer_places import placed_step
from ipujax.keras.layer_stages import shape_of, with_stages
from ipujax.keras.model_state import ModelSettings, set_untracked, settings_of, with_keras_remedies
from ipujax.keras.model_steps import REPLICA_AXIS, Named, StateNames, Step, first_of


class FitTime:
    """Iterate over the batches of a fit, and add up the time of host and device.

    Args:
        batches: number of batches of all epochs; None where it is not known.
        depth: batches that are prepared ahead.
    """

    def __init__(self, batches: int | None, depth: int) -> None:
        self._batches = batches
        self._depth = depth
        self._finished = ipu.HostData(0, 0.0, 0.0, depth > 0)  # of epochs whose iterators are exhausted
        self._reading: tuple[Iterator[Any], ipu.prefetch[Any]] | None = None
        self.device_seconds = 0.0  # NaN where a trip count depends on data

    @property
    def host(self) -> ipu.HostData:
        """Seconds of preparing the batches so far, and of waiting for them."""
        return self._finished if self._reading is None else self._finished + self._reading[1].host

    def reader(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Return the batches of an epoch's iterator, of which prefetching reads no more than the fit needs."""
        # Keras has one iterator for all epochs where data goes on: its thread and its batches ahead are reused.
        if self._reading is None or self._reading[0] is not iterator:
            self._finished = self.host
            self._reading = iterator, ipu.prefetch(islice(iterator, self._batches), self._depth)
        return self._reading[1]

    def add_call(self, profile: ipu.Profile) -> None:
        """Add the predicted seconds of a call of the device."""
        try:
            self.device_seconds += profile.seconds
        except ipu.ProfileError:  # a trip count depends on data
            self.device_seconds = math.nan


_LOG = Log("keras")


@dataclass(frozen=True, slots=True, eq=False)
class _Programs:
    """Programs of a model whose variables are the same ones.

    Args:
        names: of the variables.
        functions: of a call, by the settings that they were made for.
        profiles: of programs, by `_program_key`.
    """

    names: StateNames
    functions: dict[ModelSettings, IpuFunction[..., Any]] = field(default_factory=dict)
    profiles: dict[Any, ipu.Profile] = field(default_factory=dict)


class Execution:
    """A function of a model's state and an iterator over batches, as Keras' loops call it.

    Args:
        model: a compiled Keras model.
        kind: "train", "test" or "predict".
        make_step: returns the function of a step of a model with settings.
        settings: settings of the model.
        device: the IPUs.
        options: compiler options.

    Raises:
        ArgumentError: `steps_per_execution` is not a multiple of the batches of an update.
    """

    def __init__(
        self,
        model: Any,
        kind: str,
        make_step: Callable[[Any, ModelSettings], Step],
        settings: ModelSettings,
        device: ipu.IPUModel,
        options: ipu.Options,
    ) -> None:
        self._model = model
        self._make_step = make_step
        self._device = device
        self._options = options
        self._steps = model.steps_per_execution
        self._has_counted_stages = False
        self.kind = kind
        self.settings = settings if kind == "train" else replace(settings, accumulation=1)
        self.key = execution_key(model, device, options)
        self._check()
        self._programs = _Programs(StateNames(model, kind))
        self.time_of_fit: FitTime | None = None  # None outside of a fit

    def _check(self) -> None:
        settings = self.settings
        if self.kind == "train" and self._steps % settings.batches_of_update:
            raise ipu.ArgumentError(
                f"steps_per_execution of {self._model.name} must be a multiple of the batches of an update",
                expected=settings.in_words,
                got=f"steps_per_execution={self._steps}",
                hint=f"model.compile(..., steps_per_execution={settings.batches_of_update})",
            )

    def _count_stages(self, state: Any, batch: Any) -> None:
        """Add the number of stages to the settings, once: it takes a trace, and a trace takes a batch."""
        if self._has_counted_stages:
            return
        settings = with_stages(self._model, self.kind, self.settings, self._device, state, batch)
        if self.kind != "train" and settings.stages > 1:
            # No update limits a pipeline: all batches of an execution are micro-batches, if replicas can share them.
            settings = replace(settings, accumulation=max(1, self._steps // settings.replicas))
        self.settings = settings
        self._has_counted_stages = True

    def begin_fit(self, batches: int | None) -> None:
        """Start to measure the time of a fit.

        Args:
            batches: number of batches of all epochs; None where it is not known.
        """
        self.time_of_fit = FitTime(batches, self.settings.prefetch_depth)

    def end_fit(self) -> None:
        """Stop measuring: later calls are not those of a fit."""
        self.time_of_fit = None

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Run the next steps.

        Returns:
            The outputs of the last step, or for predictions those of all, and the new state.

        Raises:
            StopIteration: the iterator is exhausted.
            ArgumentError: remaining batches are not a whole update, or stages do not fit, as `with_stages`.
        """
        outputs = []
        time = self.time_of_fit
        reader = iterator if time is None else time.reader(iterator)
        named = self._current_names(state).named(state)
        try:
            batches = _read(reader, self._steps)
            if batches:
                self._count_stages(state, batches[0])
            calls = [call for _, group in groupby(batches, _shapes) for call in self._group_by_call(list(group))]
            # All are compiled before the first call donates the state: an error of compilation leaves it whole.
            compiled = [self._compile(named, call) for call in calls]
            for function, stacked in compiled:
                out, named = function(named, stacked)
                outputs.append(out)
        except BaseException:
            self._restore(named)
            raise
        if not outputs:
            raise StopIteration
        if time is not None:
            self._count_calls(time, calls)
        return self._join(outputs), self._programs.names.listed(named)

    def _current_names(self, state: Any) -> StateNames:
        # A layer that is frozen or a second `compile` changes the lists: names and programs of others are stale.
        if self._programs.names.sizes != [len(values) for values in state]:
            self._programs = _Programs(StateNames(self._model, self.kind))
        return self._programs.names

    def _restore(self, named: Named) -> None:
        """Assign a state to the model's variables, unless a call that failed has deleted its arrays."""
        # Keras clears the variables while a loop runs, and sets them at its end, which an error skips.
        if not any(leaf.is_deleted() for leaf in jax.tree.leaves(named)):
            for variables, values in zip(
                self._programs.names.variables.values(), self._programs.names.listed(named), strict=True
            ):
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(value)

    def _count_calls(self, time: FitTime, calls: Sequence[list[Any]]) -> None:
        """Add calls to the time of a fit, and the host's time so far to the model's profile."""
        for batches in calls:
            time.add_call(self._programs.profiles[_program_key(batches)])
        # The first program is that of whole executions; later ones are of remainders.
        (batches_per_call, _), profile = next(iter(self._programs.profiles.items()))
        self._publish(profile.with_host(time.host, batches_per_call))

    def _publish(self, profile: ipu.Profile) -> None:
        """Set a profile on the model; `ipu_profile` is that of training, where there is one."""
        profiles = {**self._model.__dict__.get("ipu_profiles", {}), self.kind: profile}
        set_untracked(self._model, ipu_profiles=profiles, ipu_profile=profiles.get("train", profile))

    def _group_by_call(self, batches: list[Any]) -> Iterator[list[Any]]:
        """Group batches of one shape by the call of the device that takes them."""
        size = self.settings.batches_of_update
        remainder = len(batches) % size
        if remainder and self.kind == "train":
            raise ipu.ArgumentError(
                f"the last {remainder} batches of {_rows(batches[0])} examples are not a whole update of"
                f" {self._model.name}",
                expected=self.settings.in_words,
                hint="steps_per_epoch=..., or data without the remainder",
            )
        divisible = len(batches) - remainder
        call_size = size if self.settings.stages > 1 else max(1, divisible)  # no loop goes around a pipeline
        yield from (batches[first : first + call_size] for first in range(0, divisible, call_size))
        yield from ([batch] for batch in batches[divisible:])

    def _compile(self, state: Any, batches: list[Any]) -> tuple[IpuFunction[..., Any], Any]:
        """Return the compiled function of a call and its batches stacked: for all replicas, or one for a remainder."""
        is_whole = len(batches) % self.settings.batches_of_update == 0
        settings = self.settings if is_whole else replace(self.settings, replicas=1, accumulation=1)
        stacked = _stacked(batches, settings.replicas, settings.accumulation)
        function = self._function(settings)
        self._record_profile(function, settings, state, stacked, batches)
        return function, stacked

    def _function(self, settings: ModelSettings) -> IpuFunction[..., Any]:
        if settings not in self._programs.functions:
            run = _loop(self._make_step(self._model, settings), self.kind, self.settings.outfeed, self._programs.names)
            run = placed_step(self._model, run)
            run.__name__ = f"{self._model.name}_{self.kind}"
            shared: dict[str, Any] = {}
            if settings.replicas > 1:
                out = P(REPLICA_AXIS) if self.kind == "predict" else P()
                shared = {"replicas": settings.replicas, "in_specs": (P(), P(REPLICA_AXIS)), "out_specs": (out, P())}
            options = self._options
            if options.stream_loops == "auto":  # a batch of the loop is on the device in its own turn
                options = replace(options, stream_loops=True)
            function = ipu.jit(run, device=self._device, options=options, donate_argnums=0, **shared)
            function.unused_settings.ignore_options()
            function.unused_settings.may_idle(self._device)  # the room `stages` warns of idle IPUs itself
            self._programs.functions[settings] = function
        return self._programs.functions[settings]

    def _record_profile(
        self, function: IpuFunction[..., Any], settings: ModelSettings, state: Any, stacked: Any, batches: list[Any]
    ) -> None:
        """Compile a program of new shapes, log it, and publish the profile of the first."""
        program = _program_key(batches)
        if program in self._programs.profiles:
            return
        try:
            profile = function.lower(*jax.tree.map(shape_of, (state, stacked))).compile().profile
        except ipu.TileMemoryError as error:
            raise with_keras_remedies(error, self._model, settings, self._device, len(batches)) from None
        self._programs.profiles[program] = profile
        rows = f"{len(batches)} × {_rows(batches[0])}"
        _LOG.info("%s %ss %s examples: %s", self._model.name, self.kind, rows, profile.brief)
        if len(self._programs.profiles) == 1:
            self._publish(profile)

    def _join(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs of the calls of an execution as Keras expects them."""
        if self.kind == "predict":
            return jax.tree.map(lambda *parts: np.concatenate([_in_order(x) for x in parts]), *outputs)
        if self.settings.outfeed == "last":
            return outputs[-1]
        rows = jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)
        set_untracked(self._model, ipu_outfeed=rows)
        return jax.tree.map(lambda x: x[-1], rows)


def execution_key(model: Any, device: ipu.IPUModel, options: ipu.Options) -> tuple[Any, ...]:
    """Return the settings, device and options of an execution, equal for those that can be used for one another."""
    return (
        settings_of(model),
        model.steps_per_execution,
        device,
        *(getattr(options, field.name) for field in fields(options)),
    )


def _loop(step: Step, kind: str, outfeed: str, names: StateNames) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return an execution of one replica: a function of a state and batches [1, updates, accumulation, batch, …]."""

    def run(model: Named, batches: Any) -> tuple[Any, Named]:  # profiles and errors name arguments by these
        state = names.listed(model)
        batches = first_of(batches)
        updates = jax.tree.leaves(batches)[0].shape[0]
        if updates == 1:  # also a pipeline, around which there is no loop
            out, state = step(state, first_of(batches))
            outs = jax.tree.map(lambda x: x[None], out)
        else:
            state, outs = jax.lax.scan(lambda state, batch: step(state, batch)[::-1], state, batches)
        if kind == "predict":
            return jax.tree.map(lambda x: x[None], outs), names.named(state)  # with an axis of replicas
        return outs if outfeed == "all" else jax.tree.map(lambda x: x[-1], outs), names.named(state)

    return run


def _read(iterator: Iterator[Any], steps: int) -> list[Any]:
    """Return the next batches, copied: a generator may fill the same arrays again while the device reads them."""
    return [jax.tree.map(_copied, batch) for batch in islice(iterator, steps)]


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _stacked(batches: Sequence[Any], replicas: int, accumulation: int) -> Any:
    """Stack batches to arrays [replicas, updates, accumulation, batch, …]: an update takes consecutive batches."""

    def stack_leaves(*arrays: Any) -> Any:
        if len(arrays) == 1:
            return arrays[0][None, None, None]  # a view: `np.stack` would copy
        rows = np.stack(arrays).reshape(-1, replicas, accumulation, *arrays[0].shape)
        return rows.swapaxes(0, 1)

    return jax.tree.map(stack_leaves, *batches)


def _in_order(outputs: Any) -> Any:
    """Return examples in the order of the data, from arrays [replicas, updates, accumulation, batch, …]."""
    rows = np.asarray(outputs).swapaxes(0, 1)
    return rows.reshape(-1, *rows.shape[4:])


def _program_key(batches: Sequence[Any]) -> tuple[int, Any]:
    """Return number and shapes of the batches that a program is compiled for."""
    return len(batches), _shapes(batches[0])


def _shapes(batch: Any) -> Any:
    """Return structure, shapes and dtypes of a batch."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple(jax.typeof(leaf) for leaf in leaves)


def _rows(batch: Any) -> int:
    return int(np.shape(jax.tree.leaves(batch)[0])[0])
