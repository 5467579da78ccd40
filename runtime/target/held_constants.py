"""Constants over which a program is held: machines that differ in no others run the same program.

Input: targets. Output: names of constants, and a target with some constants of another. `target.constant` says of each
field whether programs are held over it.
"""

from __future__ import annotations

import dataclasses

from ipujax.runtime.target.target import PartOf, Target


def constants_of(*parts: PartOf) -> tuple[str, ...]:
    """Return the names of the constants that are part of "rates", "counts" or "program"."""
    return tuple(item.name for item in dataclasses.fields(Target) if item.metadata.get("part_of") in parts)


def perturbed_constants(target: Target) -> tuple[str, ...]:
    """Return the constants that are numbers, rates and not 0."""
    rates = constants_of("rates")
    items = (item for item in dataclasses.fields(Target) if item.name in rates and item.type in ("int", "float"))
    return tuple(item.name for item in items if getattr(target, item.name))


def held_constants() -> tuple[str, ...]:
    """Return the names of the constants over which programs are held."""
    return constants_of("rates", "counts")


def program_constants() -> tuple[str, ...]:
    """Return the names of the constants that a program depends on: on another value it is compiled again."""
    return constants_of("program")


def program_changes(before: Target, after: Target) -> tuple[str, ...]:
    """Return the constants of two targets that differ, and over which no program is held."""
    return tuple(name for name in program_constants() if getattr(before, name) != getattr(after, name))


def held_over(target: Target, machine: Target) -> Target:
    """Return a target with those constants of another machine, and their sources, over which programs are held."""
    names = held_constants()
    sources = {**target.sources, **{name: machine.sources[name] for name in names}}
    return dataclasses.replace(target, **{name: getattr(machine, name) for name in names}, sources=sources)
