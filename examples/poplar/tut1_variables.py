"""Tutorial 1: variables on tiles, control programs, and data to and from the host.

`PrintTensor` prints to the standard error stream.
Source: Poplar & PopLibs user guide, tutorial 1.
"""

from __future__ import annotations

import numpy as np

from ipujax import poplar
from ipujax.poplar.program import Copy, PrintTensor, Sequence


def main() -> np.ndarray:
    """Runs the tutorial; returns the last values of v3."""
    device = poplar.IPUModel().create_device()
    graph = poplar.Graph(device.get_target())

    v1 = graph.add_variable(poplar.FLOAT, [4], "v1")
    v2 = graph.add_variable(poplar.FLOAT, [4], "v2")
    v3 = graph.add_variable(poplar.FLOAT, [4, 4], "v3")
    v4 = graph.add_variable(poplar.INT, [10], "v4")
    c1 = graph.add_constant(poplar.FLOAT, [4], [1.0, 1.5, 2.0, 2.5], "c1")

    # v1 is mapped to one tile, v2 to four.
    graph.set_tile_mapping(v1, 0)
    for i in range(4):
        graph.set_tile_mapping(v2[i], i)
    graph.set_tile_mapping(v3, 0)
    graph.set_tile_mapping(v4, 0)
    graph.set_tile_mapping(c1, 0)

    prog = Sequence()
    prog.add(PrintTensor("v1-debug", v1))  # nothing wrote it yet
    prog.add(Copy(c1, v1))
    prog.add(PrintTensor("v1-debug", v1))
    prog.add(Copy(v1, v2))
    prog.add(PrintTensor("v2-debug", v2))

    graph.create_host_write("v3-write", v3)
    graph.create_host_read("v3-read", v3)
    v1_slice = v1[0:3]
    v3_slice = v3.slice([1, 1], [2, 4])
    prog.add(Copy(v1_slice, v3_slice))

    in_stream = graph.add_host_to_device_fifo("v4-input-stream", poplar.INT, 10)
    for number in range(2):
        prog.add(Copy(in_stream, v4))
        prog.add(PrintTensor(f"v4-{number}", v4))

    engine = poplar.Engine(graph, prog)
    engine.load(device)
    engine.write_tensor("v3-write", np.zeros((4, 4), np.float32))
    engine.connect_stream("v4-input-stream", np.arange(10 * 3, dtype=np.int32))

    print("Running program")
    engine.run(0)
    print("Program complete")

    h3 = engine.read_tensor("v3-read")
    print("\nh3 data:")
    for row in h3:
        print("  " + " ".join(f"{value:g}" for value in row))
    return h3


if __name__ == "__main__":
    main()
