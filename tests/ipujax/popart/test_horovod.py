"""`ipujax.popart.horovod`: processes that average gradients on the host have the weights of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ipujax as ipu
import ipujax.popart as popart
from ipujax.popart import horovod as hvd
from tests.ipujax.distributed.distributed_helpers import Runner, run

__all__ = ["run"]  # a fixture

# The guide's program on a small network: each process has its rows, and weights of its own until the broadcast.
TRAIN = """
import sys
import numpy as np
import ipujax.popart as popart
import ipujax.popart.horovod as hvd

hvd.init()
rng = np.random.default_rng(0)
x = rng.normal(size=(3, 8, 6)).astype(np.float32)  # batches of a step, rows
labels = rng.integers(0, 4, (3, 8)).astype(np.int32)
weights = rng.normal(size=(6, 4)).astype(np.float32) + hvd.rank()
rows = slice(hvd.rank() * 8 // hvd.size(), (hvd.rank() + 1) * 8 // hvd.size())
x, labels = np.ascontiguousarray(x[:, rows]), np.ascontiguousarray(labels[:, rows])

builder = popart.Builder()
data = builder.addInputTensor(popart.TensorInfo("FLOAT", x.shape[1:]))
label = builder.addInputTensor(popart.TensorInfo("INT32", labels.shape[1:]))
w = builder.addInitializedInputTensor(weights, "w")
probabilities = builder.aiOnnx.softmax([builder.aiOnnx.matmul([data, w])])
loss = builder.aiGraphcore.nllloss([probabilities, label], popart.ReductionType.Mean)
options = popart.SessionOptions()
options.hostAllReduce = True
device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1, "tilesPerIPU": 8})
optimizer = popart.SGD({"defaultLearningRate": (0.1, False), "defaultMomentum": (0.9, True)})
session = popart.TrainingSession(builder.getModelProto(), popart.DataFlow(3, {loss: popart.AnchorReturnType("ALL")}),
                                 loss, optimizer, device, userOptions=options)
hvd.DistributedOptimizer(optimizer, session, options).insert_host_allreduce()
session.prepareDevice()
hvd.broadcast_weights(session, root_rank=0)
anchors = session.initAnchorArrays()
for _ in range(2):
    session.run(popart.PyStepIO({data: x, label: labels}, anchors))
session.weightsToHost()
read = {"w": np.zeros((6, 4), np.float32)}
session.readWeights(popart.PyWeightsIO(read))
np.savez(f"{sys.argv[1]}.{hvd.size()}.{hvd.rank()}.npz", loss=anchors[loss], local=hvd.local_rank(), **read)
"""


def test_horovod_processes_have_the_weights_of_one(run: Runner, tmp_path: Path):
    for instances in (1, 2):
        assert run(TRAIN, "--timeout", "200", arguments=[str(tmp_path / "by")], instances=instances) == 0, run.err
    one, first, second = (dict(np.load(tmp_path / f"by.{name}.npz")) for name in ("1.0", "2.0", "2.1"))
    assert np.array_equal(first["w"], second["w"])
    np.testing.assert_allclose(first["w"], one["w"], rtol=1e-6, atol=1e-6)
    assert (int(first["local"]), int(second["local"])) == (0, 1)
    np.testing.assert_allclose((first["loss"] + second["loss"]) / 2, one["loss"], rtol=1e-6)


def session_of(host_all_reduce: bool, **settings: object) -> tuple[popart.TrainingSession, popart.SGD, str]:
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 3]))
    w = builder.addInitializedInputTensor(np.ones((3, 1), np.float32), "w")
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([x, w])], 1.0, popart.ReductionType.Sum)
    options = popart.SessionOptions()
    options.hostAllReduce = host_all_reduce
    for name, value in settings.items():
        setattr(options, name, value)
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 2, "tilesPerIPU": 4})
    optimizer = popart.SGD({"defaultLearningRate": (0.5, False)})
    flow = popart.DataFlow(2, {loss: popart.AnchorReturnType("ALL")})
    session = popart.TrainingSession(builder.getModelProto(), flow, loss, optimizer, device, userOptions=options)
    return session, optimizer, x


def test_horovod_callbacks_see_gradients_and_replace_them():
    session, _, x = session_of(True)
    stores, loads = np.split(np.array(session.getHostReduceStreamIds()), 2)
    assert len(stores) == 1 and "Gradient___w" in stores[0] and "Gradient___w" in loads[0]
    seen: list[np.ndarray] = []
    session.connectStreamToCallback(str(stores[0]), lambda buffer: seen.append(buffer.copy()))
    session.connectStreamToCallback(str(loads[0]), lambda buffer: buffer.fill(4.0), 0)
    session.prepareDevice()
    session.weightsFromHost()
    rows = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    session.run(popart.PyStepIO({x: rows}, session.initAnchorArrays()))
    session.weightsToHost()
    read = {"w": np.zeros((3, 1), np.float32)}
    session.readWeights(popart.PyWeightsIO(read))
    np.testing.assert_array_equal(read["w"], np.full((3, 1), 1 - 2 * 0.5 * 4))
    np.testing.assert_array_equal(seen[0], rows[0].sum(0)[:, None])
    np.testing.assert_array_equal(seen[1], -rows[1].sum(0)[:, None])


def test_sessions_of_several_processes_have_one_replica_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ipu.distributed, "num_instances", lambda: 2)
    session_of(False)
    with pytest.raises(popart.popart_exception, match=r"one of 2 processes[\s\S]*popart\.horovod"):
        session_of(False, enableReplicatedGraphs=True, replicatedGraphCount=2)


def test_horovod_bad_input():
    session, optimizer, x = session_of(True)
    options = popart.SessionOptions()
    with pytest.raises(popart.popart_exception, match="needs a session whose gradients go to the host"):
        hvd.DistributedOptimizer(optimizer, session, options)
    with pytest.raises(popart.popart_exception, match=r"expected: a popart\.TrainingSession"):
        hvd.DistributedOptimizer(optimizer, None, options)  # type: ignore[arg-type]
    with pytest.raises(popart.popart_exception, match="callback is connected to a stream"):
        session.connectStreamToCallback("gr_store_Gradient___v", print)
    with pytest.raises(popart.popart_exception, match="one replica"):
        session.connectStreamToCallback(session.getHostReduceStreamIds()[0], print, 1)
    session.prepareDevice()
    session.weightsFromHost()
    with pytest.raises(popart.popart_exception, match="streams without a callback"):
        session.run(popart.PyStepIO({x: np.ones((2, 2, 3), np.float32)}, session.initAnchorArrays()))
    with pytest.raises(popart.popart_exception, match="one replica in each process"):
        session_of(True, enableReplicatedGraphs=True, replicatedGraphCount=2)
    assert session_of(False)[0].getHostReduceStreamIds() == []
    assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (0, 1, 0)
