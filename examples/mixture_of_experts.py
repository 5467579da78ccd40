"""Trains a mixture of experts whose experts are split over IPUs: all-to-alls send tokens to them.

    python examples/mixture_of_experts.py --features 256 --tokens 256 --tiles 1472

Each IPU has groups of tokens and some experts. A gate sends each token to one expert, at most `capacity` of a group to
each (the layout of GShard, arXiv:2006.16668, with one expert a token as in Switch, arXiv:2101.03961). The layer is
written twice: for one device, with two sharding constraints, between which the compiler inserts all-to-alls; and by
hand with `jax.lax.all_to_all` in a `jax.shard_map`. A row of the table is a number of IPUs: cycles of a step in both
forms, collectives that the compiler added, and losses.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu

LEARNING_RATE = 0.5
SPECS = {"gate": P(), "up": P("expert"), "down": P("expert")}  # of the parameters
GROUPS = P("expert")  # of the tokens


# --- the layer --------------------------------------------------------------------------------------------------------


def route(tokens: jax.Array, gate: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Places of tokens [group, token, expert, place], 1 or 0, and the same times the gate's probability."""
    probabilities = jax.nn.softmax(tokens @ gate)
    chosen = jax.nn.one_hot(probabilities.argmax(-1), gate.shape[1])
    place = (jnp.cumsum(chosen, 1) - 1) * chosen  # of a token among those of its group with the same expert
    # Tokens beyond the capacity go to no expert: only their residual remains.
    places = chosen[..., None] * jax.nn.one_hot(place.astype(jnp.int32), capacity)
    return places, places * probabilities.max(-1)[..., None, None]


def mixture(
    params: Any, tokens: jax.Array, capacity: int, to_experts: Callable[..., Any], to_groups: Callable[..., Any]
) -> jax.Array:
    """Tokens [group, token, feature] after their experts; `to_experts` and `to_groups` move [expert, group, …]."""
    places, weighted = route(tokens, params["gate"], capacity)
    sent = to_experts(jnp.einsum("gtec,gtf->egcf", places, tokens))
    hidden = jax.nn.relu(jnp.einsum("egcf,efh->egch", sent, params["up"]))
    processed = to_groups(jnp.einsum("egch,ehf->egcf", hidden, params["down"]))
    return tokens + jnp.einsum("gtec,egcf->gtf", weighted, processed)


def by_sharding(mesh: AbstractMesh, capacity: int) -> Callable[..., jax.Array]:
    """The layer of one device: constraints say where experts and groups are."""

    def constraint(spec: P) -> Callable[[jax.Array], jax.Array]:
        return lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return lambda params, tokens: mixture(
        params, tokens, capacity, constraint(P("expert")), constraint(P(None, "expert"))
    )


def by_hand(mesh: AbstractMesh, capacity: int) -> Callable[..., jax.Array]:
    """The layer of each device, which sends places of its groups and receives places for its experts."""

    def local(params: Any, tokens: jax.Array) -> jax.Array:
        def exchange(split_dim: int, dim: int) -> Callable[[jax.Array], jax.Array]:
            return lambda x: jax.lax.all_to_all(x, "expert", split_dim, dim, tiled=True)

        return mixture(params, tokens, capacity, exchange(0, 1), exchange(1, 0))

    return jax.shard_map(local, mesh=mesh, in_specs=(SPECS, GROUPS), out_specs=GROUPS)


# --- training ---------------------------------------------------------------------------------------------------------


def make_train_step(layer: Any, mesh: AbstractMesh, args: argparse.Namespace) -> Any:
    """A step of gradient descent on the distance of tokens from their targets."""
    capacity = 2 * args.tokens // args.experts  # twice the mean
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    groups = NamedSharding(mesh, GROUPS)

    @ipu.jit(
        device=ipu.IPUModel(num_ipus=mesh.size, tiles_per_ipu=args.tiles),
        in_shardings=(shardings, groups, groups) if mesh.size > 1 else None,
        out_shardings=(shardings, NamedSharding(mesh, P())) if mesh.size > 1 else None,
        donate_argnums=0,
    )
    def train_step(params, tokens, targets):
        def loss(params):
            return ((layer(mesh, capacity)(params, tokens) - targets) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), value

    return train_step


def init(args: argparse.Namespace) -> tuple[Any, jax.Array, jax.Array]:
    """Parameters, tokens and targets."""
    rng = np.random.default_rng(0)
    features = args.features
    hidden = 4 * args.features

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(0, scale, shape), jnp.float32)

    params = {
        "gate": normal(features, args.experts, scale=features**-0.5),
        "up": normal(args.experts, features, hidden, scale=features**-0.5),
        "down": normal(args.experts, hidden, features, scale=hidden**-0.5),
    }
    tokens = normal(args.groups, args.tokens, features)
    return params, tokens, jnp.sin(tokens)


@dataclass(frozen=True)
class Row:
    """A training step on some IPUs."""

    num_ipus: int
    cycles: int
    cycles_by_hand: int
    collectives: dict[str, int]  # that the compiler added, by kind
    losses: list[float]


def measure(num_ipus: int, args: argparse.Namespace) -> Row:
    """Compiles both layers, reads their profiles, and runs that of shardings some times."""
    mesh = ipu.make_mesh((num_ipus,), ("expert",), axis_types=(AxisType.Auto,))
    params, tokens, targets = init(args)
    compiled = make_train_step(by_sharding, mesh, args).lower(params, tokens, targets).compile()
    hand = make_train_step(by_hand, mesh, args).profile(params, tokens, targets)
    moves = compiled.partitioning.notes.moves if num_ipus > 1 else ()
    losses = []
    for _ in range(args.steps):
        params, loss = compiled(params, tokens, targets)
        losses.append(float(loss))
    return Row(num_ipus, compiled.profile.cycles, hand.cycles, dict(Counter(m.step.kind for m in moves)), losses)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the example; returns a row for each number of IPUs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ipus", type=int, nargs="+", default=[1, 2, 4, 8], help="each becomes a row")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8, help="of tokens")
    parser.add_argument("--tokens", type=int, default=128, help="of a group")
    parser.add_argument("--features", type=int, default=128, help="of a token")
    parser.add_argument("--steps", type=int, default=3, help="training steps to run on each number of IPUs")
    parser.add_argument("--tiles", type=int, default=256, help="of an IPU")
    args = parser.parse_args(argv)
    if any(args.experts % n or args.groups % n for n in args.ipus) or args.tokens % args.experts:
        parser.error("all --ipus must divide --experts and --groups, and --experts --tokens")
    rows = []
    print("IPUs      cycles     by hand  losses and collectives")
    for num_ipus in args.ipus:
        row = measure(num_ipus, args)
        collectives = ", ".join(f"{n} {kind}" for kind, n in row.collectives.items()) or "none"
        losses = "  ".join(f"{loss:.6f}" for loss in row.losses)
        print(f"{num_ipus:4}{row.cycles:12,}{row.cycles_by_hand:12,}  {losses}  {collectives}", flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
