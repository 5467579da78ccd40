"""The 3 × 3 blur on one Mk1 as a convolution of PopLibs, of 4 channels to 4, cycles of a whole step."""

from __future__ import annotations

import jax.numpy as jnp

from fidelity_cases.case import Bar, Ends, Family, Row, errors, interval_of, profile_of
from ipujax import poplar, poplin
from ipujax.poplar.program import Copy, Execute, Program, Repeat, Sequence

_STEPS = 200
_CHANNELS = 4
_CLOCK_HZ = 1.6e9
# Seconds of 200 steps by columns, rows and type. The largest picture did not fit in float.
_PUBLISHED = {
    (499, 302, "half"): 0.00060595,
    (499, 302, "float"): 0.0016749,
    (768, 1024, "half"): 0.0016564,
    (768, 1024, "float"): 0.0063728,
    (2200, 1122, "half"): 0.0044717,
}
_TYPES = {"half": poplar.HALF, "float": poplar.FLOAT}


class PutSupervisorCSR(poplar.Vertex):
    """A control register of the tile, here a variable: a load, a `put` and a return."""

    register: poplar.Output[poplar.UNSIGNED_INT]
    language = "assembly"

    def compute():
        return jnp.uint32(0)

    def cycles(shapes, target):
        return 3


def set_floating_point_behaviour(graph: poplar.Graph, prog: Sequence) -> None:
    """Adds a compute set of a vertex on each tile, as the function of that name of Poplar does.

    Source: poplibs, which had it until 5e41cbe3: `lib/popsys/CSRFunctions.cpp` and `codelets/PutCSR.S`.
    """
    graph.add_codelets(PutSupervisorCSR)
    tiles = graph.get_target().get_num_tiles()
    registers = graph.add_variable(poplar.UNSIGNED_INT, [tiles], "FP_ICTL")
    compute_set = graph.add_compute_set("setFloatingPointBehaviour")
    for tile in range(tiles):
        graph.set_tile_mapping(registers[tile], tile)
        vertex = graph.add_vertex(compute_set, "PutSupervisorCSR", {"register": registers[tile]})
        graph.set_tile_mapping(vertex, tile)
    prog.add(Execute(compute_set))


def program(target: poplar.Target, columns: int, rows: int, name: str) -> tuple[poplar.Graph, Program]:
    """One step: the floating-point behaviour, the convolution, and the copy of its result to the picture."""
    graph = poplar.Graph(target)
    window = {"kernel_shape": (3, 3), "padding_lower": (1, 1), "padding_upper": (1, 1)}
    params = poplin.ConvParams(
        _TYPES[name],
        batch_size=1,
        input_field_shape=(rows, columns),
        input_channels_per_conv_group=_CHANNELS,
        output_channels_per_conv_group=_CHANNELS,
        **window,
    )
    picture = poplin.create_input(graph, params)
    weights = poplin.create_weights(graph, params)
    step = Sequence()
    set_floating_point_behaviour(graph, step)
    step.add(Copy(poplin.convolution(graph, picture, weights, params, step), picture))
    return graph, step


def step_cycles(columns: int, rows: int, name: str) -> tuple[float, Ends]:
    """Cycles of one step on the simulated machine, and their interval."""
    graph, step = program(poplar.IPUModel("ipu1").create_device().get_target(), columns, rows, name)
    profile = profile_of(graph, Repeat(_STEPS, step))
    return profile.cycles / _STEPS, interval_of(profile)


def family() -> Family:
    """Every published picture."""
    rows = []
    for (columns, height, name), seconds in _PUBLISHED.items():
        simulated, interval = step_cycles(columns, height, name)
        measured = round(seconds * _CLOCK_HZ / _STEPS)
        rows.append(Row(f"{columns:,} × {height:,}, {name}", measured, round(simulated), 0.1, interval=interval))
    bar = Bar("mean error", float(errors(rows).mean()), 0.1)
    source = (
        "lbm-graphcore, main/GaussianBlurPoplibs.cpp and experiments/effect-of-mem-on-convolution/results.csv, one Mk1 "
        "by its cycle counter (reference B5)."
    )
    how = (
        "`setFloatingPointBehaviour`, a vertex on each tile; `poplin.create_input`, `create_weights` and `convolution` "
        "of 4 channels to 4; and a copy of the result to the picture. Nothing is fitted to these rows."
    )
    return Family("Convolution 3 × 3 on one Mk1", source, how, rows, (bar,))
