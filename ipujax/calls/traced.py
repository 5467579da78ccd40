"""The first stage of a function: its jaxpr for one signature. Input: a trace of JAX, and the call. Output: `Traced`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax

from ipujax.calls.call_arguments import CallArguments
from ipujax.calls.offloaded import may_be_offloaded
from ipujax.calls.traced_signature import Signature, Stage
from ipujax.lowering.jax_compat import argument_names, used_inputs
from ipujax.lowering.jaxpr import has_phases, results_in_memories
from ipujax.runtime.tracebacks import showing_user_frames
from ipujax.sharding import NO_SHARDINGS, CallShardings


class Traced(Stage):
    """A function as a jaxpr for one signature, returned by `ipu.jit(fun).trace(*args)`.

    Its attributes are those of `jax.stages.Traced`; `lower` lowers for the IPU.

    Attributes:
        jaxpr: the jaxpr; that of a replicated function has one equation, for all replicas.
        fun_name: name of the function.
        timings: seconds of tracing.
    """

    def __init__(
        self,
        traced: jax.stages.Traced,
        arguments: tuple[str, ...],
        call: CallArguments,
        timings: Mapping[str, float],
        lower: Callable[[Traced], Any],
        offloaded: frozenset[int] = frozenset(),
        shardings: CallShardings = NO_SHARDINGS,
        for_xla: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.jaxpr = traced.jaxpr
        self.fun_name = traced.fun_name
        self.timings = timings
        self._traced = traced
        self._call = call
        self._arguments = arguments
        self._lower = lower
        self._offloaded = offloaded
        self.shardings = shardings
        self._for_xla = for_xla

    @cached_property
    def result_shardings(self) -> tuple[Any, ...]:
        """Sharding of each leaf of the results, None where any will do."""
        return self.shardings.of_results(self.fun_name, self.out_info)

    @property
    def out_info(self) -> Any:
        """Shape and dtype of each result, in the pytree of results."""
        return self._traced.out_info

    @property
    def closes_over_tracers(self) -> bool:
        return len(self.jaxpr.in_avals) != self._call.tree.num_leaves  # JAX makes such tracers inputs of the jaxpr

    @cached_property
    def signature(self) -> Signature:
        """Signature that the function was traced with."""
        in_avals = tuple(self.jaxpr.in_avals)
        in_phases = has_phases(self.jaxpr.jaxpr)
        numbers = [n for n, count in enumerate(self._call.counts) for _ in range(count)]
        offloaded = tuple(
            (n in self._offloaded or in_phases) and may_be_offloaded(aval)
            for n, aval in zip(numbers, in_avals, strict=True)
        )
        return Signature(
            self._call.tree,
            in_avals,
            self._call.donated,
            offloaded,
            len(in_avals) * (True,) if self._for_xla.get("keep_unused") else used_inputs(self.jaxpr.jaxpr),
            self._traced.out_tree,
            results_in_memories(self.jaxpr),
            self._arguments,
            tuple(argument_names(self.jaxpr)),
            self._for_xla,
        )

    @showing_user_frames
    def lower(self, **settings: Any) -> Any:
        """Lower the function for its device, once; raises as `ipu.jit(fun).lower`.

        Args:
            settings: those of `jax.stages.Traced.lower`, as `jax.export.export` passes them. With any of them the
                result is JAX's, `jax.stages.Lowered`, without a program for IPUs.
        """
        return self._traced.lower(**settings) if settings else self._lower(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the function and run it on arguments of its signature, without the static ones."""
        return self.lower().compile()(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Traced({self.fun_name}: {len(self.jaxpr.eqns)} equations)"
