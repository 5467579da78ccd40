"""First difference in structure between the arguments of a call and those that a function was compiled for.

Input: the compiled pytree, and the arguments. Output: the Python expression of the node that differs, and both nodes in
words. Limits: nodes are compared, shapes and dtypes of leaves are not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from ipujax.runtime.signatures import describe

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
