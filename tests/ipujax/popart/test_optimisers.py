"""Updates of PopART's optimisers against the equations of its headers in NumPy, in double precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipujax import popart

BATCHES = 5
SHAPE = (7, 5)
Array = np.ndarray[Any, Any]
Reference = Callable[[list[Array], Array, Mapping[str, float]], Array]


def sgd(gradients: list[Array], w: Array, v: Mapping[str, float]) -> Array:
    """Follow `sgd.hpp`: velocity scaling, dampening, weight decay, momentum, Nesterov."""
    velocity = np.zeros_like(w)
    vs = v["velocityScaling"]
    for g in gradients:
        velocity = velocity * v["momentum"] + vs * (1 - v["dampening"]) * (g + v["weightDecay"] * w)
        step = vs * (g + v["weightDecay"] * w) + v["momentum"] * velocity if v["nesterov"] else velocity
        w = w - v["learningRate"] / vs * step
    return w


def adam(mode: popart.AdamMode, decay: popart.WeightDecayMode) -> Reference:
    """Follow `adam.hpp`."""

    def run(gradients: list[Array], w: Array, v: Mapping[str, float]) -> Array:
        first = np.zeros_like(w)
        second = np.zeros_like(w)
        is_biased = mode in (popart.AdamMode.AdamNoBias, popart.AdamMode.LambNoBias)
        for t, g in enumerate(gradients, 1):
            g = g + v["weightDecay"] * w if decay is popart.WeightDecayMode.L2Regularization else g
            first = v["beta1"] * first + (1 - v["beta1"]) * g
            mean = first if is_biased else first / (1 - v["beta1"] ** t)
            if mode is popart.AdamMode.AdaMax:
                second = np.maximum(v["beta2"] * second, abs(g))
                root = second
            else:
                second = v["beta2"] * second + (1 - v["beta2"]) * g**2
                root = np.sqrt(second if is_biased else second / (1 - v["beta2"] ** t))
            x = mean / (root + v["eps"])
            x = x + v["weightDecay"] * w if decay is popart.WeightDecayMode.Decay else x
            ratio = 1.0
            if mode in (popart.AdamMode.Lamb, popart.AdamMode.LambNoBias):
                ratio = min(np.linalg.norm(w), v["maxWeightNorm"]) / np.linalg.norm(x)
            w = w - ratio * v["learningRate"] * x
        return w

    return run


def adaptive(mode: popart.AdaptiveMode, decay: popart.WeightDecayMode, is_tf: bool = False) -> Reference:
    """Follow `adaptive.hpp`."""

    def run(gradients: list[Array], w: Array, v: Mapping[str, float]) -> Array:
        second = np.zeros_like(w)
        third = np.zeros_like(w)
        first = np.full_like(w, float(is_tf))
        for g in gradients:
            g = g + v["weightDecay"] * w if decay is popart.WeightDecayMode.L2Regularization else g
            is_sum = mode is popart.AdaptiveMode.AdaGrad
            first = first + g**2 if is_sum else v["alpha"] * first + (1 - v["alpha"]) * g**2
            variance = first
            if mode is popart.AdaptiveMode.CenteredRMSProp:
                second = v["alpha"] * second + (1 - v["alpha"]) * g
                variance = first - second**2
            if mode is popart.AdaptiveMode.AdaDelta:
                x = g * np.sqrt(second + v["eps"]) / np.sqrt(first + v["eps"])
                second = v["alpha"] * second + (1 - v["alpha"]) * x**2
            else:
                x = g / (np.sqrt(variance + v["eps"]) if is_tf else np.sqrt(variance) + v["eps"])
            is_rated = is_tf and v["momentum"] > 0
            third = v["momentum"] * third + (v["learningRate"] * x if is_rated else x)
            decayed = v["weightDecay"] * w if decay is popart.WeightDecayMode.Decay else 0.0
            w = w - (decayed + third if is_rated else v["learningRate"] * (decayed + third))
        return w

    return run


SGD_SETTINGS = [
    {"learningRate": 0.1},
    {"learningRate": 0.05, "weightDecay": 0.02},
    {"learningRate": 0.05, "momentum": 0.9, "dampening": 0.1},
    {"learningRate": 0.05, "momentum": 0.8, "weightDecay": 0.01, "velocityScaling": 16.0, "dampening": 0.3},
    {"learningRate": 0.02, "momentum": 0.9, "weightDecay": 0.01, "velocityScaling": 4.0, "nesterov": 1.0},
]
ADAM_SETTINGS = [
    {"learningRate": 0.01},
    {"learningRate": 0.01, "weightDecay": 0.1},
    {"learningRate": 0.02, "beta1": 0.7, "beta2": 0.9},
    {"learningRate": 0.02, "beta1": 0.5, "beta2": 0.8, "eps": 1e-3, "weightDecay": 0.05},
    {"learningRate": 0.1, "maxWeightNorm": 2.0, "eps": 1e-4},
]
# AdaDelta finds its step size alone, from the small term: with a small one it moves less than float32 resolves.
ADADELTA_SETTINGS = [
    {"learningRate": 1.0, "eps": 1e-2},
    {"learningRate": 1.0, "eps": 1e-2, "weightDecay": 0.1},
    {"learningRate": 1.0, "alpha": 0.9, "eps": 1e-1},
    {"learningRate": 0.5, "alpha": 0.8, "momentum": 0.9, "eps": 1e-2},
    {"learningRate": 0.5, "momentum": 0.5, "weightDecay": 0.05, "eps": 1e-2},
]
ADAPTIVE_SETTINGS = [
    {"learningRate": 0.01},
    {"learningRate": 0.01, "weightDecay": 0.1},
    {"learningRate": 0.02, "alpha": 0.9, "eps": 1e-3},
    {"learningRate": 0.02, "alpha": 0.8, "momentum": 0.9, "eps": 1e-2},
    {"learningRate": 0.005, "momentum": 0.5, "weightDecay": 0.05, "eps": 1e-2},
]


def cases() -> list[Any]:
    """Return all optimisers with their reference and one of five settings."""
    rows: list[Any] = [
        pytest.param(popart.SGD, {"accumulatorAndMomentum": mode}, sgd, values, id=f"SGD-{mode.name}-{i}")
        for mode in popart.SGDAccumulatorAndMomentum
        for i, values in enumerate(SGD_SETTINGS)
    ]
    for decay in popart.WeightDecayMode:
        for mode in popart.AdamMode:
            keywords: dict[str, Any] = {"mode": mode, "weight_decay_mode": decay}
            rows += [
                pytest.param(popart.Adam, keywords, adam(mode, decay), values, id=f"{mode.name}-{decay.name}-{i}")
                for i, values in enumerate(ADAM_SETTINGS)
            ]
        for kind in popart.AdaptiveMode:
            for is_tf in (False, True) if "RMSProp" in kind.name else (False,):
                settings = ADADELTA_SETTINGS if kind is popart.AdaptiveMode.AdaDelta else ADAPTIVE_SETTINGS
                keywords = {"mode": kind, "weight_decay_mode": decay, "rmsprop_tf_variant": is_tf}
                rows += [
                    pytest.param(popart.Adaptive, keywords, adaptive(kind, decay, is_tf), values,
                                 id=f"{kind.name}-{decay.name}-{'tf-' if is_tf else ''}{i}")
                    for i, values in enumerate(settings)
                ]  # fmt: skip
    return rows


def popart_names(values: Mapping[str, float]) -> dict[str, tuple[float, bool]]:
    """Return values by the names of an optimiser's constructor."""
    names = {name: f"default{name[0].upper()}{name[1:]}" for name in values} | {"nesterov": "nesterov"}
    return {names[name]: (value, False) for name, value in values.items()}


def distance_error(after: Array, reference: Array, before: Array) -> float:
    """Return the relative L1 error of the distance moved."""
    return float(abs(after - reference).sum() / abs(reference - before).sum())


@pytest.mark.parametrize(("kind", "keywords", "reference", "values"), cases())
def test_updates_follow_the_equations(kind: Any, keywords: Any, reference: Reference, values: Any) -> None:
    rng = np.random.default_rng(3)
    before = rng.normal(size=SHAPE)
    gradients = [rng.normal(size=SHAPE) for _ in range(BATCHES)]
    optimiser = kind(popart_names(values), **keywords)
    scalars = optimiser.hyperparameters(["w"])[""]
    weight = jnp.asarray(before, jnp.float32)
    state = optimiser.initial_state(weight, scalars)
    for gradient in gradients:
        weight, state = optimiser.updated(jnp.asarray(gradient, jnp.float32), weight, state, scalars)
    numbers = {name: float(value) for name, value in {**kind.UNSET, **values}.items()}
    expected = reference(gradients, before, numbers)
    assert distance_error(np.asarray(weight, np.float64), expected, before) < 1e-5


def test_values_of_one_weight() -> None:
    optimiser = popart.SGD({"defaultLearningRate": (0.1, False)})
    optimiser.insertSpecific("w", {"learningRate": (0.5, False)})
    values = optimiser.hyperparameters(["w", "b"])
    assert values["w"]["learningRate"] == np.float32(0.5)
    assert values[""]["learningRate"] == np.float32(0.1)
    assert optimiser.learningRates().getDefault().val() == 0.1


def test_clips_the_norm_over_all_weights() -> None:
    from ipujax.popart.optimisers import clip_by_norm

    gradients = {"a": jnp.full((3,), 2.0), "b": jnp.full((4,), -1.0)}
    norm = np.sqrt(3 * 4 + 4)
    clipped = clip_by_norm(gradients, [popart.ClipNormSettings.clipAllWeights(1.0)])
    np.testing.assert_allclose(clipped["a"], 2.0 / norm, rtol=1e-6)
    untouched = clip_by_norm(gradients, [popart.ClipNormSettings(["b"], 3.0)])
    np.testing.assert_array_equal(untouched["b"], gradients["b"])


def test_refuses_unknown_values() -> None:
    with pytest.raises(popart.popart_exception, match="'defaultLearningRate', the nearest"):
        popart.SGD({"defaultLearningrate": (0.1, True)})
    with pytest.raises(popart.popart_exception, match="'momentum', the nearest"):
        popart.SGD({}).insertSpecific("w", {"momentums": (0.1, True)})
    with pytest.raises(popart.popart_exception, match="lossScaling"):  # the loss has one scale
        popart.SGD({}).insertSpecific("w", {"lossScaling": (8.0, True)})
    with pytest.raises(popart.popart_exception, match=r"\(number, isConst\)"):
        popart.Adam({"defaultBeta1": "much"})


@pytest.mark.parametrize(
    ("optimiser", "name", "number"),
    [
        (popart.SGD, "learningRate", -1),
        (popart.SGD, "momentum", -0.1),
        (popart.SGD, "velocityScaling", 0),
        (popart.SGD, "weightDecay", float("nan")),
        (popart.Adam, "beta2", -1),
        (popart.Adam, "eps", 0),
        (popart.Adam, "lossScaling", 0),
        (popart.Adam, "lossScaling", 1e39),
    ],
)
def test_refuses_numbers_out_of_range(optimiser: Any, name: str, number: float) -> None:
    key = name if name == "lossScaling" else f"default{name[0].upper()}{name[1:]}"
    with pytest.raises(popart.popart_exception, match=f"{name} of {optimiser.__name__} is out of range"):
        optimiser({key: (number, True)})
    if name != "lossScaling":
        with pytest.raises(popart.popart_exception, match="is out of range"):
            optimiser({}).insertSpecific("w", {name: (number, True)})


def test_constant_values_stay() -> None:
    constant = popart.SGD({"defaultLearningRate": (0.1, True)})
    with pytest.raises(popart.popart_exception, match="learningRate is constant"):
        constant.check_successor(popart.SGD({"defaultLearningRate": (0.2, True)}))
    variable = popart.SGD({"defaultLearningRate": (0.1, False)})
    variable.check_successor(popart.SGD({"defaultLearningRate": (0.2, False)}))
    with pytest.raises(popart.popart_exception, match="another kind"):
        variable.check_successor(popart.Adam({}))


def updated_half(optimiser: Any, weight: float, x: list[float]) -> Array:
    """Return a float16 weight after an update with a micro-batch for each x: of gradients 0.001·x, scaled as asked."""
    builder = popart.Builder()
    operand = builder.addInputTensor(popart.TensorInfo("FLOAT16", [1]))
    w = builder.addInitializedInputTensor(np.full(1, weight, np.float16))
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.mul([operand, w])], 1e-3, popart.ReductionType.Sum)
    options = popart.SessionOptions()
    options.enableGradientAccumulation = len(x) > 1
    options.accumulationFactor = len(x)
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1, "tilesPerIPU": 4})
    flow = popart.DataFlow(1, {})
    session = popart.TrainingSession(builder.getModelProto(), flow, loss, optimiser, device, userOptions=options)
    session.prepareDevice()
    session.weightsFromHost()
    session.run(popart.PyStepIO({operand: np.array(x, np.float16)}, {}))
    session.weightsToHost()
    updated = np.empty(1, np.float16)
    session.readWeights(popart.PyWeightsIO({w: updated}))
    return updated


def test_scaled_gradients_of_half_precision_do_not_underflow() -> None:
    """A gradient of 1e-8 is zero in float16, and with the loss scale 0.0003."""
    adam = popart.Adam({"defaultLearningRate": (1.0, True), "lossScaling": (2.0**15, True)})
    np.testing.assert_array_equal(updated_half(adam, 1.0, [1e-5]), np.float16(1 - 1e-8 / (1e-8 + 1e-6)))


@pytest.mark.parametrize(("kind", "total"), [("FLOAT", 2050), ("FLOAT16", 2048), ("UNDEFINED", 2048)])
def test_gradients_are_summed_in_the_type_of_the_accumulator(kind: str, total: int) -> None:
    """2048 + 1 is 2048 in float16."""
    values = {"defaultLearningRate": (1.0, True), "lossScaling": (1000.0, True)}
    sgd = popart.SGD(values, accumType=getattr(popart.DataType, kind))
    np.testing.assert_allclose(updated_half(sgd, 0.5, [2048, 1, 1]), np.float16(0.5 - total / 1000), rtol=1e-3)


@pytest.mark.parametrize("is_tf", [False, True])
def test_the_variance_of_rounded_moments_is_not_negative(is_tf: bool) -> None:
    values = {"defaultAlpha": (0.9, True), "defaultLearningRate": (1e-6, True)}
    optimizer = popart.Adaptive(
        values,
        popart.AdaptiveMode.CenteredRMSProp,
        accl1_type=popart.DataType.FLOAT16,
        rmsprop_tf_variant=is_tf,
    )
    constants = optimizer.hyperparameters([])[""]
    gradient = jnp.linspace(0.1, 10, 500)  # the same in all steps: of variance zero
    weight = jnp.ones(500)
    state = optimizer.initial_state(weight, constants)
    step = jax.jit(lambda w, s: optimizer.updated(gradient, w, s, constants))
    for _ in range(100):
        weight, state = step(weight, state)
    assert bool(jnp.isfinite(weight).all())
