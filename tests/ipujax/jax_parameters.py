"""Primitives of JAX and their parameters: a script that prints them as JSON, in a process without ipujax.

JAX keeps no list, so primitives are the objects of their class. Their parameters are the keywords of the rules that
JAX has for them, and of functions inside of these; parameters of any name are `**` and what the rule calls them.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from jax.extend.core import Primitive  # noqa: TID251 (what JAX has, not what ipujax uses)
from jax.interpreters import ad, batching, mlir, partial_eval  # noqa: TID251

MODULES = (
    *("buffer_callback", "checkify", "compute_on", "custom_partitioning", "layout", "pallas", "roofline"),
    *("scheduling_groups", "shard_alike", "sparse", "xla_metadata"),
)
TABLES = (
    *(mlir._lowerings, ad.primitive_jvps, ad.primitive_transposes),
    batching.fancy_primitive_batchers,
    *(partial_eval.dce_rules, partial_eval.partial_eval_jaxpr_custom_rules),
)


def rules(primitive: Primitive) -> Iterator[Any]:
    for table in (*TABLES, *mlir._platform_specific_lowerings.values()):
        with suppress(KeyError):
            rule = table[primitive]
            yield getattr(rule, "rule", rule)
    yield primitive.impl
    yield from vars(primitive).values()


def functions_in(rule: Any) -> list[Any]:
    """A rule, and the functions that it wraps or closes over."""
    found: list[Any] = []
    remaining = [rule]
    while remaining:
        function = remaining.pop()
        if not callable(function) or any(function is other for other in found):
            continue
        found.append(function)
        with suppress(AttributeError):
            remaining += [function.func, *function.args, *function.keywords.values()]
        remaining.append(getattr(function, "__wrapped__", None))
        for cell in getattr(function, "__closure__", None) or ():
            with suppress(ValueError):  # an empty cell
                remaining.append(cell.cell_contents)
    return found


def parameters(primitive: Primitive) -> set[str]:
    names = set()
    for rule in rules(primitive):
        for function in functions_in(rule):
            with suppress(TypeError, ValueError):
                for parameter in inspect.signature(function).parameters.values():
                    if parameter.kind is parameter.KEYWORD_ONLY:
                        names.add(parameter.name)
                    if parameter.kind is parameter.VAR_KEYWORD:
                        names.add(f"**{parameter.name}")
    return names


def main() -> None:
    """Print the parameters of each primitive, by name."""
    for name in MODULES:
        importlib.import_module(f"jax.experimental.{name}")
    importlib.import_module("jax.lax.linalg")
    importlib.import_module("jax.export")
    found: dict[str, set[str]] = {}
    for primitive in [x for x in gc.get_objects() if isinstance(x, Primitive)]:
        found.setdefault(primitive.name, set()).update(parameters(primitive))
    print(json.dumps({name: sorted(names) for name, names in sorted(found.items())}))


if __name__ == "__main__":
    main()
