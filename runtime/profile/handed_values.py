"""Values that operations hand on: which operation reads what another has written, and how many bytes.

Input: an `Executable`, the program of a run, and the rows of its steps. Output: `HandedValues`, columns; operations are
rows of `Figures.step_costs`. The program is walked once in its order: a loop for one iteration, a function at each
call, of branches one after the other. A variable is read from the operations that have written it last, of each as many
bytes as it wrote, and no more than are read.
Limits: what an iteration of a loop hands to the next is left out. A vertex group of several operations reads and writes
as the one with most of its cycles.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.files.kinds import Integer, List
from ipujax.runtime.graph import Call, Execute, Program
from ipujax.runtime.profile.step_costs import StepRows
from ipujax.runtime.tensor import Origin, Tensor, Variable, compose, element_bytes

NO_PLACE = -1
_VALUES = "handed values"
Bytes = dict[Variable, int]


@dataclass(frozen=True, slots=True, eq=False)
class HandedValues:
    """Bytes that an operation reads of what another has written, and the order in which operations first run.

    Args:
        writer: the operation that wrote the bytes of each pair, int64[pairs]; pairs are sorted by writer and reader.
        reader: the operation that reads them, int64[pairs].
        num_bytes: of all variables together, each counted once however often it is handed on, int64[pairs].
        place: number of operations that first run before each, `NO_PLACE` where no step is of it, int64[operations].
    """

    writer: Annotated[np.ndarray, List(Integer(below="operations"), _VALUES)]
    reader: Annotated[np.ndarray, List(Integer(below="operations"), _VALUES)]
    num_bytes: Annotated[np.ndarray, List(Integer(), _VALUES)]
    place: Annotated[np.ndarray, List(Integer(NO_PLACE), "operations")]


def handed_values(executable: Executable, program: Program, rows: StepRows, num_operations: int) -> HandedValues:
    """Return the values that the operations of a run hand on."""
    walk = _Walk(executable, rows)
    walk.visit(program, Origin())
    sums: dict[tuple[int, int], int] = defaultdict(int)
    for (writer, reader, _), num_bytes in walk.handed.items():
        sums[writer, reader] += num_bytes
    table = np.array(sorted((*pair, num_bytes) for pair, num_bytes in sums.items()), np.int64).reshape(-1, 3)
    place = np.full(num_operations, NO_PLACE)
    place[list(walk.place)] = list(walk.place.values())
    columns = table.T.copy()
    return HandedValues(columns[0], columns[1], columns[2], place)


class _Walk:
    """A walk over a program, with the operations that have written each variable last."""

    def __init__(self, executable: Executable, rows: StepRows) -> None:
        self.executable = executable
        self.rows = rows
        self.place: dict[int, int] = {}  # of each operation, in the order in which they first run
        self.written: dict[Variable, dict[int, int]] = {}  # bytes by operation
        self.handed: dict[tuple[int, int, Variable], int] = {}
        self._accesses: dict[Program, tuple[list[tuple[Bytes, Bytes]], list[Variable]]] = {}

    def visit(self, node: Program, caller: Origin) -> None:
        """Walk a node that is called from some origin, `Origin()` outside of functions."""
        if node in self.executable.steps:
            self.step(node, self.rows.with_groups(node, caller))
        if isinstance(node, Call) and node.origin != Origin():
            caller = compose(caller, node.origin)
        for child in node.children():
            self.visit(child, caller)

    def step(self, node: Program, groups: Mapping[int, int]) -> None:
        """Add the bytes that operations of a step read from their last writers, then those that they write.

        Args:
            node: the step.
            groups: operation → number of its vertex group in the step, most cycles first.
        """
        first = next(iter(groups))
        for operation in groups:
            self.place.setdefault(operation, len(self.place))
        operation_of_group: dict[int, int] = {}
        for operation, group in groups.items():
            operation_of_group.setdefault(group, operation)  # of several the one with most cycles
        of_groups, in_full = self.accesses(node)
        accesses = [(operation_of_group.get(n, first), *access) for n, access in enumerate(of_groups)]
        for reader, reads, _ in accesses:
            for variable, num_bytes in reads.items():
                for writer, written in self.written.get(variable, {}).items():
                    key = writer, reader, variable
                    if writer != reader:
                        self.handed[key] = max(self.handed.get(key, 0), min(num_bytes, written))
        self.written |= {variable: {} for variable in in_full}
        for writer, _, writes in accesses:
            for variable, num_bytes in writes.items():
                self.written.setdefault(variable, {})[writer] = num_bytes

    def accesses(self, node: Program) -> tuple[list[tuple[Bytes, Bytes]], list[Variable]]:
        """Return the bytes that each vertex group of a step reads and writes, by variable; of other steps of it all.

        Also returns the variables that the step writes in full.
        """
        if node not in self._accesses:
            accesses = self._find_accesses(node)
            sums = Counter[Variable]()
            for _, writes in accesses:
                sums.update(writes)
            in_full = [variable for variable, num_bytes in sums.items() if num_bytes >= variable.num_bytes]
            self._accesses[node] = accesses, in_full
        return self._accesses[node]

    def _find_accesses(self, node: Program) -> list[tuple[Bytes, Bytes]]:
        """Return the bytes by variable that are read and written, by each vertex group or by all of another step."""
        if not isinstance(node, Execute):
            return [(_bytes(node.reads), _bytes(node.writes))]
        accesses = []
        for group in self.executable.graph.groups[node.compute_set]:
            fields: Sequence[tuple[bool, bool, Tensor]] = [
                (field.is_read, field.is_written, access.tensor)
                for field, access in zip(group.codelet.fields, group.accesses, strict=True)
            ]
            reads = _bytes(tensor for is_read, _, tensor in fields if is_read)
            accesses.append((reads, _bytes(tensor for _, is_written, tensor in fields if is_written)))
        return accesses


def _bytes(tensors: Iterable[Tensor]) -> Bytes:
    """Return the bytes of each variable that some tensors view, at most those of the tensors."""
    sums: Bytes = {}
    for tensor in tensors:
        size = tensor.size * element_bytes(tensor.dtype)
        for variable in tensor.variables():
            if not variable.is_constant:
                sums[variable] = min(variable.num_bytes, sums.get(variable, 0) + size)
    return sums
