"""What a function of several replicas must hold to: enough IPUs, and equal results where they are said to be equal."""

from __future__ import annotations

from ipujax.lowering.replicas.replicated_primitive import Replicated
from ipujax.lowering.replicas.varying import varying
from ipujax.lowering.source_info import source_line
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import ArgumentError, GraphError
from ipujax.runtime.target import Target


@remembered
def of_one_replica(target: Target, replicas: int) -> Target:
    """The machine of one replica.

    Args:
        target: the whole machine.
        replicas: how many share it evenly; IPUs that are left over stay unused.

    Raises:
        ArgumentError: more replicas than IPUs.
    """
    if replicas > target.num_ipus:
        raise ArgumentError(
            f"{replicas} replicas do not fit {target.num_ipus} IPUs",
            expected=f"{replicas} IPUs or more, one at least for each replica",
            got=target.num_ipus,
            hint=f"device=ipu.IPUModel(num_ipus={1 << (replicas - 1).bit_length()})",
        )
    return target if replicas == 1 else target.replace(num_ipus=target.num_ipus // replicas)


def check_results(whole: Replicated) -> None:
    """Refuses results that are said to be equal on all replicas and may differ.

    Raises:
        GraphError: naming the result and the user's line it comes from, or a collective that not all may reach.
    """
    if whole.replicas == 1 or whole.is_checked:
        return
    known = varying(whole.jaxpr, [dim is not None for dim in whole.in_dims], whole.replicas)
    paths = whole.jaxpr.jaxpr.debug_info.result_paths or ()
    for number, (differs, dim, eqn) in enumerate(zip(known.results, whole.out_dims, known.reasons, strict=True)):
        if differs and dim is None:
            path = paths[number] if number < len(paths) else f"[{number}]"
            raise GraphError(
                f"{str(path) or 'the result'} may differ between replicas, and out_specs say that all have the same",
                where=(source_line(eqn) or None) if eqn is not None else None,
                expected=f'P("{whole.axis_name}"), which joins the parts of replicas, or a value that all have',
                got="P()",
                hint=f'reduce it before it is returned: jax.lax.pmean(x, "{whole.axis_name}")',
            )
