"""Tutorial 2: operations of the libraries on tensors and on views of them.

`PrintTensor` prints to the standard error stream.
Source: Poplar & PopLibs user guide, tutorial 2.
"""

from __future__ import annotations

from ipujax import poplar, popops
from ipujax.poplar.program import Copy, PrintTensor, Sequence


def main() -> poplar.Engine:
    """Runs the tutorial; returns the engine."""
    device = poplar.IPUModel().create_device()
    graph = poplar.Graph(device.get_target())
    popops.add_codelets(graph)

    v1 = graph.add_variable(poplar.FLOAT, [2, 2], "v1")
    v2 = graph.add_variable(poplar.FLOAT, [2, 2], "v2")
    for i in range(2):
        for j in range(2):
            graph.set_tile_mapping(v1[i][j], i * 2 + j)
            graph.set_tile_mapping(v2[i][j], i * 2 + j)
    c1 = graph.add_constant(poplar.FLOAT, [4], [1.0, 1.5, 2.0, 2.5])
    c2 = graph.add_constant(poplar.FLOAT, [4], [4.0, 3.0, 2.0, 1.0])
    graph.set_tile_mapping(c1, 0)
    graph.set_tile_mapping(c2, 0)

    prog = Sequence()
    prog.add(Copy(c1, v1.flatten()))
    prog.add(Copy(c2, v2.flatten()))

    v3 = popops.add(graph, v1, v2, prog, "Add")
    prog.add(PrintTensor("v3", v3))
    v4 = popops.add(graph, v3, v2, prog, "Add")
    prog.add(PrintTensor("v4", v4))
    v5 = popops.add(graph, v1, v2.transpose(), prog, "Add")
    prog.add(PrintTensor("v5", v5))

    engine = poplar.Engine(graph, prog)
    engine.load(device)
    print("Running program")
    engine.run(0)
    print("Program complete")
    return engine


if __name__ == "__main__":
    main()
