"""Pytrees as JSON-able data: dicts, lists, tuples, named tuples, None, and the number of each leaf.

Input: the structure of a pytree. Output: data; from such data the structure. Nothing is imported or called for it: the
module of a named tuple must be imported already.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import jax

from ipujax.runtime.errors import ArgumentError, ArgumentTypeError
from ipujax.runtime.files import DamagedError

_MAX_DEPTH = 200


def tree_data(who: str, place: str, tree: Any) -> Any:
    """Return the structure of a pytree as data; `who` and `place` are for the error of one that has no such form."""
    try:
        data = _data(jax.tree.unflatten(tree, range(tree.num_leaves)))
        _node(data, 0)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ArgumentTypeError(
            f"{who} cannot be saved: its {place} have a pytree that no file can describe",
            expected="dicts with keys of text, lists, tuples, named tuples of modules, None",
            got=str(error),
            hint="jax.tree.leaves of it as an argument, and jax.tree.unflatten inside of the function",
        ) from error
    return data


def _data(node: Any) -> Any:
    kind = type(node)
    if node is None or kind is int:
        return node
    if kind is dict and all(isinstance(key, str) for key in node):
        return {"dict": {key: _data(child) for key, child in node.items()}}
    if kind in (list, tuple):
        return {kind.__name__: [_data(child) for child in node]}
    if isinstance(node, tuple) and _found(kind.__module__, kind.__qualname__) is kind:
        return {"namedtuple": [kind.__module__, kind.__qualname__], "children": [_data(child) for child in node]}
    raise TypeError(f"{kind.__module__}.{kind.__qualname__}")


def tree_of_data(data: Any) -> Any:
    """Return the structure of the data.

    Raises:
        DamagedError: data of another form.
        ArgumentError: the module of a named tuple is not imported.
    """
    return jax.tree.structure(_node(data, 0))


def _node(data: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise DamagedError("its pytree is too deep", f"at most {_MAX_DEPTH} nodes inside each other", "more")
    match data:
        case None:
            return None
        case int() if type(data) is int:
            return data
        case {"dict": dict(children), **rest} if not rest:
            return {key: _node(child, depth + 1) for key, child in children.items()}
        case {"list": list(children), **rest} if not rest:
            return [_node(child, depth + 1) for child in children]
        case {"tuple": list(children), **rest} if not rest:
            return tuple(_node(child, depth + 1) for child in children)
        case {"namedtuple": [str(module), str(name)], "children": list(children), **rest} if not rest:
            kind = _named_tuple(module, name)
            if len(kind._fields) != len(children):
                expected = f"{len(kind._fields)} fields of {name}"
                raise DamagedError("a named tuple has other fields", expected, f"{len(children)}")
            return tuple.__new__(kind, [_node(child, depth + 1) for child in children])  # without its own `__new__`
    raise DamagedError(
        "its pytree is damaged", "dicts, lists, tuples, named tuples, None and leaves", type(data).__name__
    )


def _named_tuple(module: str, name: str) -> Any:
    kind = _found(module, name)
    if kind is None:
        problem = f"a saved program has the named tuple {name[:100]!r} of {module[:100]!r}, which is not imported"
        raise ArgumentError(problem, hint="import that module before ipu.load, if you trust the file")
    return kind


def _found(module: str, name: str) -> Any:
    """Return a class of named tuples; None if no imported module has it."""
    scope: Any = sys.modules.get(module)
    for part in name.split("."):
        # By their dictionaries: `getattr` may run code of a module.
        scope = vars(scope).get(part) if isinstance(scope, ModuleType | type) else None
    is_named_tuple = isinstance(scope, type) and issubclass(scope, tuple) and hasattr(scope, "_fields")
    return scope if is_named_tuple else None
