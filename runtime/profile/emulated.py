"""Arithmetic in dtypes that the machine does not have: its lines of source, and its cycles.

Input: an executable. Output: a row for each line and dtype. Codelets that only move elements are left out, as any dtype
is moved as words; so are random number generators, and integers that are indices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.graph import ComputeSet, Execute
from ipujax.runtime.tensor import Origin, dtype_name, is_key_dtype


@dataclass(frozen=True, slots=True)
class Emulated:
    """The operations of one line of source on one dtype that the target computes with others.

    Args:
        dtype: its name.
        operations: the codelets, in program order.
        cycles: cycles of one run of each of their compute sets, on its slowest tile.
        origin: the line.
    """

    dtype: str
    operations: tuple[str, ...]
    cycles: int
    origin: Origin


def emulated(executable: Executable) -> tuple[Emulated, ...]:
    """Return the arithmetic in dtypes that are not among the target's `native_dtypes`, in program order."""
    rows: dict[tuple[str, str], Emulated] = {}
    for leaf, cost in executable.costs.items():
        if isinstance(leaf, Execute) and isinstance(cost, ComputeSetCost):
            origin = leaf.compute_set.origin
            cycles = int(cost.compute_cycles.max())
            for dtype, operations in _foreign(executable, leaf.compute_set).items():
                row = rows.get((dtype, str(origin)), Emulated(dtype, (), 0, origin))
                names = tuple(dict.fromkeys((*row.operations, *operations)))
                rows[dtype, str(origin)] = replace(row, operations=names, cycles=row.cycles + cycles)
    return tuple(rows.values())


def _foreign(executable: Executable, compute_set: ComputeSet) -> dict[str, list[str]]:
    """Return the codelets of a compute set that compute in dtypes the target lacks, by dtype."""
    codelets: dict[str, list[str]] = {}
    for group in executable.graph.groups[compute_set]:
        if not group.codelet.moves:
            names = [dtype_name(item.dtype) for item in group.codelet.fields if not is_key_dtype(item.dtype)]
            for dtype in dict.fromkeys(names):
                if dtype not in executable.target.native_dtypes:
                    codelets.setdefault(dtype, []).append(group.codelet.name)
    return codelets
