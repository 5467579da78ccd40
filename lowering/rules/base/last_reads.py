"""Until where memory is read, so that an equation may write its result into it at once.

Input: the last equation that reads each value of a jaxpr, and the tensors of values as they are made. Output: whether a
tensor may be overwritten by an equation, and which values see a variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ipujax.lowering.jax_compat import Var
from ipujax.runtime.tensor import Tensor, Variable


class LastReads:
    """The last equation that reads each variable, through any view.

    Args:
        last_read: of each value of a jaxpr that is read, the number of the last equation that does.
        values: those that are there at first.
    """

    def __init__(self, last_read: Mapping[Var, int], values: Iterable[tuple[Var, Tensor]]) -> None:
        self._last_read, self._last = last_read, dict[Variable, int]()
        self._values: dict[Variable, list[Var]] = {}
        self.add(values)

    def add(self, values: Iterable[tuple[Var, Tensor]]) -> None:
        """Notes values that have been made."""
        for var, tensor in values:
            last = self._last_read.get(var, -1)
            for variable in tensor.variables():
                self._last[variable] = max(last, self._last.get(variable, -1))
                self._values.setdefault(variable, []).append(var)

    def last(self, variable: Variable) -> int:
        """The last equation that reads a variable, as far as values have been made; −1 for none."""
        return self._last.get(variable, -1)

    def moved_from(self, variable: Variable) -> list[Var]:
        """The values made so far that see a variable, which none does from now on."""
        self._last.pop(variable, None)
        return self._values.pop(variable, [])

    def may_overwrite(self, out: Tensor, operands: Sequence[Tensor], number: int) -> bool:
        """Whether an equation may write a tensor: nothing reads it later, nor in part now.

        An operand that is the very tensor is read, element by element, before it is written.

        Args:
            out: the tensor.
            operands: of the equation.
            number: of the equation.
        """
        own = set(out.variables())
        is_free = all(x.node is out.node or own.isdisjoint(x.variables()) for x in operands)
        return is_free and all(self._last.get(variable, -1) <= number for variable in own)
