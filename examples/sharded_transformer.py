"""Trains two transformer blocks on 2 × 2 × 2 IPUs, data × model × stage, and on each axis alone.

    python examples/sharded_transformer.py --width 256 --heads 8 --length 128 --tiles 1472

Dimensions have logical names, and a table assigns an axis of the mesh to each name, as in MaxText: the batch is split
over `data`, heads and hidden features over `model`. There is no other annotation; the compiler adds the collectives.
The second block is the second stage of a pipeline. A row of the table is a layout: cycles of a training step, memory of
the fullest tile, collectives over each axis, and the losses of some steps, which are equal in all layouts.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ipujax as ipu

VOCABULARY = 64
LEARNING_RATE = 0.1
AXIS_OF = {"batch": "data", "heads": "model", "hidden": "model"}  # mesh axis of each dimension that is split
DIMS = {  # names of the dimensions of each parameter of a block
    "qkv": ("three", "features", "heads", "head features"),
    "out": ("heads", "head features", "features"),
    "gate": ("features", "hidden"),
    "up": ("features", "hidden"),
    "down": ("hidden", "features"),
}


@dataclass(frozen=True)
class Layout:
    """Number of IPUs along each axis."""

    data: int = 1
    model: int = 1
    stages: int = 1

    @property
    def num_ipus(self) -> int:
        """IPUs of all axes together."""
        return self.data * self.model * self.stages

    def split(self, x: jax.Array, *dims: str) -> jax.Array:
        """Splits the dimensions of an array by their names."""
        mesh = ipu.make_mesh((self.data, self.model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        spec = PartitionSpec(*(AXIS_OF.get(name) for name in dims))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


# --- the model --------------------------------------------------------------------------------------------------------


def normalized(x: jax.Array) -> jax.Array:
    """Root mean square norm over the features."""
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def block(params: Any, x: jax.Array) -> jax.Array:
    """Causal attention and a gated feed-forward layer, each with a residual; x is [batch, length, features]."""
    q, k, v = jnp.einsum("bsd,ndhe->nbhse", normalized(x), params["qkv"])
    scores = jnp.einsum("bhse,bhte->bhst", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    x = x + jnp.einsum("bhst,bhte,hed->bsd", weights, v, params["out"])
    h = normalized(x)
    return x + (jax.nn.silu(h @ params["gate"]) * (h @ params["up"])) @ params["down"]


def make_loss(layout: Layout) -> Any:
    """The loss of a batch of tokens [batch, length + 1]: cross-entropy of each next token."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        first, second = ({k: layout.split(v, *DIMS[k]) for k, v in p.items()} for p in params["blocks"])
        with ipu.stage(0):
            x = layout.split(params["embedding"][tokens[:, :-1]], "batch", "length", "features")
            x = block(first, x)
        with ipu.stage(layout.stages - 1):
            logits = normalized(block(second, x)) @ params["head"]
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], 2)
            return -picked.mean()

    return loss


def make_train_step(layout: Layout, tiles: int, micro_batches: int) -> Any:
    """A step of gradient descent: parameters and tokens to parameters and loss."""

    @ipu.jit(device=ipu.IPUModel(num_ipus=layout.num_ipus, tiles_per_ipu=tiles), donate_argnums=0)
    def train_step(params, tokens):
        value_and_grad = ipu.pipeline(jax.value_and_grad(make_loss(layout)), micro_batches=micro_batches)
        value, grads = value_and_grad(params, tokens)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), value

    return train_step


def init(width: int, heads: int) -> Any:
    """Parameters of both blocks, the embedding and the head."""
    rng = np.random.default_rng(0)
    size = {"three": 3, "features": width, "heads": heads, "head features": width // heads, "hidden": 4 * width}

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, width**-0.5, shape), jnp.float32)

    def parameters() -> dict[str, jax.Array]:
        return {name: normal(*(size[dim] for dim in dims)) for name, dims in DIMS.items()}

    return {
        "embedding": normal(VOCABULARY, width),
        "blocks": [parameters(), parameters()],
        "head": normal(width, VOCABULARY),
    }


def batch_of(sequences: int, length: int) -> np.ndarray:
    """Arithmetic progressions modulo the vocabulary, int32 [sequences, length + 1]."""
    first, step = np.random.default_rng(1).integers(0, VOCABULARY, (2, sequences, 1))
    return ((first + step * np.arange(length + 1)) % VOCABULARY).astype(np.int32)


# --- the layouts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A training step on one layout."""

    layout: Layout
    cycles: int
    worst_tile_bytes: int
    collectives: dict[str, int]  # by the axes whose IPUs communicate
    losses: list[float]


def measure(layout: Layout, params: Any, tokens: np.ndarray, args: argparse.Namespace) -> Row:
    """Compiles a training step, reads its profile, and runs it some times."""
    compiled = make_train_step(layout, args.tiles, args.micro_batches).lower(params, tokens).compile()
    moves = compiled.partitioning.notes.moves if layout.data * layout.model > 1 else ()
    profile = compiled.profile
    # The step takes the arrays for its results.
    params = jax.tree.map(jnp.copy, params)
    losses = []
    for _ in range(args.steps):
        params, loss = compiled(params, tokens)
        losses.append(float(loss))
    axes = Counter(" and ".join(move.step.axes) for move in moves)
    return Row(layout, profile.cycles, int(profile.memory.max_tile_bytes), dict(axes), losses)


def table(rows: Sequence[Row]) -> str:
    """A line a layout."""
    lines = ["data × model × stages     cycles   worst tile  collectives                    losses"]
    for row in rows:
        layout = row.layout
        collectives = ", ".join(f"{n} over {axes}" for axes, n in row.collectives.items()) or "none"
        lines.append(
            f"{layout.data:4} ×{layout.model:6} ×{layout.stages:7}{row.cycles:11,}"
            f"{row.worst_tile_bytes / 1024:9.1f} KiB  {collectives:31}{'  '.join(f'{x:.6f}' for x in row.losses)}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the example; returns a row for each layout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=128, help="features of a token")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a training step")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="training steps to run on each layout")
    parser.add_argument("--tiles", type=int, default=256, help="of an IPU")
    args = parser.parse_args(argv)
    if args.heads % 2 or args.width % args.heads or args.batch % (2 * args.micro_batches):
        parser.error("--heads must be even and divide --width, and --batch a multiple of 2 × --micro-batches")

    params = init(args.width, args.heads)
    tokens = batch_of(args.batch, args.length)
    layouts = Layout(), Layout(data=2), Layout(model=2), Layout(stages=2), Layout(2, 2, 2)
    rows = [measure(layout, params, tokens, args) for layout in layouts]
    print(table(rows))
    return rows


if __name__ == "__main__":
    main()
