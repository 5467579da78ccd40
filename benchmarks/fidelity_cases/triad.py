"""STREAM triad on every tile of an Mk2: how much of the memory port hand-written code uses."""

from __future__ import annotations

from fidelity_cases.case import Bar, Ends, Family, Row, interval_of, of_rate, profile_of
from ipujax import poplar
from ipujax.poplar.program import Execute, Program, Sequence

_FLOATS = 48_000  # of each of three arrays on a tile: 576,000 of 638,976 bytes
_SCALE = 3.0  # as STREAM has it
_SETUP_CYCLES = 20  # assumed: a worker's entry, pointers, and the ends of its loop
_BYTES_OF_ONE = 12  # of two arrays read and one written
_PUBLISHED = 0.991


class TriadVertex(poplar.Vertex):
    """`a = b + scale · c` by a worker: one instruction that loads and stores, with one that computes beside it."""

    b: poplar.Input[poplar.Vector[poplar.FLOAT]]
    c: poplar.Input[poplar.Vector[poplar.FLOAT]]
    a: poplar.Output[poplar.Vector[poplar.FLOAT]]

    def compute(b, c):
        return b + _SCALE * c

    def cycles(shapes, target):
        port = target.load_bytes_per_cycle + target.store_bytes_per_cycle
        return _SETUP_CYCLES + -(-_BYTES_OF_ONE * shapes["a"][0] // port)


def program(target: poplar.Target, floats: int) -> tuple[poplar.Graph, dict[str, poplar.Tensor], Program]:
    """The triad with arrays of so many floats on each tile, shared evenly by its workers."""
    tiles = target.get_num_tiles()
    workers = target.get_num_worker_contexts()
    graph = poplar.Graph(target)
    graph.add_codelets(TriadVertex)
    compute_set = graph.add_compute_set("triad")
    arrays = {name: graph.add_variable(poplar.FLOAT, [tiles, workers, floats // workers], name) for name in "abc"}
    for tile in range(tiles):
        for array in arrays.values():
            graph.set_tile_mapping(array[tile], tile)
        for worker in range(workers):
            fields = {name: array[tile, worker] for name, array in arrays.items()}
            graph.set_tile_mapping(graph.add_vertex(compute_set, "TriadVertex", fields), tile)
    return graph, arrays, Sequence(Execute(compute_set))


def share(tiles: int | None = None) -> tuple[float, Ends]:
    """Share of the port's capacity in the compute phase that moves bytes, and its interval; on all tiles when None."""
    target = poplar.IPUModel("ipu2", tiles_per_ipu=tiles).create_device().get_target()
    graph, _, triad = program(target, _FLOATS)
    port = target.load_bytes_per_cycle + target.store_bytes_per_cycle
    profile = profile_of(graph, triad)
    value = _BYTES_OF_ONE * _FLOATS / (port * profile.phase_cycles["compute"])
    return value, of_rate(interval_of(profile, ("compute",)))


def family() -> Family:
    """The share of the port."""
    simulated, interval = share()
    row = Row("share of the port", 100 * _PUBLISHED, 100 * simulated, unit="%", interval=interval)
    bar = Bar("difference of the shares", abs(simulated - _PUBLISHED), 0.02)
    source = "wave (SciCoLab/WaveEquation-IPU, STREAMTriad): 46.55 TB/s on Mk2, 99.1 % of the port (reference A1)."
    how = (
        "One vertex on each worker, with arrays of 48,000 floats on a tile. An instruction makes two loads and a "
        f"store, 24 bytes; the start of a vertex takes {_SETUP_CYCLES} cycles (assumed)."
    )
    return Family("STREAM triad, float, on every tile of an Mk2", source, how, [row], (bar,))
