"""Adds two tensors: a graph, a session, a step, a profile.

python examples/popart/simple_addition.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import ipujax.popart as popart


def main(arguments: Sequence[str] = ()) -> np.ndarray:
    """Build the graph, run it once, and print result and profile."""
    builder = popart.Builder()
    shape = popart.TensorInfo("FLOAT", [1])
    a = builder.addInputTensor(shape)
    b = builder.addInputTensor(shape)
    result = builder.aiOnnx.add([a, b], "sum")
    builder.addOutputTensor(result)

    options = popart.SessionOptions()
    options.engineOptions = {"debug.instrument": "true"}
    flow = popart.DataFlow(1, {result: popart.AnchorReturnType("ALL")})
    with popart.DeviceManager().createIpuModelDevice({"numIPUs": 1}) as device:
        session = popart.InferenceSession(builder.getModelProto(), flow, device, userOptions=options)
        session.prepareDevice()
        anchors = session.initAnchorArrays()
        rng = np.random.default_rng(0)
        values = [rng.random(1, np.float32) for _ in range(2)]
        session.run(popart.PyStepIO(dict(zip((a, b), values, strict=True)), anchors))

    print(f"{values[0]} + {values[1]} = {anchors[result]}")
    print(session.getSummaryReport())
    return anchors[result]


if __name__ == "__main__":
    main()
