"""Checks of a function of several replicas: enough IPUs, and equal results where out_specs declare them equal."""

from __future__ import annotations

from ipujax.lowering.replicas.replicated_primitive import Replicated
from ipujax.lowering.replicas.varying import varying
from ipujax.lowering.source_info import source_line
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import ArgumentError, GraphError
from ipujax.runtime.target import Target


@remembered
def of_one_replica(target: Target, replicas: int) -> Target:
    """Machine of one replica; IPUs that do not divide evenly stay unused."""
    if replicas > target.num_ipus:
        raise ArgumentError(
            f"{replicas} replicas do not fit {target.num_ipus} IPUs",
            expected=f"{replicas} IPUs or more, one at least for each replica",
            got=target.num_ipus,
            hint=f"device=ipu.IPUModel(num_ipus={1 << (replicas - 1).bit_length()})",
        )
    return target if replicas == 1 else target.replace(num_ipus=target.num_ipus // replicas)


def check_results(function: Replicated) -> None:
    """Refuses results that are declared equal on all replicas and may differ."""
    if function.replicas == 1 or function.is_checked:
        return
    are_split = [dim is not None for dim in function.in_dims]
    analysis = varying(function.jaxpr, are_split, function.replicas, function.axis_name)
    paths = function.jaxpr.jaxpr.debug_info.result_paths or ()
    for number, (differs, dim, eqn) in enumerate(
        zip(analysis.results, function.out_dims, analysis.reasons, strict=True)
    ):
        if differs and dim is None:
            path = paths[number] if number < len(paths) else f"[{number}]"
            raise GraphError(
                f"{str(path) or 'the result'} may differ between replicas, and out_specs say that all have the same",
                where=(source_line(eqn) or None) if eqn is not None else None,
                expected=f'P("{function.axis_name}"), which joins the parts of replicas, or a value that all have',
                got="P()",
                hint=f'reduce it before it is returned: jax.lax.pmean(x, "{function.axis_name}")',
            )
