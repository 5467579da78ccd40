"""Check of a compiled function's arguments. Input: a signature and a call. Output: the leaves, or an error that names
the argument whose pytree, shape or dtype differs.

A pytree of another structure is shown by the Python expression of the first node that differs, with both nodes in
words. Tracers, closed over or among arguments, whose transformation of JAX has ended are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef

from ipujax.arguments import has_tracer, short_type, shown_array
from ipujax.calls.shardings import check_whole
from ipujax.calls.traced import Signature
from ipujax.lowering.refs import is_ref
from ipujax.runtime.errors import ArgumentTypeError
from ipujax.runtime.signatures import describe
from ipujax.sharding import Partitioning, check_split_alike

EVERYWHERE = "its arguments"  # the place of a difference in the number or the names of arguments
_MAX_KEYS = 8  # listed in a message


@dataclass(frozen=True, slots=True)
class Difference:
    """First difference between two pytrees.

    Args:
        place: Python expression of the node: "its argument params['w']".
        expected: node that the function was compiled for, in words.
        got: node of the call, in words.
    """

    place: str
    expected: str
    got: str


def first_difference(tree: PyTreeDef, args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str]) -> Difference:
    """Return the first difference of a call, which must have one, from `tree`, the structure of compiled arguments."""
    in_args, in_kwargs = tree.children()
    # A `PyTreeDef` does not list its keys: filled with numbers it does.
    keys = list(jax.tree.unflatten(in_kwargs, range(in_kwargs.num_leaves)))
    if len(args) != len(in_args.children()) or set(kwargs) != set(keys):
        expected = [*names, *(f"{key}=…" for key in keys)]
        got = [*map(describe, args), *(f"{key}={describe(value)}" for key, value in kwargs.items())]
        return Difference(EVERYWHERE, f"({', '.join(expected)})", f"({', '.join(got)})")
    places = [*zip(names, in_args.children(), args, strict=True)]
    places += [(key, child, kwargs[key]) for key, child in zip(keys, in_kwargs.children(), strict=True)]
    differences = (_difference(child, value, f"its argument {name}") for name, child, value in places)
    return next(difference for difference in differences if difference is not None)


def tree_in_words(value: Any) -> str:
    """Return the structure of a value as text, with * for each array."""
    return f"{jax.tree.structure(value)}".removeprefix("PyTreeDef(").removesuffix(")")


def _difference(expected: PyTreeDef, value: Any, place: str) -> Difference | None:
    """Return the first difference between a pytree and a value, None if there is none."""
    got: PyTreeDef = jax.tree.structure(value)
    if got == expected:
        return None
    expected_node = expected.node_data()
    node = got.node_data()
    if expected_node is None or node is None or expected_node[0] is not node[0]:
        return Difference(place, *_kinds_in_words(expected, got, value))
    if expected_node[0] is dict and expected_node[1] != node[1]:
        missing = [key for key in expected_node[1] if key not in node[1]]
        extra = [key for key in node[1] if key not in expected_node[1]]
        words = [f"{word} {_listed(keys)}" for word, keys in (("without", missing), ("with", extra)) if keys]
        return Difference(place, _in_words(expected, None), f"a dict {' and '.join(words)}")
    children = expected.children()
    # One level deep, so that the path of a child is the expression a user would write, also for registered classes.
    steps = jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda part: part is not value)
    if expected_node[1] != node[1] or len(steps) != len(children):
        return Difference(place, _in_words(expected, None), _in_words(got, value))
    parts = zip(children, steps, strict=True)
    differences = (_difference(child, part, place + jax.tree_util.keystr(path)) for child, (path, part) in parts)
    return next((difference for difference in differences if difference is not None), None)


def _kinds_in_words(expected: PyTreeDef, got: PyTreeDef, value: Any) -> tuple[str, str]:
    """Return two nodes of different kinds in words, with their modules if they have the same name."""
    words = _in_words(expected, None), _in_words(got, value)
    if words[0] != words[1]:
        return words
    return repr(expected.node_data()[0]), repr(got.node_data()[0])


def _in_words(tree: PyTreeDef, value: Any) -> str:
    """Return the outermost node of a pytree in words; `value` has that structure, or is None if unknown."""
    node = tree.node_data()
    if node is None:
        return "an array" if value is None else describe(value)
    kind, data = node
    if kind is type(None):
        return "None"
    if kind is dict:
        return f"a dict with {_listed(data)}" if data else "an empty dict"
    if kind in (tuple, list):
        return f"a {kind.__name__} of {len(tree.children())}"
    return f"a {kind.__name__}" + (f" with {data!r:.60}" if data else "")


def _listed(keys: Sequence[Hashable]) -> str:
    first_keys = ", ".join(map(repr, keys[:_MAX_KEYS]))
    total = f", … ({len(keys)} in all)" if len(keys) > _MAX_KEYS else ""
    return f"key{'s' if len(keys) > 1 else ''} {first_keys}{total}"


def check_live(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_args: Mapping[int, Any],
    dynamic_kwargs: Mapping[str, Any],
) -> None:
    """Refuse a function that uses a tracer of a transformation that has ended, as one left in a list.

    Args:
        fun: a function that closes over tracers.
        args: positional arguments.
        kwargs: keyword arguments.
        dynamic_args: positional arguments that are not static, or their shapes, by position.
        dynamic_kwargs: keyword arguments that are not static, or their shapes.

    Raises:
        UnexpectedTracerError: JAX's, with the origin of the tracer.
    """
    settings = {name: value for name, value in kwargs.items() if name not in dynamic_kwargs}

    def run(positional: dict[int, Any], named: dict[str, Any]) -> Any:
        return fun(*(positional.get(n, x) for n, x in enumerate(args)), **settings, **named)

    # Traced once more: the tracers that a function closes over are constants of its jaxpr.
    _use(jax.make_jaxpr(run)(dict(dynamic_args), dict(dynamic_kwargs)).consts)


def check_live_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a tracer of a transformation that has ended among the arguments of a call."""
    # The error is JAX's; a trace alone would read the tracer's shape and not raise it.
    leaves = jax.tree.leaves((args, dict(kwargs)))
    if has_tracer(leaves):
        _use(leaves)


def _use(values: Sequence[Any]) -> None:
    """Copy each tracer, which JAX refuses after its transformation has ended."""
    for value in values:
        if isinstance(value, jax.core.Tracer) and not is_ref(jax.typeof(value)):
            jnp.copy(value)


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
