"""A graph network that encodes, passes messages, and decodes: 512 nodes, 1,024 edges, 64 wide, by Adam.

Source: Battaglia et al., "Relational inductive biases, deep learning, and graph networks" (2018), without globals.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipujax.models.network_layers import Params, layer_norm, norm_init

from .mlp import perceptron, perceptron_init
from .model import Model, Struct, trained


def update_init(key: jax.Array, inputs: int, width: int) -> Params:
    """Parameters of `update`."""
    return {"layers": perceptron_init(key, inputs, width, width), "norm": norm_init(width)}


def update(p: Params, *parts: jax.Array) -> jax.Array:
    """A perceptron with a normalised result on the features of all parts."""
    return layer_norm(p["norm"], perceptron(p["layers"], jnp.concatenate(parts, -1)))


def graphnet(
    nodes: int = 512, edges: int = 1024, width: int = 64, rounds: int = 2, features: int = 16, outputs: int = 4
) -> Model:
    """The training step on one graph, to predict numbers for each node.

    Args:
        nodes: of the graph.
        edges: of the graph, directed.
        width: features of each node and edge between the encoder and the decoder.
        rounds: of messages, each with parameters of its own.
        features: given of each node, and of each edge.
        outputs: predicted of each node.
    """

    def init(key: jax.Array) -> Params:
        keys = iter(jax.random.split(key, 3 + 2 * rounds))
        return {
            "node": update_init(next(keys), features, width),
            "edge": update_init(next(keys), features, width),
            "rounds": [
                {"edge": update_init(next(keys), 3 * width, width), "node": update_init(next(keys), 2 * width, width)}
                for _ in range(rounds)
            ],
            "decoder": perceptron_init(next(keys), width, width, outputs),
        }

    def loss(params: Params, graph: Params, targets: jax.Array) -> jax.Array:
        x = update(params["node"], graph["nodes"])
        e = update(params["edge"], graph["edges"])
        for p in params["rounds"]:
            e = e + update(p["edge"], e, x[graph["senders"]], x[graph["receivers"]])
            received = jax.ops.segment_sum(e, graph["receivers"], nodes)
            x = x + update(p["node"], x, received)
        return ((perceptron(params["decoder"], x) - targets) ** 2).mean()

    graph = {
        "nodes": Struct((nodes, features), np.float32),
        "edges": Struct((edges, features), np.float32),
        "senders": Struct((edges,), np.int32),
        "receivers": Struct((edges,), np.int32),
    }
    return trained("graphnet", loss, init, optax.adam(1e-3), graph, Struct((nodes, outputs), np.float32))
