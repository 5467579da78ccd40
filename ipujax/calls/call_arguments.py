"""Arguments of a call: their pytree, and flags of donated leaves. Input: a call. Output: `CallArguments`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ipujax.arguments import argument_places, static_keywords


@dataclass(frozen=True)
class CallArguments:
    """Structure of the arguments that a function is traced for, without the static ones.

    Args:
        tree: pytree of `(args, kwargs)`.
        counts: number of leaves of each positional argument, and of all keyword arguments together.
        donated: for each leaf whether its buffer may be reused.
    """

    tree: Any
    counts: tuple[int, ...]
    donated: tuple[bool, ...]

    @staticmethod
    def of_call(
        fun: Callable[..., Any],
        positional: Mapping[int, Any],
        named: Mapping[str, Any],
        args: Sequence[Any],
        donated: tuple[Sequence[int] | None, Sequence[str] | None],
    ) -> CallArguments:
        """Return the structure of a call.

        Args:
            fun: the function.
            positional: arguments that are not static, trees of arrays, by position.
            named: likewise by name.
            args: all positional arguments.
            donated: positions and names of donated arguments, each None to follow from the other.
        """
        # The trees are those of the call: JAX's `args_info` has no arrays, which users' pytree classes may refuse.
        numbers, names = donated
        from_front = None if numbers is None else [n for n in numbers if n >= 0]  # JAX ignores negative ones
        _, donated_numbers = argument_places(fun, args, from_front, names)
        donated_names = static_keywords(fun, from_front, names)
        operands = tuple(positional.values()), dict(named)
        counts = (*map(_num_leaves, operands[0]), _num_leaves(operands[1]))
        flags = tuple(n in donated_numbers for n in positional), {name: name in donated_names for name in named}
        leaves = jax.tree.map(lambda flag, part: [flag] * _num_leaves(part), flags, operands)
        return CallArguments(jax.tree.structure(operands), counts, tuple(jax.tree.leaves(leaves)))


def _num_leaves(tree: Any) -> int:
    structure: Any = jax.tree.structure(tree)
    return int(structure.num_leaves)
