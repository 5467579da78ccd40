"""Time and memory to lower and profile a training step of BERT-Large on a pipeline, from shapes alone.

    python benchmarks/bert_pipeline.py [--layers 24] [--stages 4] [--replicas 4] [--micro-batches 64] [--schedule 1f1b]

24 layers of 1,024 with 16 heads, sequences of 128, micro-batches of 8, half precision, Adam; stages of equally many
layers, each layer a call of one jitted function. Prints seconds, memory of this process, and figures of the profile.
Nothing is run or allocated: arguments are shapes.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu

HIDDEN = 1024
HEADS = 16
FEED = 4096
SEQUENCE = 128
ROWS = 8
WORDS = 30_528
HALF = jnp.float16


def norm(x: jax.Array, p: Any) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return (centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * p["scale"] + p["bias"]


@jax.jit
def layer(x: jax.Array, p: Any) -> jax.Array:
    """One encoder layer: attention and feed-forward, norms behind."""
    rows, length, _ = x.shape
    q, k, v = jnp.split((x @ p["qkv"] + p["qkv_bias"]).reshape(rows, length, 3 * HEADS, -1), 3, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (HIDDEN // HEADS) ** -0.5
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
    x = norm(x + mixed @ p["out"], p["norm1"])
    return norm(x + jax.nn.gelu(x @ p["up"] + p["up_bias"]) @ p["down"], p["norm2"])


def parameters(layers: int) -> Any:
    """Shapes of all parameters."""

    def half(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, HALF)

    def layer_shapes() -> Any:
        norms = {f"norm{n}": {"scale": half(HIDDEN), "bias": half(HIDDEN)} for n in (1, 2)}
        dense = {"qkv": half(HIDDEN, 3 * HIDDEN), "out": half(HIDDEN, HIDDEN)}
        dense |= {"up": half(HIDDEN, FEED), "down": half(FEED, HIDDEN)}
        return norms | dense | {"qkv_bias": half(3 * HIDDEN), "up_bias": half(FEED)}

    return {
        "table": half(WORDS, HIDDEN),
        "places": half(SEQUENCE, HIDDEN),
        "layers": [layer_shapes() for _ in range(layers)],
    }


def loss(stages: int) -> Any:
    def fun(params: Any, batch: Any) -> jax.Array:
        each = len(params["layers"]) // stages
        with ipu.stage(0):
            x = params["table"][batch["words"]] + params["places"]
        for number in range(stages):
            with ipu.stage(number):
                for p in params["layers"][number * each : (number + 1) * each]:
                    x = jax.checkpoint(layer)(x, p)
        with ipu.stage(stages - 1):
            scores = jax.nn.log_softmax((x[:, 0].astype(HALF) @ params["layers"][-1]["out"]).astype(jnp.float32))
            return -jnp.mean(jnp.take_along_axis(scores, batch["labels"][:, None], 1))

    return fun


def training_step(layers: int, stages: int, replicas: int, micro_batches: int, schedule: str) -> tuple[Any, Any]:
    """The step as `ipu.jit` makes it, and the shapes of its arguments."""
    optimizer = optax.adam(1e-4)

    def step(params: Any, state: Any, batch: Any) -> Any:
        fun = jax.value_and_grad(loss(stages))
        value, grads = ipu.pipeline(fun, micro_batches=micro_batches, schedule=schedule)(params, batch)
        value, grads = lax.pmean((value, grads), "replica")
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = parameters(layers)
    state = jax.eval_shape(optimizer.init, params)
    rows = replicas * micro_batches * ROWS
    batch = {
        "words": jax.ShapeDtypeStruct((rows, SEQUENCE), jnp.int32),
        "labels": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }
    run = ipu.jit(
        step,
        device=ipu.IPUModel(num_ipus=stages * replicas, arch="bow"),
        replicas=replicas,
        in_specs=(P(), P(), P("replica")),
        out_specs=P(),
        donate_argnums=(0, 1),
        options=ipu.Options(allow_out_of_memory=True),
    )
    return run, (params, state, batch)


def main() -> None:
    """Lowers, compiles and profiles one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("layers", 24), ("stages", 4), ("replicas", 4), ("micro-batches", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--schedule", default="1f1b")
    arguments = parser.parse_args()
    run, args = training_step(
        arguments.layers, arguments.stages, arguments.replicas, arguments.micro_batches, arguments.schedule
    )
    start = time.perf_counter()
    before = time.process_time()
    compiled = run.lower(*args).compile()
    profile = compiled.profile
    print(f"{profile.cycles:,} cycles, {profile.seconds * 1e3:.1f} ms a step")
    elapsed = time.perf_counter() - start
    worked = time.process_time() - before
    most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{elapsed:.1f} s ({worked:.1f} s of work), {most_bytes / 2**30:.2f} GiB")
    print({name: round(seconds, 2) for name, seconds in compiled.timings.items()})
    print(profile.phase_cycles)
    by_ipu = profile.memory.tile_bytes.reshape(arguments.stages, -1)
    cells = [
        f"{largest / 1024:.0f} ({mean / 1024:.0f})" for largest, mean in zip(by_ipu.max(1), by_ipu.mean(1), strict=True)
    ]
    print(f"fullest tile of each IPU, and mean: {', '.join(cells)} KiB")


if __name__ == "__main__":
    main()
