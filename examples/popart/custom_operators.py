"""Two operators that PopART lacks, cube and leaky ReLU, each with a forward and a backward part.

    python examples/popart/custom_operators.py --alpha 0.02 0.1 -0.1

An operator is a JAX function that is registered for a domain and a type; `jax.custom_vjp` defines its backward part.
With `ipu.codelet_call` it could run a codelet of the user.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import ipujax.popart as popart
from ipujax.onnx import register

DOMAIN = "com.acme"


# --- cube: x³, with the gradient 3 x² ---------------------------------------------------------------------------------


@jax.custom_vjp
def cube(x: jax.Array) -> jax.Array:
    """Return x³."""
    return x * x * x


def cube_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return x³, and x, which the backward part reads."""
    return cube(x), x


def cube_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    """Return the gradient of x."""
    return (3 * x * x * gradient,)


cube.defvjp(cube_forward, cube_backward)
register(DOMAIN, "Cube")(lambda x: cube(x))


# --- leaky ReLU, with a slope that is an attribute --------------------------------------------------------------------


@register(DOMAIN, "LeakyRelu")
def leaky_relu(x: jax.Array, *, alpha: float = 0.02) -> jax.Array:
    """Return x where it is positive, alpha · x elsewhere."""

    @jax.custom_vjp
    def forward(value: jax.Array) -> jax.Array:
        return jnp.where(value > 0, value, alpha * value)

    forward.defvjp(lambda value: (forward(value), value), lambda value, g: (jnp.where(value > 0, g, alpha * g),))
    result: jax.Array = forward(x)
    return result


# --- a program with both ----------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Run both operators with their gradients; print results and profile, return the anchors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpha", type=float, default=0.1, help="slope of the leaky ReLU below zero")
    parser.add_argument(
        "--ipu", action="store_true", help="acquire an IPU, simulated too, in the place of a model of one"
    )
    parser.add_argument("input_data", type=float, nargs="*", default=np.linspace(-1, 1, 8).tolist(), metavar="X",
                        help="elements of the input")  # fmt: skip
    args = parser.parse_args(arguments)
    data = np.array(args.input_data, np.float32)
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", list(data.shape), "x")
    (cubed,) = builder.customOp(opName="Cube", opVersion=1, domain=DOMAIN, inputs=[x], attributes={})
    (leaky,) = builder.customOp(
        opName="LeakyRelu", opVersion=1, domain=DOMAIN, inputs=[cubed], attributes={"alpha": args.alpha}, name="leaky"
    )
    loss = builder.aiGraphcore.identityloss([leaky], popart.ReductionType.Sum)
    gradient = popart.reservedGradientPrefix() + x
    flow = popart.DataFlow(1, [cubed, leaky, gradient])
    manager = popart.DeviceManager()
    device = manager.acquireAvailableDevice(1) if args.ipu else manager.createIpuModelDevice({"numIPUs": 1})
    session = popart.TrainingSession(builder.getModelProto(), flow, loss, popart.ConstSGD(0.1), device)
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: data}, anchors))
    for name, values in zip(("x", "cube", "leaky ReLU", "gradient"), (data, *anchors.values()), strict=True):
        print(f"{name:>10}:", np.array2string(values, precision=3))
    np.testing.assert_allclose(anchors[gradient], 3 * data**2 * np.where(data > 0, 1, args.alpha), rtol=1e-5)
    print(session.getReport().summary())
    return anchors


if __name__ == "__main__":
    main()
