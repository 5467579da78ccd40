"""Check of a compiled function's arguments. Input: a signature and a call. Output: the leaves, or an error that names
the argument whose pytree, shape or dtype differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ipujax.arguments import has_tracer, short_type, shown_array
from ipujax.calls.closures import check_live_arguments
from ipujax.calls.shardings import check_whole
from ipujax.calls.traced_signature import Signature
from ipujax.runtime.errors import ArgumentTypeError
from ipujax.sharding import Partitioning, check_split_alike


def check_compiled_call(
    who: str,
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    local_avals: Callable[[], Sequence[Any]],
    partitioning: Partitioning | None = None,
) -> list[Any]:
    """Return the leaves of a call after a check against the compiled signature.

    Args:
        who: name of the function, for messages.
        signature: the compiled one.
        args: positional arguments, without static ones.
        kwargs: keyword arguments, likewise.
        local_avals: returns the shape and dtype that each leaf must have on this instance; called for equal pytrees.
        partitioning: shardings that the program was compiled for; None for a program of one IPU or of replicas.

    Raises:
        ArgumentTypeError: a transformation of JAX traces the call, or a pytree, shape or dtype differs.
        ArgumentError: an argument is sharded over several devices, otherwise than compiled.
    """
    if has_tracer(jax.tree.leaves((args, kwargs))):
        check_live_arguments(args, kwargs)
        problem = f"{who} is compiled: transformations of JAX cannot trace it any more"
        raise ArgumentTypeError(problem, hint="apply them to the ipu.jit function itself")
    # The tree first: leaves of another structure would be reported under the names of other arguments.
    leaves, tree = jax.tree.flatten((args, kwargs))
    hint = "call the ipu.jit function itself, which compiles for new shapes"
    if tree != signature.in_tree:
        from ipujax.calls.tree_difference import EVERYWHERE, first_difference  # for the error alone

        difference = first_difference(signature.in_tree, args, kwargs, signature.arguments)
        problem = f"{who} was compiled for another structure of {difference.place}"
        if difference.place == EVERYWHERE:
            hint = f"leave static arguments out, they are compiled in; or {hint}"
        raise ArgumentTypeError(problem, expected=difference.expected, got=difference.got, hint=hint)
    if partitioning is None:
        check_whole(who, lambda: signature.arguments, args, kwargs)
    else:
        check_split_alike(who, signature.leaf_names, leaves, partitioning)
    for place, leaf, aval in zip(signature.leaf_names, leaves, local_avals(), strict=True):
        expected = short_type(aval)
        array_type = shown_array(who, place, leaf, "convert it to such an array", expected)
        if array_type != expected:
            problem = f"{who} was compiled for another shape or dtype of its argument {place}"
            raise ArgumentTypeError(problem, expected=expected, got=array_type, hint=hint)
    return leaves
