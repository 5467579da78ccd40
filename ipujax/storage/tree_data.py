"""Pytrees as JSON-able data: dicts, lists, tuples, named tuples, None, and the number of each leaf.

Input: the structure of a pytree. Output: data; from such data the structure. Nothing is imported for it: the module of
a named tuple must be imported already.
"""

from __future__ import annotations

import sys
from functools import reduce
from typing import Any

import jax

from ipujax.runtime.errors import ArgumentError, ArgumentTypeError


def tree_data(who: str, place: str, tree: Any) -> Any:
    """Return the structure of a pytree as data; `who` and `place` are for the error of one that has no such form."""
    try:
        return _data(jax.tree.unflatten(tree, range(tree.num_leaves)))
    except (TypeError, ValueError, AttributeError) as error:
        raise ArgumentTypeError(
            f"{who} cannot be saved: its {place} have a pytree that no file can describe",
            expected="dicts with keys of text, lists, tuples, named tuples, None",
            got=str(error),
            hint="jax.tree.leaves of it as an argument, and jax.tree.unflatten inside of the function",
        ) from error


def _data(node: Any) -> Any:
    kind = type(node)
    if node is None or kind is int:
        return node
    if kind is dict and all(isinstance(key, str) for key in node):
        return {"dict": {key: _data(child) for key, child in node.items()}}
    if kind in (list, tuple):
        return {kind.__name__: [_data(child) for child in node]}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return {"namedtuple": [kind.__module__, kind.__qualname__], "children": [_data(child) for child in node]}
    raise TypeError(f"{kind.__module__}.{kind.__qualname__}")


def tree_of_data(data: Any) -> Any:
    """Return the structure of the data.

    Raises:
        ArgumentError: the module of a named tuple is not imported.
    """
    return jax.tree.structure(_node(data))


def _node(data: Any) -> Any:
    match data:
        case {"dict": children}:
            return {key: _node(child) for key, child in children.items()}
        case {"list": children}:
            return [_node(child) for child in children]
        case {"tuple": children}:
            return tuple(_node(child) for child in children)
        case {"namedtuple": [module, name], "children": children}:
            return _named_tuple(module, name)(*map(_node, children))
    return data


def _named_tuple(module: str, name: str) -> Any:
    kind = reduce(lambda scope, part: getattr(scope, part, None), name.split("."), sys.modules.get(module))
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        problem = f"a saved program has the named tuple {name} of {module}, which is not imported"
        raise ArgumentError(problem, hint=f"import {module.partition('.')[0]} before ipu.load")
    return kind
