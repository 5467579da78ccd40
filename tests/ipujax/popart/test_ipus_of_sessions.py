"""Operations stay on the IPU of their annotation, also where no other IPU has any; numbers against NumPy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

import ipujax.popart as popart

NUM_IPUS = 4
TILES = 8
DRAW = np.random.default_rng(0)
WEIGHTS = [DRAW.normal(size=(16, 16)).astype(np.float32) / 4 for _ in range(2)]
X = DRAW.normal(size=(4, 16)).astype(np.float32)
EXPECTED = np.tanh(np.tanh(X @ WEIGHTS[0]) @ WEIGHTS[1])


@dataclass(frozen=True)
class Case:
    """A network of two layers: the IPU and the pipeline stage of each, and settings of the session."""

    ipus: tuple[int | None, int | None]
    stages: tuple[int, int] | None = None
    trains: bool = False
    batches: int = 1
    accumulation: int = 1
    is_pipelined: bool = False

    @property
    def used_ipus(self) -> list[int]:
        """IPUs that compute; a layer of no IPU is computed beside the other."""
        return sorted({ipu for ipu in self.ipus if ipu is not None})

    def options(self) -> popart.SessionOptions:
        options = popart.SessionOptions()
        options.virtualGraphMode = popart.VirtualGraphMode.Manual
        options.engineOptions = {"debug.instrument": "true"}
        options.enablePipelining = self.is_pipelined
        options.enableGradientAccumulation = self.accumulation > 1
        options.accumulationFactor = self.accumulation
        return options


def place(builder: popart.Builder, case: Case, layer: int, result: str) -> None:
    if case.ipus[layer] is not None:
        builder.virtualGraph(result, case.ipus[layer])
    if case.stages is not None:
        builder.pipelineStage(result, case.stages[layer])


def run(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the result, and the compute cycles and the bytes of variables of each IPU."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", X.shape))
    result = x
    for layer, w in enumerate(WEIGHTS):
        result = builder.aiOnnx.matmul([result, builder.addInitializedInputTensor(w)])
        place(builder, case, layer, result)
        result = builder.aiOnnx.tanh([result])
        place(builder, case, layer, result)
    flow = popart.DataFlow(case.batches, {result: popart.AnchorReturnType("ALL")})
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": NUM_IPUS, "tilesPerIPU": TILES})
    session: popart.InferenceSession | popart.TrainingSession
    if case.trains:
        loss = builder.aiGraphcore.l1loss([result], 0.1)
        place(builder, case, 1, loss)
        model = builder.getModelProto()
        optimizer = popart.ConstSGD(0.0)
        session = popart.TrainingSession(model, flow, loss, optimizer, device, userOptions=case.options())
    else:
        session = popart.InferenceSession(builder.getModelProto(), flow, device, userOptions=case.options())
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    rows = tuple(count for count in (case.batches, case.accumulation) if count > 1)
    session.run(popart.PyStepIO({x: np.broadcast_to(X, (*rows, *X.shape)).copy()}, anchors))
    cycles = json.loads(session.getGraphReport())["computeSets"]["cycleEstimates"]["cyclesByTile"]
    return anchors[result], by_ipu(np.sum(cycles, 0)), by_ipu(session.getReport().memory.by_category["variable"])


def by_ipu(figures: Sequence[int]) -> np.ndarray:
    return np.asarray(figures).reshape(NUM_IPUS, TILES).sum(1)


def check(case: Case) -> None:
    result, cycles, variable_bytes = run(case)
    np.testing.assert_allclose(result, np.broadcast_to(EXPECTED, result.shape), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(np.flatnonzero(cycles), case.used_ipus)
    np.testing.assert_array_equal(np.flatnonzero(variable_bytes), case.used_ipus)


CASES = [
    Case((1, 1)),
    Case((None, 2)),
    Case((3, 3), batches=3),
    Case((1, 3)),
    Case((2, 1)),
    Case((1, 3), batches=2),
    Case((1, 1), trains=True),
    Case((1, 1), trains=True, batches=3),
    Case((1, 2), trains=True, batches=2),
    Case((1, 1), trains=True, accumulation=4),
    Case((1, 1), trains=True, accumulation=4, is_pipelined=True),
    Case((1, 2), trains=True, accumulation=4, is_pipelined=True),
    Case((2, 3), (0, 1), trains=True, accumulation=4, is_pipelined=True),
    Case((2, 3), (1, 3), trains=True, accumulation=4, is_pipelined=True),
    Case((2, 2), (0, 0), trains=True, accumulation=4, is_pipelined=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operations_stay_on_their_ipu(case: Case) -> None:
    check(case)


def test_an_ipu_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(popart.popart_exception, match=r"an IPU from 0 to 3 of a replica\n.*got: 4"):
        run(Case((4, 4)))
