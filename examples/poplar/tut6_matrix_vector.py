"""Tutorial 6: matrix-vector multiplication with one vertex a row.

    python tut6_matrix_vector.py 40 50

Every vertex takes one row of the matrix and the whole vector, so the vector goes to every tile, and there may be fewer
rows than workers; tutorial 7 splits rows.
Source: Poplar & PopLibs user guide, tutorial 6.
"""

from __future__ import annotations

import argparse

import jax.numpy as jnp
import numpy as np

from ipujax import poplar
from ipujax.poplar.program import Copy, Execute, Sequence


class DotProductVertex(poplar.Vertex):
    """The dot product of two vectors."""

    a: poplar.Input[poplar.Vector[poplar.FLOAT]]
    b: poplar.Input[poplar.Vector[poplar.FLOAT]]
    out: poplar.Output[poplar.FLOAT]

    # Its parameters are the input fields; a vertex has no state, so there is no `self`.
    def compute(a, b):
        return jnp.dot(a, b)


def build_multiply_program(
    graph: poplar.Graph, matrix: poplar.Tensor, in_: poplar.Tensor, out: poplar.Tensor
) -> Sequence:
    """A program that writes `matrix` times `in_` to `out`: rows, and their vertices, spread over all tiles."""
    mul_cs = graph.add_compute_set("mulCS")
    num_rows = matrix.dim(0)
    num_tiles = graph.get_target().get_num_tiles()
    for row in range(num_rows):
        # A row, its vertex and its result are on one tile, so that only the vector is exchanged.
        tile = row * num_tiles // num_rows
        graph.set_tile_mapping(matrix[row], tile)
        graph.set_tile_mapping(out[row], tile)
        v = graph.add_vertex(mul_cs, "DotProductVertex", {"a": matrix[row], "b": in_, "out": out[row]})
        graph.set_tile_mapping(v, tile)
    graph.set_tile_mapping(in_, 0)
    return Sequence(Execute(mul_cs))


def run_on_host(
    graph: poplar.Graph,
    matrix: poplar.Tensor,
    in_: poplar.Tensor,
    out: poplar.Tensor,
    mul_prog: Sequence,
    device: poplar.Device,
) -> tuple[poplar.Engine, np.ndarray, np.ndarray]:
    """Streams a random matrix and vector in, runs a multiplication, and streams its result out.

    Returns:
        The engine, its product, and that of numpy; float32[num_rows] each.
    """
    in_matrix = graph.add_host_to_device_fifo("inputMatrix", poplar.FLOAT, matrix.num_elements())
    in_vector = graph.add_host_to_device_fifo("inputVector", poplar.FLOAT, in_.num_elements())
    out_stream = graph.add_device_to_host_fifo("out", poplar.FLOAT, out.num_elements())
    prog = Sequence(Copy(in_matrix, matrix), Copy(in_vector, in_), mul_prog, Copy(out, out_stream))

    rng = np.random.default_rng(0)
    h_matrix = rng.uniform(-1, 1, matrix.shape).astype(np.float32)
    h_input = rng.uniform(-1, 1, in_.shape).astype(np.float32)
    h_output = np.zeros(out.shape, np.float32)
    engine = poplar.Engine(graph, prog)
    engine.load(device)
    engine.connect_stream("inputMatrix", h_matrix)
    engine.connect_stream("inputVector", h_input)
    engine.connect_stream("out", h_output)

    print("Running graph program to multiply matrix by vector")
    engine.run(0)
    expected = h_matrix @ h_input
    is_right = np.allclose(h_output, expected, rtol=1e-4, atol=1e-4)
    print("Multiplication result OK" if is_right else "Multiplication result wrong")
    return engine, h_output, expected


def multiply(num_rows: int, num_cols: int, device: poplar.Device) -> tuple[np.ndarray, np.ndarray]:
    """Multiplies a random matrix by a random vector on a device; returns its product, and that of numpy."""
    print(f"Multiplying matrix of size {num_rows}x{num_cols} by vector of size {num_cols}")
    graph = poplar.Graph(device.get_target())
    graph.add_codelets(DotProductVertex)

    print("Constructing compute graph and control program")
    matrix = graph.add_variable(poplar.FLOAT, [num_rows, num_cols], "matrix")
    input_vector = graph.add_variable(poplar.FLOAT, [num_cols], "inputVector")
    output_vector = graph.add_variable(poplar.FLOAT, [num_rows], "outputVector")
    mul_prog = build_multiply_program(graph, matrix, input_vector, output_vector)
    _, result, expected = run_on_host(graph, matrix, input_vector, output_vector, mul_prog, device)
    return result, expected


def main() -> None:
    """Reads the size from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=int, nargs="?", default=40)
    parser.add_argument("cols", type=int, nargs="?", default=50)
    arguments = parser.parse_args()
    multiply(arguments.rows, arguments.cols, poplar.IPUModel().create_device())


if __name__ == "__main__":
    main()
