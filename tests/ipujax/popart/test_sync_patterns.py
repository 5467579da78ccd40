"""The guide's four IPUs A, B, C and D, drawn from the timeline of a session: who waits for whom.

Each IPU reads an input from the host, computes, and writes a result; A computes longest. A letter is the time of one
host exchange: h is one, c is computing, a dot is waiting or nothing.
"""

from __future__ import annotations

import numpy as np
import pytest

from ipujax import popart
from ipujax.runtime.timeline.clocks import PHASES

IPUS = "ABCD"
TILES = 4
SMALL = 8
LARGE = 4600  # elements on A: about three host exchanges of computing

FULL = """
A hccch
B h...h
C h...h
D h...h
"""
SINGLE_PIPELINE = """
A hccch
B hh...
C hh...
D hh...
"""
PING_PONG = """
A hccch
B hh...
C h...h
D hh...
"""
DRAWN = {
    popart.SyncPattern.Full: FULL,
    popart.SyncPattern.SinglePipeline: SINGLE_PIPELINE,
    popart.SyncPattern.PingPong: PING_PONG,
}


def four_ipus(pattern: popart.SyncPattern) -> popart.InferenceSession:
    """Return a session with an input and a result on each of four IPUs."""
    builder = popart.Builder()
    results = []
    for ipu in range(len(IPUS)):
        x = builder.addInputTensor(popart.TensorInfo("FLOAT", [SMALL if ipu else LARGE]))
        with builder.virtualGraph(ipu):
            results.append(builder.aiOnnx.reducesum([builder.aiOnnx.erf([x])], keepdims=0))
    options = popart.SessionOptions()
    options.virtualGraphMode = popart.VirtualGraphMode.Manual
    device = popart.DeviceManager().acquireAvailableDevice(len(IPUS), tilesPerIpu=TILES, pattern=pattern)
    flow = popart.DataFlow(1, {name: popart.AnchorReturnType("ALL") for name in results})
    session = popart.InferenceSession(builder.getModelProto(), flow, device, userOptions=options)
    session.prepareDevice()
    return session


def drawing(session: popart.InferenceSession) -> str:
    """Return the steps of each IPU, a line each."""
    spans = session.getReport().executable.spans_of(None)
    host = spans.work[:, PHASES.index("host_exchange")]
    unit = int(host.max())
    moments = np.arange(unit // 2, int(spans.end.max()), unit)
    lines = []
    for ipu, letter in enumerate(IPUS):
        # The work of a span is at its end: an IPU syncs before it exchanges.
        marks = {"h": host, "c": spans.work[:, PHASES.index("compute")]}
        begin = {mark: spans.end - cycles for mark, cycles in marks.items()}
        row = [
            next((mark for mark, cycles in marks.items()
                  if ((begin[mark] <= t) & (t < spans.end) & (cycles > 0) & (spans.ipu == ipu)).any()), ".")
            for t in moments.tolist()
        ]  # fmt: skip
        lines.append(f"{letter} {''.join(row)}")
    return "\n".join(["", *lines, ""])


@pytest.mark.parametrize("pattern", DRAWN)
def test_ipus_of_a_sync_group_wait_for_each_other(pattern: popart.SyncPattern) -> None:
    assert drawing(four_ipus(pattern)) == DRAWN[pattern]
