"""Tutorial 7: matrix-vector multiplication with each row split into the number of segments of least cost.

    python tut7_matrix_vector_opt.py 10000 1000 --arch ipu1

Each vertex multiplies one segment of one row; a second compute set adds the partial sums of each row. The number
of segments is that of least estimated cycles of the slowest tile: of its vertices, which six workers share, and of the
data that it receives. The host side is as in tutorial 6.
Source: Poplar & PopLibs user guide, tutorial 7, which prints 5 segments and 4751 cycles for this size on an ipu1.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from tut6_matrix_vector import run_on_host

from ipujax import poplar
from ipujax.poplar.program import Execute, Sequence

ELEMENTS_PER_CYCLE = 2  # a vector of 64 bits holds two floats
VERTEX_OVERHEAD_CYCLES = 5  # with this the estimates are those the guide prints


def vertex_cycles(num_elements: int) -> int:
    """Cycles of a worker that multiplies or adds this many elements."""
    return -(-num_elements // ELEMENTS_PER_CYCLE) + VERTEX_OVERHEAD_CYCLES


class DotProductVertex(poplar.Vertex):
    """The dot product of two vectors."""

    a: poplar.Input[poplar.Vector[poplar.FLOAT]]
    b: poplar.Input[poplar.Vector[poplar.FLOAT]]
    out: poplar.Output[poplar.FLOAT]

    def compute(a, b):
        return jnp.dot(a, b)

    def cycles(shapes, target):
        return vertex_cycles(shapes["a"][0])


class ReduceVertex(poplar.Vertex):
    """The sum of a vector."""

    in_: poplar.Input[poplar.Vector[poplar.FLOAT]]
    out: poplar.Output[poplar.FLOAT]

    def compute(in_):
        return jnp.sum(in_)

    def cycles(shapes, target):
        return vertex_cycles(shapes["in"][0])


@dataclass(frozen=True)
class Estimate:
    """Cycles of the slowest tile, by phase, for one number of segments."""

    split: int
    compute: int
    exchange: int
    reduce_exchange: int
    reduce_compute: int

    @property
    def total(self) -> int:
        return self.compute + self.exchange + self.reduce_exchange + self.reduce_compute


def divide(number: int, by: int) -> int:
    """Quotient, rounded up."""
    return -(-number // by)


def estimate_cycles(target: poplar.Target, num_rows: int, num_cols: int, split: int) -> Estimate:
    """Estimated cycles of multiplying with rows in `split` segments."""
    tiles = target.get_num_tiles()
    workers = target.get_num_worker_contexts()
    floats_per_cycle = target.get_exchange_bytes_per_cycle() / target.get_type_size(poplar.FLOAT)
    segment = divide(num_cols, split)
    vertices_a_worker = divide(divide(num_rows * split, tiles), workers)
    rows_a_tile = divide(num_rows, tiles)
    return Estimate(
        split,
        compute=vertices_a_worker * workers * vertex_cycles(segment),
        exchange=round(segment / floats_per_cycle),
        reduce_exchange=round(rows_a_tile * split / floats_per_cycle),
        reduce_compute=divide(rows_a_tile, workers) * workers * vertex_cycles(split),
    )


def best_and_worst_split(target: poplar.Target, num_rows: int, num_cols: int) -> tuple[Estimate, Estimate]:
    """The cheapest and the dearest number of segments."""
    estimates = [estimate_cycles(target, num_rows, num_cols, split) for split in range(1, max(2, num_cols))]
    return min(estimates, key=lambda e: e.total), max(estimates, key=lambda e: e.total)


def build_multiply_program(
    graph: poplar.Graph, matrix: poplar.Tensor, in_: poplar.Tensor, out: poplar.Tensor, split: int
) -> Sequence:
    """A program that writes `matrix` times `in_` to `out`, with rows in `split` segments."""
    (num_rows, num_cols) = matrix.shape
    num_tiles = graph.get_target().get_num_tiles()
    partials = graph.add_variable(poplar.FLOAT, [num_rows, split], "partials")

    # Tiles take vertices of one segment after those of another, so that most receive one segment of the vector.
    mul_cs = graph.add_compute_set("mulCS")
    per_tile = divide(num_rows * split, num_tiles)
    for i in range(split):
        begin = i * num_cols // split
        end = (i + 1) * num_cols // split
        segment = in_.slice(begin, end)
        graph.set_tile_mapping(segment, i * num_rows // per_tile)
        for row in range(num_rows):
            tile = (i * num_rows + row) // per_tile
            row_segment = matrix[row, begin:end]
            v = graph.add_vertex(mul_cs, "DotProductVertex", {"a": row_segment, "b": segment, "out": partials[row, i]})
            graph.set_tile_mapping(v, tile)
            graph.set_tile_mapping(row_segment, tile)
            graph.set_tile_mapping(partials[row, i], tile)

    reduce_cs = graph.add_compute_set("reduceCS")
    rows_a_tile = divide(num_rows, num_tiles)
    for row in range(num_rows):
        v = graph.add_vertex(reduce_cs, "ReduceVertex", {"in": partials[row], "out": out[row]})
        graph.set_tile_mapping(v, row // rows_a_tile)
        graph.set_tile_mapping(out[row], row // rows_a_tile)
    return Sequence(Execute(mul_cs), Execute(reduce_cs))


def print_choice(best: Estimate, worst: Estimate) -> None:
    """Prints the estimates as the guide shows them."""
    print("Best split chosen:")
    print(f"colsAxisSplit={best.split}, total cost={best.total} (compute cost={best.compute}, ", end="")
    print(f"exchange cost={best.exchange}, reduce exchange cost={best.reduce_exchange}, ", end="")
    print(f"reduce compute cost={best.reduce_compute})")
    print(f"Worst cost seen: {worst.total}")


def multiply(num_rows: int, num_cols: int, device: poplar.Device) -> tuple[np.ndarray, np.ndarray, int]:
    """Multiplies a random matrix by a random vector on a device.

    Returns:
        The product of the device, that of numpy (float32[num_rows] each), and the cycles without host exchange.
    """
    print(f"Multiplying matrix of size {num_rows}x{num_cols} by vector of size {num_cols}")
    graph = poplar.Graph(device.get_target())
    graph.add_codelets([DotProductVertex, ReduceVertex])

    print("Constructing compute graph and control program")
    matrix = graph.add_variable(poplar.FLOAT, [num_rows, num_cols], "matrix")
    input_vector = graph.add_variable(poplar.FLOAT, [num_cols], "inputVector")
    output_vector = graph.add_variable(poplar.FLOAT, [num_rows], "outputVector")
    best, worst = best_and_worst_split(graph.get_target(), num_rows, num_cols)
    print_choice(best, worst)
    mul_prog = build_multiply_program(graph, matrix, input_vector, output_vector, best.split)

    engine, result, expected = run_on_host(graph, matrix, input_vector, output_vector, mul_prog, device)
    phases = engine.profile.phase_cycles
    cycles = sum(cycles for phase, cycles in phases.items() if phase != "host_exchange")
    print(f"Program cycles: {cycles}, without host exchange")
    return result, expected, cycles


def main() -> None:
    """Reads size and machine from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=int, nargs="?", default=1000)
    parser.add_argument("cols", type=int, nargs="?", default=100)
    parser.add_argument("--arch", default="ipu2", help="ipu1, ipu2 or ipu21")
    arguments = parser.parse_args()
    # Syncs take no time, as in the model of the tutorial.
    multiply(arguments.rows, arguments.cols, poplar.IPUModel(arguments.arch, min_ipu_sync_delay=0).create_device())


if __name__ == "__main__":
    main()
