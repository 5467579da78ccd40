"""Arguments of a call in streaming memory: `offload_argnums` of `ipu.jit`.

Source: PopART keeps tensors of less than 2 elements on chip (`TensorLocationSettings`, minElementsForOffChip).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Any

from ipujax.lowering.jax_compat import is_float0
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.tensor import is_key_dtype

_MIN_ELEMENTS = 2  # published: PopART, see above


def offloaded_arguments(who: str, numbers: Sequence[int], count: int, static: Collection[int]) -> frozenset[int]:
    """Return positions of offloaded arguments, counted without static ones; refuse those of static ones, or of none."""
    offloaded = set()
    for number in numbers:
        position = number + count if number < 0 else number
        if not 0 <= position < count or position in static:
            raise ArgumentError(
                f"offload_argnums of {who} names {'a static argument' if position in static else 'no argument'}",
                expected=f"positions of {count} positional arguments that are arrays",
                got=number,
            )
        # Traces have no static arguments: the operands behind them move up.
        offloaded.add(position - sum(other < position for other in static))
    return frozenset(offloaded)


def may_be_offloaded(leaf: Any) -> bool:
    """Return whether an array of an offloaded argument is stored in streaming memory: not keys, not single elements."""
    return not is_key_dtype(leaf.dtype) and not is_float0(leaf) and prod(leaf.shape) >= _MIN_ELEMENTS
