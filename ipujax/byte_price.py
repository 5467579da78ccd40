"""The price of a byte on the fullest tile: planners weigh it against cycles, and it climbs until a program fits.

Input: a program planned at the first price, and what plans it at another. Output: the program of the first price of
`BYTE_PRICES` at which it fits its tiles, compiled. A price that is given stays, and so does the first where nothing has
to fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol, TypeVar

from ipujax.runtime.compile import Executable, compile
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.graph import BYTE_PRICE_CYCLES, Graph, Program
from ipujax.runtime.memory import MemoryReport, check_memory, fits, least_bytes
from ipujax.runtime.options import Options

BYTE_PRICES = (BYTE_PRICE_CYCLES, 1.0, 2.0, 4.0, 8.0, 16.0)


class Planned(Protocol):
    """A graph and its program."""

    @property
    def graph(self) -> Graph: ...
    @property
    def program(self) -> Program: ...


P = TypeVar("P", bound=Planned)


def compile_fitting(first: P, at_price: Callable[[float], P], options: Options) -> tuple[P, Executable]:
    """Compiles a program at the first price at which it fits.

    Args:
        first: the program at the price of the options, or at the first of `BYTE_PRICES`.
        at_price: plans it at another price.
        options: what the user chose.

    Returns:
        The program as it is planned, and compiled.

    Raises:
        TileMemoryError: if it fits at no price; that of the first whose fullest tile is smallest.
    """
    if options.byte_price is not None or options.allow_out_of_memory:
        return first, compile(first.graph, first.program, options=options)
    start, planned = time.perf_counter(), first
    executable = compile(first.graph, first.program, options=options, check=fits)
    if fits(executable.memory):
        return first, executable
    first_cycles, too_large = _static_cycles(executable), [executable.memory]
    for count, price in enumerate(BYTE_PRICES[1:], 2):
        seconds, planned = time.perf_counter() - start, at_price(price)
        executable = compile(planned.graph, planned.program, options=options, check=fits)
        if fits(executable.memory):
            cycles, timings = _static_cycles(executable), {"prices": seconds, **executable.timings}
            return planned, replace(
                executable,
                byte_prices=BYTE_PRICES[:count],
                byte_price_cost_cycles=None if cycles is None or first_cycles is None else cycles - first_cycles,
                timings=MappingProxyType(timings),
            )
        too_large.append(executable.memory)
    smallest = _smallest(too_large)
    check_memory(too_large[smallest], BYTE_PRICES, BYTE_PRICES[smallest])
    raise AssertionError("it does not fit")


def _smallest(reports: Sequence[MemoryReport]) -> int:
    """The number of the report whose fullest tile is smallest, the first of equals; as few as can be are packed."""
    least = [int(least_bytes(report).max()) for report in reports]
    first, *others = sorted(range(len(reports)), key=least.__getitem__)
    best = reports[first].max_tile_bytes, first
    for number in others:
        if least[number] > best[0]:
            break
        best = min(best, (reports[number].max_tile_bytes, number))
    return best[1]


def _static_cycles(executable: Executable) -> int | None:
    """Cycles of one run; None where loops run as often as their data says."""
    try:
        return executable.timeline_of(None).cycles
    except ProfileError:
        return None
