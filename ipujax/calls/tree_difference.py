"""Finds where the arguments of a call first differ in structure from those a function was compiled for.

Input: the tree that was compiled for, and the arguments. Output: the place as the user writes it, and both sides in
words. Only whole nodes are compared: shapes and dtypes of leaves are for whoever calls this.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from ipujax.runtime.signatures import described

EVERYWHERE = "its arguments"  # the place of a difference in which arguments there are
_MOST_KEYS = 8  # so many are listed in a message


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two trees.

    Args:
        place: where it is: "its argument params['w']".
        expected: what the function was compiled for.
        got: what was found there.
    """

    place: str
    expected: str
    got: str


def first_difference(tree: PyTreeDef, args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str]) -> Difference:
    """Finds the first difference.

    Args:
        tree: structure of `(args, kwargs)` a function was compiled for.
        args: positional arguments of another structure, or with keyword arguments of another structure.
        kwargs: keyword arguments.
        names: what the function calls its positional arguments.
    """
    in_args, in_kwargs = tree.children()
    keys = list(jax.tree.unflatten(in_kwargs, range(in_kwargs.num_leaves)))
    if len(args) != len(in_args.children()) or set(kwargs) != set(keys):
        expected = [*names, *(f"{key}=…" for key in keys)]
        got = [*map(described, args), *(f"{key}={described(value)}" for key, value in kwargs.items())]
        return Difference(EVERYWHERE, f"({', '.join(expected)})", f"({', '.join(got)})")
    places = [*zip(names, in_args.children(), args, strict=True)]
    places += [(key, child, kwargs[key]) for key, child in zip(keys, in_kwargs.children(), strict=True)]
    found = (_difference(child, value, f"its argument {name}") for name, child, value in places)
    return next(difference for difference in found if difference is not None)


def tree_in_words(value: Any) -> str:
    """The structure of a value, with * for each array."""
    return f"{jax.tree.structure(value)}".removeprefix("PyTreeDef(").removesuffix(")")


def _difference(expected: PyTreeDef, value: Any, place: str) -> Difference | None:
    """The first difference between a tree and a value, None if there is none."""
    got: PyTreeDef = jax.tree.structure(value)
    if got == expected:
        return None
    wanted, found = expected.node_data(), got.node_data()
    if wanted is None or found is None or wanted[0] is not found[0]:
        return Difference(place, *_apart(expected, got, value))
    if wanted[0] is dict and wanted[1] != found[1]:
        missing = [key for key in wanted[1] if key not in found[1]]
        extra = [key for key in found[1] if key not in wanted[1]]
        words = [f"{word} {_listed(keys)}" for word, keys in (("without", missing), ("with", extra)) if keys]
        return Difference(place, _in_words(expected, None), f"a dict {' and '.join(words)}")
    children = expected.children()
    steps = jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda part: part is not value)
    if wanted[1] != found[1] or len(steps) != len(children):
        return Difference(place, _in_words(expected, None), _in_words(got, value))
    parts = zip(children, steps, strict=True)
    found_inside = (_difference(child, part, place + jax.tree_util.keystr(path)) for child, (path, part) in parts)
    return next((difference for difference in found_inside if difference is not None), None)


def _apart(expected: PyTreeDef, got: PyTreeDef, value: Any) -> tuple[str, str]:
    """Two nodes of different kinds in words, in full where they go by one name."""
    words = _in_words(expected, None), _in_words(got, value)
    if words[0] != words[1]:
        return words
    return repr(expected.node_data()[0]), repr(got.node_data()[0])


def _in_words(tree: PyTreeDef, value: Any) -> str:
    """The outermost node of a tree; `value` is what has that structure, if it is known."""
    node = tree.node_data()
    if node is None:
        return "an array" if value is None else described(value)
    kind, data = node
    if kind is type(None):
        return "None"
    if kind is dict:
        return f"a dict with {_listed(data)}" if data else "an empty dict"
    if kind in (tuple, list):
        return f"a {kind.__name__} of {len(tree.children())}"
    return f"a {kind.__name__}" + (f" with {data!r:.60}" if data else "")


def _listed(keys: Sequence[Hashable]) -> str:
    shown = ", ".join(map(repr, keys[:_MOST_KEYS]))
    more = f", … ({len(keys)} in all)" if len(keys) > _MOST_KEYS else ""
    return f"key{'s' if len(keys) > 1 else ''} {shown}{more}"
