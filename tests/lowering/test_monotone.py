"""More tiles never cost time, more work never saves it: planned operations and training steps, by simulated cycles.

Costs are those of the compiled program without the host's exchange. The clock and all widths are the same for each size
of target.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from ipujax.runtime.compile import compile
from ipujax.runtime.profile import Profile
from tests.lowering.helpers import lowered, small_target
from tests.marks import slow_but

TILES = (64, 100, 256, 777, 1024, 1216, 1472)
FEW_TILES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 64, 187, 1150, 1472)
STEP_SLACK = 1.05  # a step is many small operations, each planned by itself
Call = tuple[Callable[..., Any], tuple[Any, ...]]
Struct = jax.ShapeDtypeStruct


def cost(call: Call, tiles: int) -> tuple[int, int]:
    """Cycles of a call on the device, and cycles of all its workers together."""
    program = lowered(*call, small_target(tiles))
    assert not program.graph.fallbacks
    profile = Profile(compile(program.graph, program.program))
    return profile.cycles - profile.phase_cycles["host_exchange"], profile.total_worker_cycles


def product(m: int, k: int, n: int, dtype: Any = np.float32) -> Call:
    """A matrix product."""
    return jnp.dot, (Struct((m, k), dtype), Struct((k, n), dtype))


def batched(groups: int, m: int, k: int, n: int) -> Call:
    """Matrix products side by side."""
    return partial(jnp.einsum, "gmk,gkn->gmn"), (Struct((groups, m, k), np.float32), Struct((groups, k, n), np.float32))


def convolution(
    batch: int, size: int, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, dtype: Any = np.float32
) -> Call:
    """A convolution of a square image."""
    fun = partial(
        lax.conv_general_dilated,
        window_strides=(stride, stride),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    image, weights = (batch, size, size, inputs), (kernel, kernel, inputs, outputs)
    return fun, (Struct(image, dtype), Struct(weights, dtype))


OPERATIONS: dict[str, Call] = {
    "square": product(64, 64, 64),
    "large": product(1024, 1024, 1024),
    "odd": product(333, 777, 111),
    "row": product(1, 1024, 1024),
    "column": product(2048, 512, 1),
    "deep": product(8, 20000, 8),
    "half": product(512, 512, 2048, np.float16),
    "tiny": product(3, 5, 7),
    "mnist": product(128, 784, 300),
    "attention": batched(24, 65, 32, 65),
    "first": convolution(8, 28, 3, 16),
    "middle": convolution(4, 14, 64, 128),
    "wide": convolution(2, 56, 64, 64),
    "pointwise": convolution(4, 14, 256, 64, kernel=1),
    "strided": convolution(4, 32, 16, 32, stride=2),
    "half-convolution": convolution(2, 28, 64, 64, dtype=np.float16),
    "small-convolution": convolution(1, 5, 1, 3),
    "stem": convolution(1, 112, 3, 64, kernel=7, stride=2),
    "one-channel": convolution(16, 28, 1, 8, kernel=5),
    "many-channels": convolution(1, 7, 512, 512),
}


@pytest.mark.parametrize("name", slow_but([*OPERATIONS][::2], OPERATIONS))
def test_more_tiles_never_slow_an_operation(name: str) -> None:
    cycles = [cost(OPERATIONS[name], tiles)[0] for tiles in TILES]
    slower = [(a, b) for a, b in pairwise(zip(TILES, cycles, strict=True)) if b[1] > a[1]]
    assert not slower


def weight_gradient(image: tuple[int, ...], outputs: int, kernel: int, dtype: Any = np.float32) -> Call:
    """The gradient of a convolution by its weights."""

    def gradient(x: Any, cotangent: Any) -> Any:
        weights = jnp.zeros((kernel, kernel, image[-1], outputs), dtype)
        return jax.vjp(lambda w: convolve(x, w), weights)[1](cotangent)[0]

    return gradient, (Struct(image, dtype), Struct((*image[:-1], outputs), dtype))


def input_gradient(image: tuple[int, ...], outputs: int, kernel: int) -> Call:
    """The gradient of a convolution by its input: the weights are read backwards."""

    def gradient(weights: Any, cotangent: Any) -> Any:
        return jax.vjp(lambda x: convolve(x, weights), jnp.zeros(image, np.float32))[1](cotangent)[0]

    weights = Struct((kernel, kernel, image[-1], outputs), np.float32)
    return gradient, (weights, Struct((*image[:-1], outputs), np.float32))


def convolve(x: Any, weights: Any, groups: int = 1) -> Any:
    """A convolution that keeps the size of the image."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, weights, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)


SMALL_OPERATIONS: dict[str, Call] = {
    "half": product(7, 7, 7, np.float16),
    "half-square": product(64, 64, 64, np.float16),
    "half-thin": product(124, 26, 29, np.float16),
    "matrix-vector": product(19, 316, 1),
    "bfloat16": product(33, 65, 17, jnp.bfloat16),
    "heads": (partial(jnp.einsum, "bhqd,bhkd->bhqk"), (Struct((2, 4, 50, 16), np.float32),) * 2),
    "heads-last": (partial(jnp.einsum, "bqhd,bkhd->bhqk"), (Struct((2, 50, 4, 16), np.float16),) * 2),
    "depthwise": (partial(convolve, groups=5), (Struct((1, 3, 3, 5), np.float32), Struct((3, 3, 1, 5), np.float32))),
    "half-convolution": convolution(12, 9, 9, 19, dtype=np.float16),
    "strided": convolution(5, 4, 3, 8, kernel=1, stride=2),
    "weight-gradient": weight_gradient((5, 3, 3, 18), 5, 1),
    "pointwise-weight-gradient": weight_gradient((7, 13, 13, 17), 2, 1),
    "half-weight-gradient": weight_gradient((3, 5, 5, 1), 21, 3, np.float16),
    "input-gradient": input_gradient((1, 1, 1, 1), 7, 3),
}


@pytest.mark.parametrize("name", SMALL_OPERATIONS)
def test_more_tiles_never_slow_a_small_operation(name: str) -> None:
    """From one tile on, where fixed costs weigh as much as the work."""
    cycles = [cost(SMALL_OPERATIONS[name], tiles)[0] for tiles in FEW_TILES]
    slower = [(a, b) for a, b in pairwise(zip(FEW_TILES, cycles, strict=True)) if b[1] > a[1]]
    assert not slower


@pytest.mark.parametrize("name", ["large", "mnist", "middle", "stem"])
def test_more_tiles_speed_a_large_operation_up(name: str) -> None:
    assert cost(OPERATIONS[name], 64)[0] > 3 * cost(OPERATIONS[name], 1472)[0]


BATCHED: dict[str, Callable[[int], Call]] = {
    "product": lambda batch: product(batch, 784, 300),
    "convolution": lambda batch: convolution(batch, 14, 16, 32),
    "elementwise": lambda batch: (jnp.tanh, (Struct((batch, 300), np.float32),)),
    "reduction": lambda batch: (lambda x: x.sum(0), (Struct((batch, 300), np.float32),)),
    "softmax": lambda batch: (jax.nn.softmax, (Struct((batch, 300), np.float32),)),
}


def step_of(
    loss: Callable[..., Any], optimizer: optax.GradientTransformation, params: Any, batch: tuple[Any, Any]
) -> Call:
    """A training step and its arguments."""

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, jax.eval_shape(optimizer.init, params), *batch)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mlp(batch: int) -> Call:
    """Three dense layers, trained with Adam."""
    sizes = (784, 300, 100, 10)
    params = [Struct(pair, np.float32) for pair in pairwise(sizes)]

    def loss(params: Any, x: Any, y: Any) -> Any:
        for weights in params[:-1]:
            x = jax.nn.relu(x @ weights)
        return cross_entropy(x @ params[-1], y)

    data = Struct((batch, 784), np.float32), Struct((batch,), np.int32)
    return step_of(loss, optax.adam(1e-3), params, data)


def cnn(batch: int) -> Call:
    """Two convolutions with pooling and a dense layer, trained with momentum."""
    shapes = {"first": (3, 3, 1, 16), "second": (3, 3, 16, 32), "dense": (7 * 7 * 32, 10), "bias": (10,)}
    params = {name: Struct(shape, np.float32) for name, shape in shapes.items()}

    def loss(params: Any, x: Any, y: Any) -> Any:
        for name in ("first", "second"):
            x = lax.conv_general_dilated(x, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return cross_entropy(x.reshape(len(x), -1) @ params["dense"] + params["bias"], y)

    data = Struct((batch, 28, 28, 1), np.float32), Struct((batch,), np.int32)
    return step_of(loss, optax.sgd(1e-2, momentum=0.9), params, data)


STEPS = {"mlp": mlp, "cnn": cnn}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.slow
def test_more_tiles_hardly_ever_slow_a_step(name: str) -> None:
    cycles = [cost(STEPS[name](16), tiles)[0] for tiles in TILES]
    slower = [(a, b) for a, b in pairwise(zip(TILES, cycles, strict=True)) if b[1] > STEP_SLACK * a[1]]
    assert not slower
    assert cycles[0] > 2 * cycles[-1]


@pytest.mark.parametrize("tiles", [100, 1472])
@pytest.mark.parametrize("name", [*BATCHED, *STEPS])
@pytest.mark.slow
def test_a_larger_batch_is_more_work(name: str, tiles: int) -> None:
    """Twice the batch takes more of the workers, and never less of the clock."""
    costs = [cost({**BATCHED, **STEPS}[name](batch), tiles) for batch in (8, 16, 32, 64, 128)]
    for (cycles, work), (more_cycles, more_work) in pairwise(costs):
        assert more_work > work, costs
        assert more_cycles >= cycles, costs
