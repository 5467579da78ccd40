"""Executions: what Keras' loops call once for `steps_per_execution` batches, run by one call of the device.

Input: a function of a step, see `model_steps`, and a device. Output: an `Execution`, which takes batches from an
iterator, and runs their steps as a loop on the device. Batches of another shape, as the last of an epoch may be, are
compiled once, and logged. Batches that replicas cannot share are evaluated and predicted by one of them. While a model
is fitted, the time of the host for its batches is measured, and part of the profile.

Limits: updates of a model with stages are calls of their own, as no loop goes around a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby, islice
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ipujax.device import IPUModel
from ipujax.jit import IpuFunction, jit
from ipujax.keras.attributes import keep
from ipujax.keras.fit_time import FitTime
from ipujax.keras.memory_ways import in_words_of_keras
from ipujax.keras.model_steps import Step, first_of
from ipujax.keras.named_state import Named, StateNames
from ipujax.keras.settings import ModelSettings, settings_of
from ipujax.keras.stage_trace import shape_of, with_stages
from ipujax.lowering.replicas import AXIS
from ipujax.runtime.errors import ArgumentError, TileMemoryError
from ipujax.runtime.logs import Log
from ipujax.runtime.options import Options
from ipujax.runtime.report import Profile

_LOG = Log("keras")


class Execution:
    """A function of a model's state and an iterator over batches, as Keras' loops call it.

    Args:
        model: what is run.
        kind: "train", "test" or "predict".
        make_step: makes the function of a step from settings.
        settings: how the model runs.
        device: the IPUs.
        options: compiler options.

    Raises:
        ArgumentError: if `steps_per_execution` is no whole number of updates.
    """

    def __init__(
        self,
        model: Any,
        kind: str,
        make_step: Callable[[Any, ModelSettings], Step],
        settings: ModelSettings,
        device: IPUModel,
        options: Options,
    ) -> None:
        self._model, self._make_step, self._device, self._options = model, make_step, device, options
        self._batches, self._has_found_stages = model.steps_per_execution, False
        self.kind, self.settings, self.made_for = kind, settings, made_for(model, device, options)
        if kind != "train":
            self.settings = replace(settings, accumulation=1)
        self._check()
        self._names = StateNames(model, kind)
        self._functions: dict[ModelSettings, IpuFunction[..., Any]] = {}
        self._profiles: dict[Any, Profile] = {}  # of the programs there are, by the shapes of their batches
        self.time_of_fit: FitTime | None = None  # of the one that runs

    def _check(self) -> None:
        settings = self.settings
        if self.kind == "train" and self._batches % settings.batches_of_update:
            raise ArgumentError(
                f"{self._batches} steps per execution are no whole number of updates of {self._model.name}",
                expected=settings.in_words,
                got=f"steps_per_execution={self._batches}",
                hint=f"model.compile(..., steps_per_execution={settings.batches_of_update})",
            )

    def _find_stages(self, state: Any, batch: Any) -> None:
        """Settles how many stages there are, which is known with a batch."""
        if self._has_found_stages:
            return
        settings = with_stages(self._model, self.kind, self.settings, self._device, state, batch)
        if self.kind != "train" and settings.stages > 1:  # they work on all batches, if replicas can share them
            settings = replace(settings, accumulation=max(1, self._batches // settings.replicas))
        self.settings, self._has_found_stages = settings, True

    def begin_fit(self, batches: int | None) -> None:
        """Measures the host anew.

        Args:
            batches: of all epochs, None if that is not known.
        """
        self.time_of_fit = FitTime(batches, self.settings.prefetch_depth)

    def end_fit(self) -> None:
        """Calls that follow are not those of a fit, until another begins."""
        self.time_of_fit = None

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Runs the next steps; what they return is that of the last, or for predictions that of all.

        Raises:
            StopIteration: if there is no batch left.
            ArgumentError: for batches left over that are no whole update, and for stages that do not fit, as
                `with_stages`.
        """
        outputs, time = [], self.time_of_fit
        reader = iterator if time is None else time.reader(iterator)
        named = self._names_of(state).named(state)
        try:
            batches = list(islice(reader, self._batches))
            if batches:
                self._find_stages(state, batches[0])
            parts = [part for _, alike in groupby(batches, _shapes) for part in self._parts(list(alike))]
            compiled = [self._compiled(named, part) for part in parts]  # all of them before any takes the state
            for function, stacked in compiled:
                out, named = function(named, stacked)
                outputs.append(out)
        except BaseException:
            self._give_back(named)
            raise
        if not outputs:
            raise StopIteration
        if time is not None:
            self._count(time, parts)
        return self._together(outputs), self._names.listed(named)

    def _names_of(self, state: Any) -> StateNames:
        """The names of the state's variables, as many as there are now."""
        if self._names.sizes != [len(values) for values in state]:
            self._names = StateNames(self._model, self.kind)
            self._functions.clear()
            self._profiles.clear()
        return self._names

    def _give_back(self, named: Named) -> None:
        """Gives the model its state, which Keras takes from it while a loop runs."""
        if not any(leaf.is_deleted() for leaf in jax.tree.leaves(named)):
            for own, values in zip(self._names.variables.values(), self._names.listed(named), strict=True):
                for variable, value in zip(own, values, strict=True):
                    variable.assign(value)

    def _count(self, time: FitTime, parts: Sequence[list[Any]]) -> None:
        """Adds calls of these batches to the time of a fit, and gives the profile what the host took so far."""
        for part in parts:
            time.add_call(self._profiles[_program_of(part)])
        (batches, _), profile = next(iter(self._profiles.items()))
        self._keep(profile.with_host(time.host, batches))

    def _keep(self, profile: Profile) -> None:
        """Gives the model a profile."""
        profiles = {**self._model.__dict__.get("ipu_profiles", {}), self.kind: profile}
        keep(self._model, ipu_profiles=profiles, ipu_profile=profiles.get("train", profile))

    def _parts(self, batches: list[Any]) -> Iterator[list[Any]]:
        """Batches that run together, all of one shape."""
        size = self.settings.batches_of_update
        left = len(batches) % size
        if left and self.kind == "train":
            raise ArgumentError(
                f"the last {left} batches of {_rows(batches[0])} examples are no whole update of {self._model.name}",
                expected=self.settings.in_words,
                hint="steps_per_epoch=..., or data without the remainder",
            )
        whole = len(batches) - left
        together = size if self.settings.stages > 1 else max(1, whole)  # no loop goes around a pipeline
        yield from (batches[first : first + together] for first in range(0, whole, together))
        yield from ([each] for each in batches[whole:])

    def _compiled(self, state: Any, batches: list[Any]) -> tuple[IpuFunction[..., Any], Any]:
        """The compiled function of batches of one shape, and what it takes: of all replicas, or of one for the rest."""
        is_whole = len(batches) % self.settings.batches_of_update == 0
        settings = self.settings if is_whole else replace(self.settings, replicas=1, accumulation=1)
        stacked = _stacked(batches, settings.replicas, settings.accumulation)
        function = self._function(settings)
        self._note(function, settings, state, stacked, batches)
        return function, stacked

    def _function(self, settings: ModelSettings) -> IpuFunction[..., Any]:
        if settings not in self._functions:
            run = _loop(self._make_step(self._model, settings), self.kind, self.settings.outfeed, self._names)
            run.__name__ = f"{self._model.name}_{self.kind}"
            shared: dict[str, Any] = {}
            if settings.replicas > 1:
                out = P(AXIS) if self.kind == "predict" else P()
                shared = {"replicas": settings.replicas, "in_specs": (P(), P(AXIS)), "out_specs": (out, P())}
            function = jit(run, device=self._device, options=self._options, donate_argnums=0, **shared)
            function.unused_ipus.may_idle(self._device)  # `_check` says so in words of Keras
            self._functions[settings] = function
        return self._functions[settings]

    def _note(
        self, function: IpuFunction[..., Any], settings: ModelSettings, state: Any, stacked: Any, batches: list[Any]
    ) -> None:
        """Compiles for shapes that are new, says so, and remembers the profile of the first."""
        program = _program_of(batches)
        if program in self._profiles:
            return
        try:
            profile = function.lower(*jax.tree.map(shape_of, (state, stacked))).compile().profile
        except TileMemoryError as error:
            raise in_words_of_keras(error, self._model, settings, self._device, len(batches)) from None
        self._profiles[program] = profile
        rows = f"{len(batches)} × {_rows(batches[0])}"
        _LOG.info("%s %ss %s examples: %s", self._model.name, self.kind, rows, profile.brief)
        if len(self._profiles) == 1:
            self._keep(profile)

    def _together(self, outputs: Sequence[Any]) -> Any:
        if self.kind == "predict":
            return jax.tree.map(lambda *parts: np.concatenate([_in_order(part) for part in parts]), *outputs)
        if self.settings.outfeed == "last":
            return outputs[-1]
        rows = jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)
        keep(self._model, ipu_outfeed=rows)
        return jax.tree.map(lambda x: x[-1], rows)


def made_for(model: Any, device: IPUModel, options: Options) -> tuple[Any, ...]:
    """What an execution is made for; equal where it can be used again."""
    return settings_of(model), device, *(getattr(options, field.name) for field in fields(options))


def _loop(step: Step, kind: str, outfeed: str, names: StateNames) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The steps of an execution in one replica: of a state and batches [1, updates, accumulation, batch, …]."""

    def run(model: Named, batches: Any) -> tuple[Any, Named]:
        state, batches = names.listed(model), first_of(batches)
        updates = jax.tree.leaves(batches)[0].shape[0]
        if updates == 1:
            out, state = step(state, first_of(batches))
            outs = jax.tree.map(lambda x: x[None], out)
        else:
            state, outs = lax.scan(lambda state, each: step(state, each)[::-1], state, batches)
        if kind == "predict":
            return jax.tree.map(lambda x: x[None], outs), names.named(state)  # of this replica
        return outs if outfeed == "all" else jax.tree.map(lambda x: x[-1], outs), names.named(state)

    return run


def _stacked(batches: Sequence[Any], replicas: int, accumulation: int) -> Any:
    """Arrays [replicas, updates, accumulation, batch, …]: each update takes the next batches, replica by replica."""

    def stacked(*arrays: Any) -> Any:
        if len(arrays) == 1:
            return arrays[0][None, None, None]
        rows = np.stack(arrays).reshape(-1, replicas, accumulation, *arrays[0].shape)
        return rows.swapaxes(0, 1)

    return jax.tree.map(stacked, *batches)


def _in_order(outputs: Any) -> Any:
    """Examples in their order, of arrays [replicas, updates, accumulation, batch, …]."""
    rows = np.asarray(outputs).swapaxes(0, 1)
    return rows.reshape(-1, *rows.shape[4:])


def _program_of(batches: Sequence[Any]) -> tuple[int, Any]:
    """What a program is compiled for: how many batches, and their shapes."""
    return len(batches), _shapes(batches[0])


def _shapes(batch: Any) -> Any:
    """Of a batch; equal for those that are alike."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple(jax.typeof(leaf) for leaf in leaves)


def _rows(batch: Any) -> int:
    return int(np.shape(jax.tree.leaves(batch)[0])[0])
