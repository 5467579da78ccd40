"""What a call gives: the tree of its arguments, and which of their leaves are donated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ipujax.calls.arguments import argument_places, static_keywords


@dataclass(frozen=True)
class Given:
    """The arguments that a function is traced for, without the static ones.

    Known of the call itself: of JAX's `args_info` the trees hold no arrays, which classes of users may not take.

    Args:
        tree: their tree, as `(args, kwargs)`.
        counts: the number of leaves of each positional argument, and of all others together.
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
    ) -> Given:
        """Describes a call.

        Args:
            fun: the function.
            positional: arguments that are not static, trees of arrays, by position.
            named: likewise by name.
            args: all positional arguments.
            donated: positions and names of those that are donated, each None if the other says it.
        """
        numbers, names = donated
        counted = None if numbers is None else [n for n in numbers if n >= 0]  # as JAX does, from the front only
        _, donated_numbers = argument_places(fun, args, counted, names)
        donated_names = static_keywords(fun, counted, names)
        operands = tuple(positional.values()), dict(named)
        counts = (*map(_num_leaves, operands[0]), _num_leaves(operands[1]))
        flags = tuple(n in donated_numbers for n in positional), {name: name in donated_names for name in named}
        leaves = jax.tree.map(lambda flag, part: [flag] * _num_leaves(part), flags, operands)
        return Given(jax.tree.structure(operands), counts, tuple(jax.tree.leaves(leaves)))


def _num_leaves(tree: Any) -> int:
    structure: Any = jax.tree.structure(tree)
    return int(structure.num_leaves)
