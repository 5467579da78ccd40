"""What calls read of a program: arguments as operands of its jaxpr, and results as a pytree.

Input: a program that is lowered, or figures of a stored one. Output: `CallProgram`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from ipujax.calls import moves_apart
from ipujax.lowering.jax_compat import fetched, is_float0, to_memory_of, with_weak_type
from ipujax.lowering.refs import is_ref
from ipujax.lowering_plan.traced_plan import LoweringPlan
from ipujax.sharding import Partitioning, with_axes, without_axes

# Imported by the methods that need them: a program of the cache is called without.
if TYPE_CHECKING:
    from ipujax.lowering_plan.planned_program import PlannedProgram
    from ipujax.runtime.engine import DecisionLog
    from ipujax.runtime.host import HostCalls
    from ipujax.runtime.report import Profile
    from ipujax.storage import Computation


class Store(Protocol):
    """Where a compiled program and its profile go, once each is known, and come from; see `ipujax.caching`."""

    def computation(self) -> Computation | None: ...
    def profile(self) -> Any: ...
    def put_program(self, compiled: Any) -> None: ...
    def put_profile(self, profile: Profile) -> None: ...


@dataclass(frozen=True, eq=False, slots=True)
class CallProgram:
    """Values of a program that calls read, without its graph.

    Args:
        plan: what was lowered.
        used_ipus: IPUs of the device that it uses.
        are_weak: for each result whether its dtype is weak.
        constants: arrays in the host's memory that the function closes over.
        partitioning: how shardings partition it; None if they do not.
        calls: caller of its Python functions; None if it has none.
        timings: seconds of the steps up to lowering.
        unused_options: a line for each option without effect on it.
        warnings: lines about memory bounds that it exceeds, where they are known before it is compiled.
        is_stored: whether it is in a cache.
    """

    plan: LoweringPlan
    used_ipus: int
    are_weak: tuple[bool, ...]
    constants: tuple[Any, ...]
    partitioning: Partitioning | None
    calls: HostCalls | None
    timings: Mapping[str, float]
    unused_options: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    is_stored: bool = False

    @staticmethod
    def of(planned: PlannedProgram) -> CallProgram:
        """Return what calls read of a program that is lowered."""
        from ipujax.lowering_plan.unused_options import unused_options

        # Of the discharged jaxpr: the value of a Ref may be weakly typed, the Ref is not.
        are_weak = tuple(aval.weak_type for aval in planned.jaxprs["discharge"].out_avals)
        constants = tuple(map(fetched, planned.plan.constants))
        calls = planned.host_calls()
        return CallProgram(
            planned.plan,
            planned.graph.num_used_ipus,
            are_weak,
            constants,
            planned.partitioning,
            calls,
            planned.timings,
            unused_options(planned),
        )

    @property
    def closes_over_host_arrays(self) -> bool:
        """True if arrays in the host's memory, or Refs, are inputs beside the arguments."""
        return bool(self.constants or self.plan.refs)

    def runs_apart(self, log: DecisionLog | None) -> bool:
        """Return whether arrays move outside the XLA computation: to and from host memory, or a mesh of devices."""
        has_callbacks = log is not None or self.calls is not None
        return self.partitioning is not None or moves_apart(self.plan.signature, has_callbacks)

    def to_memories(self, outs: Any) -> Any:
        """Return the pytree of results, each in the memory of its aval, or on the mesh of the call."""
        avals = self.plan.signature.out_avals
        placed = [to_memory_of(x, aval) for x, aval in zip(jax.tree.leaves(outs), avals, strict=True)]
        placed = with_axes(placed, avals) if self.partitioning is None else self.partitioning.placed(placed, avals)
        return jax.tree.unflatten(self.plan.signature.out_tree, placed)

    def tree_of_results(self, leaves: Sequence[Any], run: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Return the pytree of the results of `run` on the arrays of the jaxpr; writes the Refs that it changes."""
        signature = self.plan.signature
        inputs = self._inputs(leaves)
        refs = [x for x in inputs if is_ref(jax.typeof(x))]
        outs = iter(run(self.operands(leaves)))
        are_weak = iter(self.are_weak)
        results = [
            np.zeros(aval.shape, aval.dtype) if is_float0(aval) else with_weak_type(next(outs), next(are_weak))
            for aval in signature.out_avals
        ]
        # Final values of Refs are the last results, in the order of the inputs.
        for ref in refs:
            (ref[...],) = with_axes([next(outs)], [jax.typeof(ref)])
        return jax.tree.unflatten(signature.out_tree, results)

    def operands(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the arrays of the inputs of the jaxpr: arguments, values of Refs, and arrays in the host's memory."""
        values = (x[...] if is_ref(jax.typeof(x)) else x for x in self._inputs(leaves))
        return [*map(without_axes, values), *self.constants]

    def _inputs(self, leaves: Sequence[Any]) -> list[Any]:
        arguments = zip(leaves, self.plan.signature.in_avals, strict=True)
        return [*(x for x, aval in arguments if not is_float0(aval)), *self.plan.refs]
