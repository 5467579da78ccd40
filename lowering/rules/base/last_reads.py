"""Last reads of memory, after which an equation may write its result there.

Input: the last equation that reads each value of a jaxpr, and the tensors of values in order of definition. Output:
whether an equation may overwrite a tensor, and the values that are views of a variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ipujax.lowering.jax_compat import Var
from ipujax.runtime.tensor import Tensor, Variable


class LastReads:
    """Last equation that reads each variable, through any view, from the last reads of values and their tensors."""

    def __init__(self, last_read: Mapping[Var, int], values: Iterable[tuple[Var, Tensor]]) -> None:
        self._last_read = last_read
        self._last: dict[Variable, int] = {}
        self._values: dict[Variable, list[Var]] = {}
        self.add(values)

    def add(self, values: Iterable[tuple[Var, Tensor]]) -> None:
        for var, tensor in values:
            last = self._last_read.get(var, -1)
            for variable in tensor.variables():
                self._last[variable] = max(last, self._last.get(variable, -1))
                self._values.setdefault(variable, []).append(var)

    def last(self, variable: Variable) -> int:
        """The last equation that reads a variable, as far as values have been made; −1 for none."""
        return self._last.get(variable, -1)

    def moved_from(self, variable: Variable) -> list[Var]:
        """Removes and returns the values that see a variable."""
        self._last.pop(variable, None)
        return self._values.pop(variable, [])

    def may_overwrite(self, out: Tensor, operands: Sequence[Tensor], number: int) -> bool:
        """True if equation `number` may write tensor `out`: nothing later reads it, and the equation no part of it."""
        # An operand that is the very tensor is read, element by element, before it is written.
        variables = set(out.variables())
        is_free = all(x.node is out.node or variables.isdisjoint(x.variables()) for x in operands)
        return is_free and all(self._last.get(variable, -1) <= number for variable in variables)
