"""Models of constraints over whole numbers, solved by propagation of domains, branch and bound.

Input: variables with intervals of whole numbers, constraints, objectives. Output: values of the variables that satisfy
the constraints and minimise the objectives. Limit: a number of evaluations of constraints in one search.

A constraint leaves a bound to each of its variables, which the solver intersects with the variable's domain. A bound
holds all values of solutions; of single values it holds exactly the solutions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from numbers import Integral
from typing import Any, NamedTuple
from uuid import uuid4

from ipujax.runtime.errors import (
    ArgumentOverflowError,
    ArgumentRuntimeError,
    ArgumentTypeError,
    ArgumentValueError,
    shortened,
)

MAX_VALUE = (1 << 32) - 1  # of variables: Poplar's unsigned int


class Domain(NamedTuple):
    """All whole numbers from `low` to `high`, both included."""

    low: int
    high: int


Narrow = Callable[[Sequence[Domain]], Sequence[Domain]]


def ceil_quotient(dividend: int, divisor: int) -> int:
    """Return a quotient, rounded up."""
    return -(-dividend // divisor)


def narrow_sum(domains: Sequence[Domain]) -> list[Domain]:
    """Σ terms = total."""
    *terms, total = domains
    low = sum(x.low for x in terms)
    high = sum(x.high for x in terms)
    return [*(Domain(total.low - high + x.high, total.high - low + x.low) for x in terms), Domain(low, high)]


def narrow_difference(domains: Sequence[Domain]) -> list[Domain]:
    """left − right = difference."""
    # left = right + difference, read backwards: the order of the domains is reversed twice.
    return narrow_sum(domains[::-1])[::-1]


def narrow_product(domains: Sequence[Domain]) -> list[Domain]:
    """Π factors = result."""
    *factors, result = domains
    bounds: list[Domain] = []
    for i in range(len(factors)):
        other_factors = factors[:i] + factors[i + 1 :]
        low = prod(x.low for x in other_factors)
        high = prod(x.high for x in other_factors)
        # A factor is bounded from above only where all others are positive: 0 · x = 0 for all x.
        bounds.append(Domain(ceil_quotient(result.low, high) if high else 0, result.high // low if low else MAX_VALUE))
    return [*bounds, Domain(prod(x.low for x in factors), prod(x.high for x in factors))]


def narrow_max(domains: Sequence[Domain]) -> list[Domain]:
    """max(operands) = result."""
    *operands, result = domains
    greatest = Domain(max(x.low for x in operands), max(x.high for x in operands))
    return [*(Domain(0, result.high) for _ in operands), greatest]


def narrow_min(domains: Sequence[Domain]) -> list[Domain]:
    """min(operands) = result."""
    *operands, result = domains
    smallest = Domain(min(x.low for x in operands), min(x.high for x in operands))
    return [*(Domain(result.low, MAX_VALUE) for _ in operands), smallest]


def narrow_floordiv(domains: Sequence[Domain]) -> list[Domain]:
    """left // right = quotient: quotient · right ≤ left < (quotient + 1) · right."""
    left, right, quotient = domains
    # A divisor is at least 1: the bound of `right` says so.
    divisor_low = max(1, right.low)
    divisor_high = max(1, right.high)
    return [
        Domain(quotient.low * divisor_low, (quotient.high + 1) * divisor_high - 1),
        Domain(left.low // (quotient.high + 1) + 1, left.high // quotient.low if quotient.low else MAX_VALUE),
        Domain(left.low // divisor_high, left.high // divisor_low),
    ]


def narrow_ceildiv(domains: Sequence[Domain]) -> list[Domain]:
    """left / right, rounded up, = quotient: (quotient − 1) · right < left ≤ quotient · right."""
    left, right, quotient = domains
    divisor_low = max(1, right.low)
    divisor_high = max(1, right.high)
    return [
        Domain((quotient.low - 1) * divisor_low + 1, quotient.high * divisor_high),
        Domain(
            max(1, ceil_quotient(left.low, quotient.high)) if quotient.high else 1,
            (left.high - 1) // (quotient.low - 1) if quotient.low > 1 else MAX_VALUE,
        ),
        Domain(ceil_quotient(left.low, divisor_high), ceil_quotient(left.high, divisor_low)),
    ]


def narrow_ordered(gap: int, domains: Sequence[Domain]) -> list[Domain]:
    """left + gap ≤ right."""
    left, right = domains
    return [Domain(0, right.high - gap), Domain(left.low + gap, MAX_VALUE)]


def narrow_equal(domains: Sequence[Domain]) -> list[Domain]:
    """left = right."""
    return list(domains[::-1])


def narrow_to_better(best: Sequence[int], domains: Sequence[Domain]) -> list[Domain]:
    """Objectives that come before those of the best solution, in lexicographic order."""
    bounds = [Domain(0, MAX_VALUE) for _ in domains]
    for i, (domain, value) in enumerate(zip(domains, best, strict=True)):
        bounds[i] = Domain(0, value - (i == len(best) - 1))
        if domain.low < value:
            break
    return bounds


class InfeasibleModelError(ArgumentValueError):
    """A model without a solution."""


class SearchLimitError(ArgumentRuntimeError):
    """A search that needs more evaluations of constraints than its model allows."""


@dataclass(frozen=True, slots=True)
class Variable:
    """Unknown whole number of one model, made by `Model.add_variable`; equal to itself and its copies."""

    index: int
    name: str
    _key: str = field(default_factory=lambda: uuid4().hex, repr=False)  # no two variables of any models have the same


@dataclass(frozen=True, slots=True)
class Solution:
    """Values of the variables of a model: `solution[variable]`."""

    values: Mapping[Variable, int]

    def __getitem__(self, variable: Variable) -> int:
        """Return the value of a variable.

        Raises:
            ArgumentTypeError: anything but a variable that the model had when it was solved.
        """
        if not isinstance(variable, Variable) or variable not in self.values:
            raise ArgumentTypeError(
                "a solution has values of the variables of its model",
                expected="a variable that was added before minimise",
                got=variable if isinstance(variable, Variable) else shortened(variable),
            )
        return self.values[variable]


@dataclass(frozen=True, slots=True)
class _Constraint:
    narrow: Narrow
    variables: tuple[int, ...]


class Model:
    """Variables and constraints, with Poplar's names of operations.

    Operands are variables or whole numbers. Results are 0 … `MAX_VALUE`, 2³² − 1: a solution has no operands with a
    negative or greater result, and no division by 0.

    Args:
        max_evaluations: evaluations of constraints in one search.

    Raises:
        ArgumentTypeError: by all methods: an operand that is neither a variable of this model nor a whole number.
        ArgumentOverflowError: a number, or all values of a result, outside 0 … 2³² − 1.
        ArgumentValueError: no operand at all.
    """

    def __init__(self, max_evaluations: int = 2_000_000) -> None:
        self._max_evaluations = max_evaluations
        self._variables: list[Variable] = []
        self._domains: list[Domain] = []
        self._constraints: list[_Constraint] = []
        self._call_operands: set[int] = set()

    def add_variable(self, min: int = 0, max: int = MAX_VALUE, name: str = "") -> Variable:
        """Add a variable with values `min` … `max`.

        Raises:
            ArgumentValueError: `min` is greater than `max`.
        """
        name = name or f"variable {len(self._variables)}"
        domain = Domain(_integer(min, f"least value of {name}"), _integer(max, f"greatest value of {name}"))
        if domain.low > domain.high:
            raise ArgumentValueError(f"{name} has no values", expected="min ≤ max", got=f"{min} and {max}")
        self._domains.append(domain)
        self._variables.append(Variable(len(self._variables), name))
        return self._variables[-1]

    def add_constant(self, value: int, name: str = "") -> Variable:
        """Add a variable with one value."""
        return self.add_variable(value, value, name or f"constant {value}")

    def sum(self, operands: Sequence[Variable | int], name: str = "sum") -> Variable:
        """Add a variable that equals the sum of operands."""
        return self._result(narrow_sum, operands, name)

    def product(self, operands: Sequence[Variable | int], name: str = "product") -> Variable:
        """Add a variable that equals the product of operands."""
        return self._result(narrow_product, operands, name)

    def max(self, operands: Sequence[Variable | int], name: str = "max") -> Variable:
        """Add a variable that equals the largest operand."""
        return self._result(narrow_max, operands, name)

    def min(self, operands: Sequence[Variable | int], name: str = "min") -> Variable:
        """Add a variable that equals the smallest operand."""
        return self._result(narrow_min, operands, name)

    def sub(self, left: Variable | int, right: Variable | int, name: str = "difference") -> Variable:
        """Add a variable that equals left − right."""
        return self._result(narrow_difference, [left, right], name)

    def floordiv(self, left: Variable | int, right: Variable | int, name: str = "floordiv") -> Variable:
        """Add a variable that equals left / right, rounded down."""
        return self._result(narrow_floordiv, [left, right], name)

    def ceildiv(self, left: Variable | int, right: Variable | int, name: str = "ceildiv") -> Variable:
        """Add a variable that equals left / right, rounded up."""
        return self._result(narrow_ceildiv, [left, right], name)

    def mod(self, left: Variable | int, right: Variable | int, name: str = "mod") -> Variable:
        """Add a variable that equals left modulo right."""
        multiple = self.product([self.floordiv(left, right), right])
        remainder = self.sub(left, multiple, name)
        self.less(remainder, right)
        return remainder

    def call(
        self, operands: Sequence[Variable | int], f: Callable[[list[int]], int | None], name: str = "call"
    ) -> Variable:
        """Add a variable that equals the result of a Python function of operands.

        Args:
            operands: arguments of the function.
            f: function of a list of values, without side effects, since the search may call it several times with one
                list. It returns None if no solution has these values. `minimise` passes on its exceptions.
            name: name of the result.
        """

        def narrow(domains: Sequence[Domain]) -> Sequence[Domain]:
            if any(x.low != x.high for x in domains[:-1]):
                return domains
            value = f([x.low for x in domains[:-1]])
            return [
                *domains[:-1],
                Domain(1, 0) if value is None else Domain(*[_integer(value, f"result of {name}")] * 2),
            ]

        result = self.add_variable(name=name)
        variables = self._operands([*_operand_list(operands, name), result])
        self._constraints.append(_Constraint(narrow, variables))
        self._call_operands.update(variables[:-1])
        return result

    def less(self, left: Variable | int, right: Variable | int) -> None:
        """Constrain left < right."""
        self._constraints.append(_Constraint(partial(narrow_ordered, 1), self._operands([left, right])))

    def less_or_equal(self, left: Variable | int, right: Variable | int) -> None:
        """Constrain left ≤ right."""
        self._constraints.append(_Constraint(partial(narrow_ordered, 0), self._operands([left, right])))

    def equal(self, left: Variable | int, right: Variable | int) -> None:
        """Constrain left = right."""
        self._constraints.append(_Constraint(narrow_equal, self._operands([left, right])))

    def minimise(self, objectives: Variable | Sequence[Variable]) -> Solution:
        """Find the solution with the smallest objectives, in lexicographic order.

        Raises:
            InfeasibleModelError: there is no solution.
            SearchLimitError: the search needs more than `max_evaluations`.
        """
        variables = [objectives] if isinstance(objectives, Variable) else _operand_list(objectives, "minimise")
        indices = self._operands(variables)
        best = [MAX_VALUE + 1] * len(indices)
        values: list[int] = []
        search = _Search([*self._constraints, _better(best, indices)], len(self._domains), self._max_evaluations)
        all_constraints = range(len(search.constraints))
        nodes: list[tuple[list[Domain], Sequence[int]]] = [(self._domains, all_constraints)]
        while nodes:
            domains, changed = nodes.pop()
            narrowed = search.propagate(list(domains), [*changed, all_constraints[-1]])
            if narrowed is None:
                continue
            free = [i for i, x in enumerate(narrowed) if x.low != x.high]
            if not free:
                values = [x.low for x in narrowed]
                # The bound of branch and bound: only better solutions are searched from here on.
                search.constraints[-1] = _better([values[i] for i in indices], indices)
                continue
            # Calls narrow nothing until their operands have values, so that those come first.
            i = min(free, key=lambda i: (i not in self._call_operands, narrowed[i].high - narrowed[i].low))
            # The lower half is searched first, as it is pushed last: small values tend to be good in plans.
            middle = (narrowed[i].low + narrowed[i].high) // 2
            for half in (Domain(middle + 1, narrowed[i].high), Domain(narrowed[i].low, middle)):
                nodes.append(([*narrowed[:i], half, *narrowed[i + 1 :]], search.constraints_of[i]))
        if not values:
            raise InfeasibleModelError("the model has no solution", hint="fewer constraints, or wider domains")
        return Solution(dict(zip(self._variables, values, strict=True)))

    minimize = minimise  # as Poplar spells it

    def _result(self, narrow: Narrow, operands: Sequence[Variable | int], name: str) -> Variable:
        variables = self._operands(_operand_list(operands, name))
        # The result starts with the bound of its operands: halving 32 bits instead would take the search's limit.
        bound = narrow([*(self._domains[i] for i in variables), Domain(0, MAX_VALUE)])[-1]
        if bound.low > MAX_VALUE or bound.high < 0:
            got = f"{bound.low} … {bound.high}"
            raise ArgumentOverflowError(f"all values of {name} are out of range", expected=f"0 … {MAX_VALUE}", got=got)
        result = self.add_variable(max(0, bound.low), min(bound.high, MAX_VALUE), name)
        self._constraints.append(_Constraint(narrow, (*variables, result.index)))
        return result

    def _operands(self, operands: Sequence[Any]) -> tuple[int, ...]:
        return tuple(
            (x if isinstance(x, Variable) else self.add_constant(x)).index for x in map(self._check_model, operands)
        )

    def _check_model(self, x: Any) -> Any:
        if isinstance(x, Variable) and x not in self._variables[x.index : x.index + 1]:
            raise ArgumentTypeError(f"{x.name} belongs to another model", hint="use variables of one model")
        return x


class _Search:
    """State of a search: constraints, the numbers of those of each variable, and the evaluations left."""

    def __init__(self, constraints: Sequence[_Constraint], variables: int, max_evaluations: int) -> None:
        self.constraints = list(constraints)
        self.constraints_of: list[list[int]] = [[] for _ in range(variables)]
        self._max_evaluations = max_evaluations
        self._evaluations_left = max_evaluations
        for n, constraint in enumerate(constraints):
            for i in set(constraint.variables):
                self.constraints_of[i].append(n)

    def propagate(self, domains: list[Domain], changed: Sequence[int]) -> list[Domain] | None:
        """Narrow domains until no constraint narrows them further; return None if a domain has no values left."""
        queue = dict.fromkeys(changed)  # in order, each constraint once
        while queue:
            n = next(iter(queue))
            del queue[n]
            if self._evaluations_left <= 0:
                message = f"no solution was proved best in {self._max_evaluations} evaluations of constraints"
                raise SearchLimitError(message, hint="smaller domains, or Model(max_evaluations=…)")
            self._evaluations_left -= 1
            constraint = self.constraints[n]
            bounds = constraint.narrow([domains[i] for i in constraint.variables])
            for i, bound in zip(constraint.variables, bounds, strict=True):
                old = domains[i]
                domains[i] = Domain(max(old.low, bound.low), min(old.high, bound.high))
                if domains[i].low > domains[i].high:
                    return None
                if domains[i] != old:
                    queue.update(dict.fromkeys(self.constraints_of[i]))
        return domains


def _better(best: Sequence[int], indices: tuple[int, ...]) -> _Constraint:
    return _Constraint(partial(narrow_to_better, best), indices)


def _operand_list(operands: Sequence[Any], name: str) -> Sequence[Any]:
    if not isinstance(operands, Sequence):
        raise ArgumentTypeError(f"operands of {name}", expected="a list of variables", got=shortened(operands))
    if not operands:
        raise ArgumentValueError(f"{name} has no operands", expected="at least one")
    return operands


def _integer(value: Any, label: str) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ArgumentTypeError(label, expected="a variable or a whole number", got=shortened(value))
    if not 0 <= int(value) <= MAX_VALUE:
        raise ArgumentOverflowError(label, expected=f"0 … {MAX_VALUE}", got=value)
    return int(value)
