"""More memory never breaks or slows a program: if it fits tiles of one size, it fits larger ones, in as few cycles.

Attempts do not depend on the memory of a tile, which is a claim of its own. So each is planned and compiled once, and
only the search among them runs for each size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

import ipujax as ipu
from ipujax import fit
from ipujax.fit import ATTEMPTS, Choice
from ipujax.lowering_plan.planned_program import planned_program
from ipujax.runtime.compile import Executable, compile as compile_now
from ipujax.runtime.graph.listing import listing
from ipujax.runtime.target import Target
from tests.ipujax import memory_programs as programs
from tests.ipujax.memory_programs import Program

KIB = 1024
MAX_RATIO = 1.02  # of cycles to the fewest on smaller tiles
TILES = 64
SIZES = range(64 * KIB, 1025 * KIB, 8 * KIB)
SMALL_SIZES = range(8 * KIB, 145 * KIB, 4 * KIB)

Found = tuple[int, Choice] | None  # cycles of the program that fits, and its parameters

# Name → program, tiles of an IPU, interleaved offset in KiB, sizes of a tile; the first ones run each time.
CASES: dict[str, tuple[Callable[[], Program], int, int, range]] = {
    "small chain": (partial(programs.chain, 4, 64, 64), 16, 8, SMALL_SIZES),
    "small loop": (partial(programs.loop, 96, 32, 64), 8, 8, SMALL_SIZES),
    "small mlp": (partial(programs.mlp, (256, 128, 10), 64), 8, 32, SMALL_SIZES),
    **{
        f"{name}, offset {offset}": (getattr(programs, name), TILES, offset, SIZES)
        for name in ("gpt_block", "cnn", "chain", "attention", "mlp", "lstm", "pipeline", "replicas")
        for offset in (32, 64)
    },
    "long rows": (partial(programs.chain, 12, 128, 1024), TILES, 32, SIZES),
    "wide attention": (partial(programs.attention, 256, 64, 8, 8), TILES, 32, SIZES),
    "gpt_block of 16 tiles": (partial(programs.gpt_block, 32, 32, 2), 16, 32, SIZES),
}
FAST = ("small chain",)


def _duplicate(value: Any) -> Any:
    """Return a copy of what refuses to be copied: only the figures of the copy are read."""
    duplicate = object.__new__(type(value))
    vars(duplicate).update(vars(value))
    return duplicate


def on_tiles_of(executable: Executable, target: Target) -> Executable:
    """Return a compiled program with the limits of another machine."""
    graph, memory = (_duplicate(each) for each in (executable.graph, executable.memory))
    graph.target = target
    vars(memory)["target"] = target
    return replace(executable, graph=graph, memory=memory)


def search(program: Program, tiles: int, offset: int, sizes: Iterable[int], monkeypatch: Any) -> list[Found]:
    """Return the program that `compile_fitting` chooses for each size of a tile."""

    def target_of(size: int) -> Target:
        machine = ipu.IPUModel(
            program.num_ipus, tiles_per_ipu=tiles, bytes_per_tile=size, interleaved_offset_bytes=offset * KIB
        )
        return machine.target

    machine = ipu.IPUModel(program.num_ipus, tiles_per_ipu=tiles, interleaved_offset_bytes=offset * KIB)
    first = planned_program(ipu.jit(program.fun, device=machine, **program.jit).lower(*program.args).plan)
    one_replica = first.graph.target.num_ipus
    plan = cache(partial(planned_program, first.plan))
    compiled: dict[Any, Executable] = {}
    actual = list[Found]()
    for size in sizes:
        target = target_of(size).replace(num_ipus=one_replica)

        def compile_for_size(graph: Any, *args: Any, target: Target = target, **keywords: Any) -> Executable:
            if graph not in compiled:
                compiled[graph] = compile_now(graph, *args, **{**keywords, "check": lambda report: None})
            return on_tiles_of(compiled[graph], target)

        monkeypatch.setattr(fit, "compile", compile_for_size)
        try:
            planned, executable = fit.compile_fitting(first, plan, ipu.Options())
            actual.append((executable.timeline_of(None).cycles, planned.choice))
        except ipu.TileMemoryError:
            actual.append(None)
    return actual


@pytest.mark.parametrize("name", CASES)
def test_memory_monotone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, tiles, offset, sizes = CASES[name]
    actual = search(program(), tiles, offset, sizes, monkeypatch)
    fitting = [each for each in actual if each is not None]
    assert fitting and actual[-len(fitting) :] == fitting, "what fits at one size fits at every larger one"
    cycles = [each[0] for each in fitting]
    for number, of_larger in enumerate(cycles):
        assert of_larger <= MAX_RATIO * min(cycles[: number + 1])
    if name in FAST:  # otherwise nothing is shown
        assert len(dict.fromkeys(fitting)) > 1 and None in actual


@pytest.mark.parametrize("name", ("small mlp", "pipeline, offset 32"))
def test_memory_monotone_attempts_do_not_depend_on_the_size(name: str) -> None:
    """Programs, cycles and bytes of the first attempt and the last are the same on tiles of all sizes."""
    program, tiles, offset, _ = CASES[name]
    inputs = program()
    figures = list[Any]()
    for size in (8 * KIB, 64 * KIB, 624 * KIB, 2048 * KIB):
        machine = ipu.IPUModel(
            inputs.num_ipus, tiles_per_ipu=tiles, bytes_per_tile=size, interleaved_offset_bytes=offset * KIB
        )
        first = ipu.jit(inputs.fun, device=machine, **inputs.jit).lower(*inputs.args)
        for byte_cost, tile_bytes in (ATTEMPTS[0], ATTEMPTS[-1]):
            planned = planned_program(first.plan, replace(first.choice, byte_cost=byte_cost, tile_bytes=tile_bytes))
            executable = compile_now(planned.graph, planned.program, check=lambda report: None)
            cycles = executable.timeline_of(None).cycles
            figures.append((listing(planned.graph, planned.program), cycles, executable.memory.tile_bytes.tolist()))
    assert figures[2:] == figures[:-2]
    assert figures[0] != figures[1]
