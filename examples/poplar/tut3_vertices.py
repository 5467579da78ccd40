"""Tutorial 3: a codelet, a compute set, and vertices connected by hand.

Each of four vertices, on a tile of its own, sums a suffix of v1 into one element of v2.
Source: Poplar & PopLibs user guide, tutorial 3.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ipujax import poplar
from ipujax.poplar.program import Copy, Execute, PrintTensor, Sequence


class SumVertex(poplar.Vertex):
    """Sums the elements of its input."""

    in_: poplar.Input[poplar.Vector[poplar.FLOAT]]  # connected as "in": the underscore avoids Python's keyword
    out: poplar.Output[poplar.FLOAT]

    def compute(in_):
        return jnp.sum(in_)


def main() -> np.ndarray:
    """Runs the tutorial; returns v2."""
    device = poplar.IPUModel().create_device()
    graph = poplar.Graph(device.get_target())
    graph.add_codelets(SumVertex)

    v1 = graph.add_variable(poplar.FLOAT, [4], "v1")
    v2 = graph.add_variable(poplar.FLOAT, [4], "v2")
    for i in range(4):
        graph.set_tile_mapping(v1[i], i)
        graph.set_tile_mapping(v2[i], i)

    prog = Sequence()
    c1 = graph.add_constant(poplar.FLOAT, [4], [1.0, 1.5, 2.0, 2.5], "c1")
    graph.set_tile_mapping(c1, 0)
    prog.add(Copy(c1, v1))

    compute_set = graph.add_compute_set("computeSet")
    for i in range(4):
        vtx = graph.add_vertex(compute_set, "SumVertex")
        graph.connect(vtx["in"], v1.slice(i, 4))
        graph.connect(vtx["out"], v2[i])
        graph.set_tile_mapping(vtx, i)
        graph.set_cycle_estimate(vtx, 20)

    prog.add(Execute(compute_set))
    prog.add(PrintTensor("v2", v2))
    graph.create_host_read("v2-read", v2)

    engine = poplar.Engine(graph, prog)
    engine.load(device)
    engine.run(0)
    return engine.read_tensor("v2-read")


if __name__ == "__main__":
    main()
