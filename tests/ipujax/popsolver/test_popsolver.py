"""popsolver finds the solutions of exhaustive search, and refuses models without one and numbers out of range."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from math import prod

import pytest

import ipujax as ipu
from ipujax import popsolver
from ipujax.popsolver import MAX_VALUE, InfeasibleModelError, SearchLimitError
from ipujax.popsolver.solver import Domain, narrow_ordered


def called(values: Sequence[int]) -> int | None:
    """A function without structure, undefined for some values."""
    mixed = (7 * values[0] + 5 * values[-1] ** 2 + 3) % 11
    return None if mixed == 4 else mixed


def quotient(values: Sequence[int]) -> int | None:
    return values[0] // values[1] if values[1] else None


# Operation → the same in Python; None: these values are of no solution.
MANY: dict[str, Callable[[Sequence[int]], int | None]] = {"sum": sum, "product": prod, "max": max, "min": min}
PAIRS: dict[str, Callable[[Sequence[int]], int | None]] = {
    "sub": lambda values: values[0] - values[1] if values[0] >= values[1] else None,
    "floordiv": quotient,
    "ceildiv": lambda values: -(-values[0] // values[1]) if values[1] else None,
    "mod": lambda values: values[0] % values[1] if values[1] else None,
}
RELATIONS = {
    "less": lambda left, right: left < right,
    "less_or_equal": lambda left, right: left <= right,
    "equal": lambda left, right: left == right,
}


class RandomModel:
    """A model of up to 6 variables, and the same as Python functions of their values."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.model = popsolver.Model()
        self.domains = []
        for _ in range(draw.randint(1, 6)):
            low = draw.choice([0, 0, 1, 2, 3])
            self.domains.append(range(low, low + draw.randint(1, 4)))
        self.found = [self.model.add_variable(d[0], d[-1]) for d in self.domains]
        self.results: list[tuple[Callable[[Sequence[int]], int | None], list[int]]] = []
        self.relations: list[tuple[str, int, int]] = []
        self.constants: dict[int, int] = {}
        for _ in range(draw.randint(1, 5)):
            self.add_result(draw)
        for _ in range(draw.randint(0, 2)):
            relation, left, right = draw.choice(list(RELATIONS)), *draw.choices(range(len(self.found)), k=2)
            getattr(self.model, relation)(self.found[left], self.found[right])
            self.relations.append((relation, left, right))
        self.objectives = draw.sample(range(len(self.found)), draw.randint(1, min(3, len(self.found))))

    def add_result(self, draw: random.Random) -> None:
        name = draw.choice([*MANY, *PAIRS, "call"])
        operands = draw.choices(range(len(self.found)), k=2 if name in PAIRS else draw.randint(1, 3))
        variables = [self.found[i] for i in operands]
        add = getattr(self.model, name)
        try:
            match name:
                case "call":
                    result = add(variables, called)
                case _ if name in PAIRS:
                    result = add(*variables)
                case _:
                    result = add(variables)
        except ipu.ArgumentError:  # a difference that is always negative
            assert name == "sub"
            return
        self.found.append(result)
        self.results.append(({**MANY, **PAIRS, "call": called}[name], operands))

    def exhaustive(self) -> list[tuple[int, ...]]:
        """All solutions, by the values of all variables."""
        solutions = []
        for values in product(*self.domains):
            every: list[int] = list(values)
            for fun, operands in self.results:
                result = fun([every[i] for i in operands])
                if result is None:
                    break
                every.append(result)
            else:
                if all(RELATIONS[name](every[left], every[right]) for name, left, right in self.relations):
                    solutions.append(tuple(every))
        return solutions


def test_solutions_are_those_of_exhaustive_search():
    infeasible = 0
    for seed in range(200):
        case = RandomModel(seed)
        solutions = case.exhaustive()
        if not solutions:
            infeasible += 1
            with pytest.raises(InfeasibleModelError):
                case.model.minimise([case.found[i] for i in case.objectives])
            continue
        solution = case.model.minimise([case.found[i] for i in case.objectives])
        values = tuple(solution[x] for x in case.found)
        assert values in solutions, seed
        best = min(tuple(every[i] for i in case.objectives) for every in solutions)
        assert tuple(values[i] for i in case.objectives) == best, seed
    assert 20 < infeasible < 120


def test_wide_domains_are_narrowed():
    m = popsolver.Model(max_evaluations=500)
    x = m.add_variable()
    y = m.add_variable()
    m.equal(m.product([x, y]), 77_777)
    m.equal(m.sum([x, y]), 558)
    m.less(x, y)
    solution = m.minimize(x)
    assert (solution[x], solution[y]) == (271, 287)


def test_models_without_solution():
    m = popsolver.Model(max_evaluations=1_000)
    x = m.add_variable(0, 9)
    y = m.add_variable(0, 9)
    m.less(x, y)
    m.less(y, x)
    with pytest.raises(InfeasibleModelError, match="no solution"):
        m.minimise(x)
    m = popsolver.Model()
    quotient = m.floordiv(m.add_variable(3, 5), m.add_variable(0, 0))
    with pytest.raises(InfeasibleModelError):
        m.minimise(quotient)
    assert issubclass(InfeasibleModelError, ipu.IpuError) and issubclass(InfeasibleModelError, ValueError)


def test_a_solution_has_the_variables_of_its_model():
    m = popsolver.Model()
    x = m.add_variable(2, 9, "x")
    solution = m.minimise(x)
    assert solution[x] == 2
    for other in (popsolver.Model().add_variable(0, 3, "foreign"), m.add_variable(0, 3, "later"), "x", 0, [x]):
        with pytest.raises(ipu.ArgumentError, match="variables of its model"):
            solution[other]


def test_a_search_is_bounded():
    m = popsolver.Model(max_evaluations=1_000)
    x = m.add_variable()
    y = m.add_variable()
    m.less(x, y)
    m.less(y, x)
    none = popsolver.Model(max_evaluations=-1)
    with pytest.raises(SearchLimitError, match="-1 evaluations"):
        none.minimise(none.add_variable(0, 5))
    with pytest.raises(SearchLimitError, match="1000 evaluations"):
        m.minimise(x)


def test_domains_and_numbers_out_of_range():
    m = popsolver.Model()
    x = m.add_variable(1, MAX_VALUE, "x")
    for low, high in ((-1, 3), (0, MAX_VALUE + 1)):
        with pytest.raises(OverflowError, match="4294967295"):
            m.add_variable(low, high)
    with pytest.raises(ValueError, match="rows has no values"):
        m.add_variable(4, 3, "rows")
    for overflow in (
        lambda: m.sum([x, MAX_VALUE]),
        lambda: m.product([m.add_constant(1 << 16)] * 2),
        lambda: m.sub(0, x),
    ):
        with pytest.raises(ipu.ArgumentError, match="all values of") as caught:
            overflow()
        assert isinstance(caught.value, OverflowError)
    assert m.minimise(m.sum([x, MAX_VALUE - 1]))[x] == 1  # greater values of x are of no solution


@pytest.mark.parametrize("value", [MAX_VALUE + 1, -1])
def test_results_of_functions_out_of_range(value):
    m = popsolver.Model()
    result = m.call([m.add_constant(1)], lambda values: value, "cycles")
    with pytest.raises(OverflowError, match="result of cycles"):
        m.minimise(result)


def test_exceptions_of_functions_reach_the_caller():
    m = popsolver.Model()
    result = m.call([m.add_variable(0, 3)], lambda values: 1 // values[0])
    with pytest.raises(ZeroDivisionError):
        m.minimise(result)


def test_wrong_operands():
    m = popsolver.Model()
    other = popsolver.Model()
    x = m.add_variable(0, 3, "x")
    y = other.add_variable(0, 3, "y")
    for wrong in (1.5, True, None, "x"):
        with pytest.raises(TypeError, match="whole number"):
            m.less(x, wrong)
    with pytest.raises(TypeError, match="y belongs to another model"):
        m.sum([x, y])
    with pytest.raises(TypeError, match="a list of variables"):
        m.sum(x)
    with pytest.raises(ValueError, match="no operands"):
        m.max([])
    with pytest.raises(ValueError, match="no operands"):
        m.minimise([])
    with pytest.raises(TypeError, match="whole number"):
        m.minimise(m.call([x], lambda values: 0.5))


def test_an_order_narrows_both_operands():
    domains = [Domain(3, 9), Domain(0, 7)]
    assert narrow_ordered(1, domains) == [Domain(0, 6), Domain(4, MAX_VALUE)]
