"""Plan of a lowering: a traced function with all that its lowering reads.

Input: a traced function, the target, the user's options. Output: `LoweringPlan`, which `planned_lowering` lowers unless
the cache has its program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from ipujax.arguments import FunctionName
from ipujax.calls import Signature, Traced, check_annotations
from ipujax.lowering.jax_compat import ClosedJaxpr, is_float0, without_float0
from ipujax.lowering.jaxpr import check_values, primitive_names
from ipujax.lowering.partition import Shardings
from ipujax.lowering.refs import with_state
from ipujax.runtime.options import Options
from ipujax.runtime.target import Target
from ipujax.sharding import NO_SHARDINGS, CallShardings, mesh_of_constraints, without_splits

if TYPE_CHECKING:
    from ipujax.distributed.instance import Spread


def compilation_steps() -> tuple[str, ...]:
    """Steps of a compilation, in order."""
    from ipujax.lowering.dumps import steps as lowering_steps
    from ipujax.runtime.compile import STEPS as COMPILE_STEPS  # a program of the cache is called without

    return (*lowering_steps(), *COMPILE_STEPS)


def _with_static_products(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr with block-sparse products in place of those of sparse arrays with constant indices."""
    # The library is imported for programs that need it alone.
    if not any(name.startswith(("bcoo_dot", "bcsr_dot")) for name in primitive_names(jaxpr.jaxpr)):
        return jaxpr
    from ipujax.popsparse.jax_arrays import with_static_products

    return with_static_products(jaxpr)


@dataclass(frozen=True, eq=False, slots=True)
class LoweringPlan:
    """A traced function with all that is equal in every plan of it.

    Args:
        name: name of the function.
        signature: signature of the trace.
        jaxpr: the traced jaxpr, with values in place of Refs and without float0.
        positions: for each input of the jaxpr the number of its leaf; Refs are numbered after the arguments.
        refs: Refs that the function closes over and changes.
        line: origin of equations that have no line of the user's.
        target: target of all replicas.
        options: options of the user.
        spread: distribution of replicas over instances.
        timings: seconds of steps before.
        constants: arrays on the host that the function closes over: the last inputs of the jaxpr.
        shardings: shardings of the inputs and results of the jaxpr.
        mesh: devices that results are put on; None for one device.
        call: shardings of the call.
        result_settings: sharding that the user wants of each leaf of the results.
    """

    name: FunctionName
    signature: Signature
    jaxpr: ClosedJaxpr
    positions: Sequence[int]
    refs: Sequence[jax.Ref]
    line: str
    target: Target
    options: Options
    spread: Spread | None
    timings: Mapping[str, float]
    constants: tuple[Any, ...] = ()
    shardings: Shardings = Shardings()
    mesh: Mesh | None = None
    call: CallShardings = NO_SHARDINGS
    result_settings: tuple[Any, ...] = ()

    @staticmethod
    def of(
        name: FunctionName, traced: Traced, line: str, target: Target, options: Options, spread: Spread | None
    ) -> LoweringPlan:
        """Return the lowering plan of a traced function; refuse values other than arrays, and unsupported memories."""
        # A copy, as lowered programs are cached by weak references to the traced jaxpr, and must not refer to it.
        copy = ClosedJaxpr(traced.jaxpr.jaxpr, list(map(without_splits, traced.jaxpr.consts)))
        check_values(copy, name, traced.signature.leaf_names)
        check_annotations(name, copy)
        jaxpr, positions = without_float0(copy)
        jaxpr, refs = with_state(_with_static_products(jaxpr))
        num_arguments = len(traced.signature.in_avals)
        inputs = tuple(traced.shardings.inputs[n] for n in positions) if traced.shardings.inputs else ()
        # With Refs, which are results too, any sharding will do.
        settings = zip(traced.result_shardings, copy.out_avals, strict=bool(traced.result_shardings))
        outputs = () if refs else tuple(sharding for sharding, aval in settings if not is_float0(aval))
        shardings = Shardings(inputs, outputs, target)
        positions += range(num_arguments, num_arguments + len(refs))
        return LoweringPlan(
            name,
            traced.signature,
            jaxpr,
            positions,
            refs,
            line,
            target,
            options,
            spread,
            traced.timings,
            shardings=shardings,
            mesh=traced.shardings.mesh or mesh_of_constraints(copy),
            call=traced.shardings,
            result_settings=traced.result_shardings,
        )
