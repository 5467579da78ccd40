"""Trains a small transformer on four IPUs as a pipeline, after comparing the cost of each schedule.

    python examples/pipelining.py --tiles 64 --pictures schedules/

Each of four blocks is a stage on an IPU of its own: `with ipu.stage(i)`. `ipu.pipeline` splits a batch in
micro-batches, so that all four work at once; `ipu.pipeline_plan` compares schedules without running anything, and a
picture of each shows the tasks of each IPU over time. Then the best schedule of those that fit trains for 50 steps.

Task: to read the 1,797 handwritten digits that come with scikit-learn, row by row (Alpaydin and Kaynak, Optical
Recognition of Handwritten Digits, UCI, 1998).
"""

from __future__ import annotations

import argparse
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import ipujax as ipu

STAGES = 4
WIDTH = 32
HEADS = 4
ROWS = 8
CLASSES = 10
SEED = 0

Params = dict[str, Any]


# --- model ------------------------------------------------------------------------------------------------------------


def initial_parameters(key: jax.Array) -> Params:
    """Small random weights: a row of pixels becomes a vector, four blocks, ten scores."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    named = {f"{name}{n}": shape for n in range(STAGES) for name, shape in shapes.items()}
    named |= {"pixels": (ROWS, WIDTH), "places": (ROWS, WIDTH), "scores": (WIDTH, CLASSES)}
    keys = jax.random.split(key, len(named))
    return {
        name: jax.random.normal(k, shape) / shape[0] ** 0.5
        for k, (name, shape) in zip(keys, named.items(), strict=True)
    }


def normalised(x: jax.Array) -> jax.Array:
    """Mean 0 and variance 1 in each vector."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def block(params: Params, number: int, x: jax.Array) -> jax.Array:
    """Attention and a layer of two products."""
    q, k, v = jnp.split(normalised(x) @ params[f"qkv{number}"], 3, -1)
    q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ params[f"out{number}"]
    return x + jax.nn.relu(normalised(x) @ params[f"up{number}"]) @ params[f"down{number}"]


def loss(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy; every block is a stage."""
    with ipu.stage(0):
        x = batch["images"] @ params["pixels"] + params["places"]
    for number in range(STAGES):
        with ipu.stage(number):
            x = block(params, number, x)
    with ipu.stage(STAGES - 1):
        scores = normalised(x).mean(1) @ params["scores"]
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["labels"]).mean()


# --- pictures ---------------------------------------------------------------------------------------------------------

COLOURS = {
    "forward": (70, 130, 180),
    "backward": (205, 92, 92),
    "backward_input": (205, 92, 92),
    "backward_weight": (218, 165, 32),
}


def draw(tasks: Sequence[ipu.TaskTime], path: Path, width: int = 1200, row: int = 30) -> None:
    """A row an IPU, a bar a task, shades by micro-batch, white where the IPU waits."""
    ipus = 1 + max(task.ipu for task in tasks)
    length = max(task.end for task in tasks)
    pixels = np.full((ipus * row, width, 3), 255, np.uint8)
    for task in tasks:
        first, last = (round(at / length * (width - 1)) for at in (task.start, task.end))
        shade = 1 - 0.4 * (task.micro_batch % 2)
        top = task.ipu * row + 3
        pixels[top : top + row - 6, first : max(last - 1, first + 1)] = np.multiply(COLOURS[task.kind], shade)
    write_png(path, pixels)


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Writes uint8[height, width, 3] as PNG (RFC 2083): a header, the rows, an end."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + line.tobytes() for line in pixels)  # 0: the row is not filtered
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


# --- comparison and training ------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> float:
    """Runs the example; returns the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, default=64, help="tiles of an IPU")
    parser.add_argument("--batch", type=int, default=128, help="images of a step")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16], help="numbers to compare")
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "grouped", "interleaved", "zb-h1"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each schedule")
    args = parser.parse_args(argv)

    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    device = ipu.IPUModel(num_ipus=STAGES, tiles_per_ipu=args.tiles)
    params = initial_parameters(jax.random.key(SEED))
    shapes = {
        "images": jax.ShapeDtypeStruct((args.batch, ROWS, ROWS), np.float32),
        "labels": jax.ShapeDtypeStruct((args.batch,), np.int32),
    }
    gradients = jax.value_and_grad(loss)
    plan = ipu.pipeline_plan(
        gradients, params, shapes, micro_batches=args.micro_batches, schedules=args.schedules, device=device
    )

    if args.pictures is not None:
        args.pictures.mkdir(parents=True, exist_ok=True)
        for row in plan:
            if row.refused is None:
                fun = ipu.pipeline(gradients, micro_batches=row.micro_batches, schedule=row.schedule)
                compiled = ipu.jit(fun, device=device).lower(params, shapes).compile()
                path = args.pictures / f"{row.schedule}-{row.micro_batches}.png"
                draw(ipu.pipeline_tasks(compiled), path)
                print(f"drawn: {path}")

    best = plan.best()
    print(f"training with {best.schedule}, {best.micro_batches} micro-batches")
    optimizer = optax.adam(3e-3)

    @ipu.jit(device=device, donate_argnums=(0, 1))
    def step(params: Params, state: Any, batch: Any) -> Any:
        grad_fn = ipu.pipeline(gradients, micro_batches=best.micro_batches, schedule=best.schedule)
        value, grads = grad_fn(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    rng = np.random.default_rng(SEED)
    value = np.inf
    for number in range(1, args.steps + 1):
        chosen = rng.integers(0, len(images), args.batch)
        params, state, value = step(params, state, {"images": images[chosen], "labels": labels[chosen]})
        if number % 10 == 0 or number == args.steps:
            print(f"step {number:3}  loss {float(value):.4f}")
    return float(value)


if __name__ == "__main__":
    main()
