"""Anchors, weights, reports and the life of sessions, and refusals; a session stays usable after each error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import ipujax as ipu
from ipujax import popart
from tests.ipujax.popart.small_models import CLASSES, FEATURES, HIDDEN, Perceptron, perceptron, samples, train

GRADIENT = popart.reservedGradientPrefix()


def model_device(**options: object) -> popart.DeviceInfo:
    """Return a small simulated IPU."""
    return popart.DeviceManager().createIpuModelDevice({"numIPUs": 1, "tilesPerIPU": 16, **options})


def inference(
    model: Perceptron, batches: int = 3, options: popart.SessionOptions | None = None
) -> popart.InferenceSession:
    """Return a prepared session of the hidden layer."""
    session = popart.InferenceSession(
        fnModel=model.builder.getModelProto(),
        dataFlow=popart.DataFlow(batches, {model.hidden: popart.AnchorReturnType("ALL")}),
        deviceInfo=model_device(),
        userOptions=options,
    )
    session.prepareDevice()
    return session


def step_of(model: Perceptron, session: object, batches: int = 3) -> popart.PyStepIO:
    """Return inputs and anchors of a step."""
    data, labels = samples(batches * 4)
    return popart.PyStepIO({model.data: data, model.labels: labels}, session.initAnchorArrays())  # type: ignore[attr-defined]


def test_the_example_of_the_guide() -> None:
    builder = popart.Builder()
    data_shape = popart.TensorInfo("FLOAT", [1])
    a = builder.addInputTensor(data_shape)
    b = builder.addInputTensor(data_shape)
    o = builder.aiOnnx.add([a, b])
    builder.addOutputTensor(o)
    flow = popart.DataFlow(1, {o: popart.AnchorReturnType("ALL")})
    session = popart.InferenceSession(builder.getModelProto(), flow, model_device())
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    data_a = np.random.rand(1).astype(np.float32)
    data_b = np.random.rand(1).astype(np.float32)
    session.run(popart.PyStepIO({a: data_a, b: data_b}, anchors))
    np.testing.assert_array_equal(anchors[o], data_a + data_b)


def test_returned_anchors() -> None:
    model = perceptron()
    reference = {
        model.loss: popart.AnchorReturnType("ALL"),
        model.hidden: popart.AnchorReturnType("EVERYN", 2),
        GRADIENT + model.hidden: popart.AnchorReturnType("FINAL"),
        GRADIENT + model.data: popart.AnchorReturnType("ALL"),
        GRADIENT + "w1": popart.AnchorReturnType("SUM"),
        "w1": popart.AnchorReturnType("ALL"),
        "Accl___w1": popart.AnchorReturnType("FINAL"),
    }
    trained = train(model, batches=4, anchors=reference)
    anchors = trained.anchors
    assert {name: x.shape for name, x in anchors.items()} == {
        model.loss: (4,),
        model.hidden: (2, 4, 5),
        GRADIENT + model.hidden: (4, 5),
        GRADIENT + model.data: (4, 4, FEATURES),
        GRADIENT + "w1": (5, CLASSES),
        "w1": (4, 5, CLASSES),
        "Accl___w1": (5, CLASSES),
    }
    # The last value of a weight is the one that the session goes on with.
    np.testing.assert_array_equal(anchors["w1"][-1], trained.weights["w1"])
    # Velocity: v = 0.9 v + g, so that the last step of the weight is the learning rate times it.
    step = anchors["w1"][-2] - anchors["w1"][-1]
    np.testing.assert_allclose(step, 0.02 * anchors["Accl___w1"], rtol=1e-3, atol=1e-6)


def test_anchors_of_accumulation_and_replicas() -> None:
    model = perceptron()
    options = popart.SessionOptions()
    options.enableGradientAccumulation = True
    options.accumulationFactor = 3
    options.enableReplicatedGraphs = True
    options.replicatedGraphCount = 2
    kinds = {model.loss: popart.AnchorReturnType("ALL"), model.hidden: popart.AnchorReturnType("FINAL")}
    kinds["w1"] = popart.AnchorReturnType("ALL")
    anchors = train(model, batches=2, device=model_device(numIPUs=2), options=options, anchors=kinds).anchors
    assert anchors[model.loss].shape == (2, 3, 2)
    assert anchors[model.hidden].shape == (2, 4, 5)
    assert anchors["w1"].shape == (2, 3, 2, 5, CLASSES)
    data, _ = samples(2 * 3 * 2 * 4)
    before = perceptron()
    session = inference(before, 12)
    step = popart.PyStepIO({before.data: data, before.labels: np.zeros(48, np.int32)}, session.initAnchorArrays())
    session.run(step)


def test_gradients_of_activations_are_those_of_finite_differences() -> None:
    model = perceptron()
    anchors = {GRADIENT + model.data: popart.AnchorReturnType("ALL"), model.loss: popart.AnchorReturnType("ALL")}
    frozen = popart.SGD({"defaultLearningRate": (0.0, False)})
    trained = train(model, batches=1, anchors=anchors, optimizer=frozen)
    data, labels = samples(4)
    moved = data.copy()
    moved[1, 2] += 1e-2
    results = trained.session.initAnchorArrays()
    trained.session.run(popart.PyStepIO({model.data: moved, model.labels: labels}, results))
    slope = (results[model.loss] - trained.anchors[model.loss]) / 1e-2
    assert slope == pytest.approx(trained.anchors[GRADIENT + model.data][1, 2], rel=2e-2)


@pytest.mark.parametrize("pipelined", [False, True])
def test_weights_of_inference_are_no_part_of_a_step(pipelined: bool) -> None:
    cycles = []
    for is_constant in (False, True):
        builder = popart.Builder()
        draw = np.random.default_rng(3).standard_normal
        x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 48]), "x")
        value = x
        for layer in range(2):
            array = draw((48, 48)).astype(np.float32)
            weight = builder.aiOnnx.constant(array) if is_constant else builder.addInitializedInputTensor(array)
            value = builder.aiOnnx.matmul([value, weight])
            if pipelined:
                builder.pipelineStage(value, layer)
                builder.virtualGraph(value, layer)
        options = popart.SessionOptions()
        if pipelined:
            options.virtualGraphMode = popart.VirtualGraphMode.Manual
            options.enablePipelining = True
        flow = popart.DataFlow(4, {value: popart.AnchorReturnType("ALL")})
        device = model_device(numIPUs=1 + pipelined)
        session = popart.InferenceSession(builder.getModelProto(), flow, device, userOptions=options)
        session.prepareDevice()
        rows = draw((4, 4, 48)).astype(np.float32)
        results = []
        for _ in range(2):
            anchors = session.initAnchorArrays()
            session.run(popart.PyStepIO({x: rows}, anchors))
            results.append(anchors[value])
        np.testing.assert_array_equal(*results)
        cycles.append(session.getReport().cycles)
    assert max(cycles) <= 1.02 * min(cycles), cycles


def test_inference_streams_all_batches() -> None:
    model = perceptron(stages=True)
    plain = perceptron()
    options = popart.SessionOptions()
    options.virtualGraphMode = popart.VirtualGraphMode.Manual
    options.enablePipelining = True
    flow = popart.DataFlow(6, {model.hidden: popart.AnchorReturnType("ALL")})
    device = model_device(numIPUs=2)
    session = popart.InferenceSession(model.builder.getModelProto(), flow, device, userOptions=options)
    session.prepareDevice()
    results = session.initAnchorArrays()
    data, labels = samples(24)
    session.run(popart.PyStepIO({model.data: data, model.labels: labels}, results))
    one = inference(plain, 6)
    expected = one.initAnchorArrays()
    one.run(popart.PyStepIO({plain.data: data, plain.labels: labels}, expected))
    np.testing.assert_allclose(results[model.hidden], expected[plain.hidden], rtol=1e-6)


def test_weights_move_only_on_request(tmp_path: Path) -> None:
    model = perceptron()
    trained = train(model)
    session = trained.session
    session.modelToHost(str(tmp_path / "trained.onnx"))
    saved = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "trained.onnx").graph.initializer}
    np.testing.assert_array_equal(saved["w0"], trained.weights["w0"])
    assert "Accl___w0" in saved
    changed = {"w0": np.zeros_like(saved["w0"])}
    session.writeWeights(popart.PyWeightsIO(changed))
    read = {"w0": np.ones_like(saved["w0"])}
    session.readWeights(popart.PyWeightsIO(read))
    np.testing.assert_array_equal(read["w0"], 0)
    session.weightsToHost()  # those on the device are the trained ones still
    session.readWeights(popart.PyWeightsIO(read))
    np.testing.assert_array_equal(read["w0"], saved["w0"])
    session.resetHostWeights(model.builder.getModelProto())
    session.weightsFromHost()
    session.weightsToHost()
    session.readWeights(popart.PyWeightsIO(read))
    assert not np.array_equal(read["w0"], saved["w0"])


def test_saved_variables_are_loaded(tmp_path: Path) -> None:
    model = perceptron()
    trained = train(model)
    trained.session.saveExecutable(str(tmp_path / "run"))
    flow = popart.DataFlow(5, {model.loss: popart.AnchorReturnType("ALL")})
    optimizer = popart.SGD({"defaultLearningRate": (0.02, False), "defaultMomentum": (0.9, True)})
    other = popart.TrainingSession(model.builder.getModelProto(), flow, model.loss, optimizer, model_device())
    other.loadExecutable(str(tmp_path / "run"))
    both = [session.initAnchorArrays() for session in (trained.session, other)]
    data, labels = samples(20)
    for session, results in zip((trained.session, other), both, strict=True):
        session.run(popart.PyStepIO({model.data: data, model.labels: labels}, results))
    np.testing.assert_array_equal(both[0][model.loss], both[1][model.loss])


def test_learning_rates_change_between_steps_and_compile_nothing() -> None:
    model = perceptron()
    trained = train(model)
    session = trained.session
    with ipu_compilations() as compiled:
        for rate in (0.01, 0.0):
            session.updateOptimizerFromHost(
                popart.SGD({"defaultLearningRate": (rate, False), "defaultMomentum": (0.9, True)})
            )
            session.run(step_of(model, session, 5))
    assert not compiled
    session.weightsToHost()
    before = {name: np.array(x) for name, x in trained.weights.items()}
    session.readWeights(popart.PyWeightsIO(dict(trained.weights)))
    assert not np.array_equal(before["w0"], trained.weights["w0"])


def ipu_compilations() -> object:
    """Return a context that collects the names of the modules that XLA compiles inside."""
    import logging
    from contextlib import contextmanager

    import jax

    @contextmanager
    def collecting():  # type: ignore[no-untyped-def]
        actual: list[str] = []

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                actual.extend([record.getMessage()] if "Compiling" in record.getMessage() else [])

        handler = Handler()
        log = logging.getLogger("jax")
        log.addHandler(handler)
        with jax.log_compiles(True):
            yield actual
        log.removeHandler(handler)

    return collecting()


def test_callbacks_feed_a_session() -> None:
    model = perceptron()
    session = inference(model)
    data, labels = samples(12)
    rows = {model.data: iter(data.reshape(3, 4, FEATURES)), model.labels: iter(labels.reshape(3, 4))}
    results = np.zeros((3, 4, 5), np.float32)
    targets = iter(results)
    complete: list[str] = []
    callbacks = popart.PyStepIOCallback(
        lambda name, is_prefetch: next(rows[name]), complete.append, lambda name: next(targets), complete.append
    )
    session.run(callbacks)
    expected = session.initAnchorArrays()
    session.run(popart.PyStepIO({model.data: data, model.labels: labels}, expected))
    np.testing.assert_array_equal(results, expected[model.hidden])
    assert complete.count(model.hidden) == 3


def test_reports() -> None:
    model = perceptron()
    session = inference(model)
    assert session.getSummaryReport() == "Execution profiling not enabled"
    assert session.getExecutionReport() == b'{"profilerMode":"NONE"}'
    options = popart.SessionOptions()
    options.engineOptions = {"debug.instrument": "true"}
    profiled = inference(perceptron(), options=options)
    assert "What limits this program" in profiled.getSummaryReport()
    assert json.loads(profiled.getGraphReport())
    assert profiled.getGraphReport(useCbor=True)[:1] != b"{"
    assert profiled.getCycleCount() == profiled.getReport().cycles > 0


def test_earlier_losses() -> None:
    model = perceptron()
    graph = model.builder.model().graph
    probabilities = next(node.output[0] for node in graph.node if node.op_type == "Softmax")
    losses = [popart.NllLoss(probabilities, model.labels, "nll"), popart.L1Loss("w0", "l1", 0.1)]
    anchors = {losses[0].output(0): popart.AnchorReturnType("ALL"), model.loss: popart.AnchorReturnType("ALL")}
    flow = popart.DataFlow(2, anchors)
    session = popart.TrainingSession(
        model.builder.getModelProto(), dataFeed=flow, losses=losses, optimizer=popart.ConstSGD(0.01),
        deviceInfo=model_device(),
    )  # fmt: skip
    session.prepareDevice()
    session.weightsFromHost()
    results = session.initAnchorArrays()
    data, labels = samples(8)
    session.run(popart.PyStepIO({model.data: data, model.labels: labels}, results))
    np.testing.assert_allclose(results["nll"], results[model.loss], rtol=1e-6)


def test_calls_compute_their_operations() -> None:
    data = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2, 3, 4])
    callee = builder.createSubgraphBuilder()
    inner = callee.addInputTensor("FLOAT", [2, 3, 4])
    # Softmax of opset 10 is over all axes but the first.
    callee.addOutputTensor(callee.aiOnnx.softmax([inner]))
    (once,) = builder.aiGraphcore.call([x], 1, callee)
    (twice,) = builder.aiGraphcore.call([once], 1, callee, debugContext="again")
    plain = builder.aiOnnx.softmax([builder.aiOnnx.softmax([x])])
    flow = popart.DataFlow(1, [twice, plain])
    session = popart.InferenceSession(builder.getModelProto(), flow, model_device())
    session.prepareDevice()
    results = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: data}, results))
    np.testing.assert_array_equal(results[twice], results[plain])
    (wrong, _) = builder.aiGraphcore.call([x], 2, callee)
    with pytest.raises(popart.popart_exception, match=r"number of outputs \(2\) does not match"):
        popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [wrong]), model_device())


def test_gradients_that_do_not_exist() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [3])
    y = builder.aiGraphcore.detach([builder.aiOnnx.exp([x])])
    loss = builder.aiGraphcore.identityloss([y])
    flow = popart.DataFlow(1, [GRADIENT + x])
    with pytest.raises(popart.popart_exception, match="not in Ir Tensors"):
        popart.TrainingSession(builder.getModelProto(), flow, loss, popart.ConstSGD(0.1), model_device())


def test_options_without_effect_are_listed() -> None:
    options = popart.SessionOptions()
    options.enableOutlining = False
    assert inference(perceptron(), options=options).optionsWithoutEffect == ["enableOutlining"]


def test_refuses_wrong_steps_and_stays_usable() -> None:
    model = perceptron()
    session = inference(model)
    data, labels = samples(12)
    for count, match in ((8, "wrong number of elements"), (16, "wrong number of elements")):
        few = np.resize(data, (count, FEATURES))
        with pytest.raises(popart.popart_exception, match=match):
            session.run(popart.PyStepIO({model.data: few, model.labels: labels}, session.initAnchorArrays()))
    with pytest.raises(popart.popart_exception, match="'data'"):
        session.run(popart.PyStepIO({model.labels: labels}, session.initAnchorArrays()))
    with pytest.raises(popart.popart_exception, match="the wrong element type"):
        wrong = {model.data: data.astype(np.int32), model.labels: labels}
        session.run(popart.PyStepIO(wrong, session.initAnchorArrays()))
    with pytest.raises(popart.popart_exception, match="array of anchor"):
        session.run(popart.PyStepIO({model.data: data, model.labels: labels}, {model.hidden: np.zeros(3)}))
    with pytest.raises(popart.popart_exception, match="'Tanh:0', the nearest"):
        session.run(popart.PyStepIO({model.data: data, model.labels: labels}, {"Tanh:1": np.zeros(3)}))
    session.run(step_of(model, session))


def test_refuses_wrong_weights_and_stays_usable() -> None:
    model = perceptron()
    session = train(model).session
    with pytest.raises(popart.popart_exception, match="weight 'w0' has the wrong number of elements"):
        session.writeWeights(popart.PyWeightsIO({"w0": np.zeros((2, 2), np.float32)}))
    with pytest.raises(popart.popart_exception, match="expected: Accl___b0, Accl___w0, Accl___w1, b0, w0, w1"):
        session.writeWeights(popart.PyWeightsIO({"w9": np.zeros((2, 2), np.float32)}))
    with pytest.raises(popart.popart_exception, match="for weight 'w0'"):
        session.readWeights(popart.PyWeightsIO({"w0": np.zeros((2, 2), np.float32)}))
    session.run(step_of(model, session, 5))


def test_refuses_constant_weights_of_inference() -> None:
    model = perceptron()
    session = inference(model)
    with pytest.raises(popart.popart_exception, match="Cannot call resetHostWeights when constantWeights is set"):
        session.resetHostWeights(model.builder.getModelProto())
    session.run(step_of(model, session))
    options = popart.SessionOptions()
    options.constantWeights = False
    changeable = inference(perceptron(), options=options)
    changeable.resetHostWeights(model.builder.getModelProto())


def test_refuses_sessions_that_cannot_be() -> None:
    model = perceptron()
    proto = model.builder.getModelProto()
    sgd = popart.ConstSGD(0.1)
    with pytest.raises(popart.popart_exception, match="DataFlow has an anchor that does not exist: 'Tanh:9'"):
        popart.InferenceSession(proto, popart.DataFlow(1, ["Tanh:9"]), model_device())
    with pytest.raises(popart.popart_exception, match="'Nll:0', the nearest"):
        popart.TrainingSession(proto, popart.DataFlow(1, {}), "Nll:1", sgd, model_device())
    with pytest.raises(popart.popart_exception, match="expected: b0, w0, w1"):
        special = popart.SGD({})
        special.insertSpecific("w9", {"learningRate": (0.1, True)})
        popart.TrainingSession(proto, popart.DataFlow(1, {}), model.loss, special, model_device())
    with pytest.raises(popart.popart_exception, match="deviceInfo must be a device"):
        popart.InferenceSession(proto, popart.DataFlow(1, {}), ipu.IPUModel())  # type: ignore[arg-type]
    unprepared = popart.InferenceSession(proto, popart.DataFlow(3, ["Tanh:0"]), model_device())
    with pytest.raises(popart.popart_exception, match="is not prepared"):
        unprepared.run(step_of(model, unprepared))
    unprepared.prepareDevice()
    unprepared.run(step_of(model, unprepared))


def test_refuses_stages_that_run_backwards() -> None:
    model = perceptron(stages=True)
    model.builder.pipelineStage(model.hidden, 2)
    options = popart.SessionOptions()
    options.virtualGraphMode = popart.VirtualGraphMode.Manual
    options.enablePipelining = True
    proto = model.builder.getModelProto()
    with pytest.raises(popart.popart_exception, match="stages run backwards"):
        popart.InferenceSession(proto, popart.DataFlow(1, {}), model_device(numIPUs=2), userOptions=options)
    options.enablePipelining = False
    with pytest.raises(popart.popart_exception, match="IPU that the device lacks"):
        popart.InferenceSession(proto, popart.DataFlow(1, {}), model_device(), userOptions=options)


def test_out_of_memory_has_a_summary() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [512, 512]))
    w = builder.addInitializedInputTensor(np.zeros((512, 4096), np.float32))
    y = builder.aiOnnx.matmul([x, w])
    session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [y]), model_device(tilesPerIPU=1))
    with pytest.raises(popart.OutOfMemoryException) as caught:
        session.prepareDevice()
    assert "try" in caught.value.getSummaryReport()
    assert isinstance(caught.value, ipu.IpuError)


def test_weights_of_host_and_device_are_in_sync_until_one_changes() -> None:
    model = perceptron()
    session = train(model).session
    assert session.areHostWeightsInSync()  # read after training
    session.run(step_of(model, session, 5))
    assert not session.areHostWeightsInSync()
    session.weightsToHost()
    assert session.areHostWeightsInSync()
    name = "w1"
    session.writeWeights(popart.PyWeightsIO({name: np.zeros(session.getInfo(name).shape(), np.float32)}))
    assert not session.areHostWeightsInSync()
    session.weightsFromHost()
    assert session.areHostWeightsInSync()
    session.markHostWeightsOutOfSync()
    assert not session.areHostWeightsInSync()
    session.markHostWeightsInSync()
    assert session.areHostWeightsInSync()


@pytest.mark.parametrize("replicas", [1, 2])
def test_operators_update_parameters_in_inference(replicas: int) -> None:
    builder = popart.Builder()
    first = 2**24 + 1  # no float32
    counter = builder.addInitializedInputTensor(np.full(3, first, np.int32))
    added = builder.aiOnnx.add([counter, builder.aiOnnx.constant(np.ones(3, np.int32))])
    updated = builder.aiGraphcore.copyvarupdate([counter, added])
    flow = popart.DataFlow(2, {updated: popart.AnchorReturnType("ALL")})
    options = popart.SessionOptions()
    options.enableReplicatedGraphs = replicas > 1
    options.replicatedGraphCount = replicas
    session = popart.InferenceSession(
        builder.getModelProto(), flow, model_device(numIPUs=replicas), userOptions=options
    )
    session.prepareDevice()
    results = session.initAnchorArrays()
    for _ in range(2):
        session.run(popart.PyStepIO({}, results))
    assert not session.areHostWeightsInSync()
    session.weightsToHost()
    counts = np.empty(3, np.int32)
    session.readWeights(popart.PyWeightsIO({counter: counts}))
    np.testing.assert_array_equal(counts - first, [4, 4, 4])
    np.testing.assert_array_equal(results[updated].reshape(2, replicas, 3)[:, 0, 0] - first, [3, 4])


def test_a_program_may_write_its_arrays_after_a_step() -> None:
    size = 500
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [size, size]))
    w = builder.addInitializedInputTensor(np.full((size, size), 1e-3, np.float32))
    hidden = x
    for _ in range(4):
        hidden = builder.aiOnnx.tanh([builder.aiOnnx.matmul([hidden, w])])
    loss = builder.aiGraphcore.l1loss([hidden], 1.0)
    optimizer = popart.SGD({"defaultLearningRate": (1.0, True)})
    flow = popart.DataFlow(1, {})  # no result is read, for which a step would wait
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1})
    session = popart.TrainingSession(builder.getModelProto(), flow, loss, optimizer, device)
    session.prepareDevice()
    session.weightsFromHost()
    data = np.full((size, size), 1e-3, np.float32)
    session.run(popart.PyStepIO({x: data}, {}))
    assert all(each.is_ready() for each in session._store.device.values())


@pytest.mark.parametrize("dtype", [np.int32, np.float16, bool])
def test_refuses_arrays_that_do_not_hold_results(dtype: type) -> None:
    model = perceptron()
    session = inference(model, 1)
    data, labels = samples(4)
    inputs = {model.data: data, model.labels: labels}
    before = np.zeros((4, HIDDEN), dtype)
    for stepio in (
        popart.PyStepIO(inputs, {model.hidden: before}),
        popart.PyStepIOCallback(lambda name, _: inputs[name], lambda _: None, lambda _: before, lambda _: None),
    ):
        with pytest.raises(popart.popart_exception, match=r"the array of (.|\n)* has the wrong element type"):
            session.run(stepio)
    session.weightsToHost()
    with pytest.raises(popart.popart_exception, match="the array for weight 'b0' has the wrong element type"):
        session.readWeights(popart.PyWeightsIO({"b0": np.zeros(HIDDEN, dtype)}))
    assert not before.any()
    wide = np.zeros((4, HIDDEN))
    session.run(popart.PyStepIO(inputs, {model.hidden: wide}))
    assert wide.any()
