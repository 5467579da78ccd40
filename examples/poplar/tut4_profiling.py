"""Tutorial 4: (m1 × m2) × m3 with poplin, and its profile.

Source: Poplar & PopLibs user guide, tutorial 4.
"""

from __future__ import annotations

import sys
from typing import TextIO

import numpy as np

from ipujax import poplar, poplin, popops
from ipujax.poplar.program import Copy, Sequence


def main(out: TextIO | None = None, num_tiles: int | None = None) -> poplar.Engine:
    """Runs the tutorial and prints its profile.

    Args:
        out: where the profile is printed, the standard output when None.
        num_tiles: tiles of the IPU, all of them when None.
    """
    device = poplar.IPUModel(tiles_per_ipu=num_tiles).create_device()
    graph = poplar.Graph(device.get_target())
    popops.add_codelets(graph)
    poplin.add_codelets(graph)

    # Each matrix is mapped as the multiplication that reads it needs it.
    m1 = poplin.create_mat_mul_input_lhs(graph, poplar.FLOAT, [900, 600], [600, 300], "m1")
    m2 = poplin.create_mat_mul_input_rhs(graph, poplar.FLOAT, [900, 600], [600, 300], "m2")
    m3 = poplin.create_mat_mul_input_rhs(graph, poplar.FLOAT, [900, 300], [300, 200], "m3")

    prog = Sequence()
    m4 = poplin.mat_mul(graph, m1, m2, prog, "m4")
    m5 = poplin.mat_mul(graph, m4, m3, prog, "m5")
    result = graph.add_device_to_host_fifo("m5", poplar.FLOAT, m5.size)
    prog.add(Copy(m5, result))
    for matrix in (m1, m2, m3):
        graph.create_host_write(matrix.variables()[0].name, matrix)

    engine = poplar.Engine(graph, prog, {"debug.instrument": "true"})
    engine.load(device)
    rng = np.random.default_rng(0)
    matrices = {name: rng.standard_normal(m.shape, np.float32) for name, m in (("m1", m1), ("m2", m2), ("m3", m3))}
    for name, value in matrices.items():
        engine.write_tensor(name, value)
    product = np.zeros(m5.shape, np.float32)
    engine.connect_stream("m5", product.reshape(-1))
    engine.run(0)

    expected = matrices["m1"] @ matrices["m2"] @ matrices["m3"]
    error = float(np.abs(product - expected).max() / np.abs(expected).max())
    engine.print_profile_summary(out, {"showExecutionSteps": "true"})
    print(f"Largest error relative to the largest element: {error:.1e}", file=out or sys.stdout)
    return engine


if __name__ == "__main__":
    main()
