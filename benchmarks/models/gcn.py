"""A graph convolutional network on a graph of Cora's size: 2,708 nodes, 10,556 edges, 1,433 features, by Adam.

Source: Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks" (2017), with three layers
and without dropout.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ops import segment_sum

from ipujax.models.network_layers import cross_entropy, dense

from .mlp import perceptron_init
from .model import Model, Struct, trained


def gcn(
    nodes: int = 2708, edges: int = 10_556, widths: tuple[int, ...] = (1433, 64, 64, 7), labelled: int = 140
) -> Model:
    """The training step on the whole graph.

    Args:
        nodes: of the graph.
        edges: of the graph, both directions of each link.
        widths: features of nodes before the first and after each layer; the last are classes.
        labelled: nodes whose classes are known, the first ones.
    """

    def loss(params: Any, features: jax.Array, edges: Any, labels: jax.Array) -> jax.Array:
        senders = edges["senders"]
        receivers = edges["receivers"]
        degree = 1 + segment_sum(jnp.ones(len(receivers)), receivers, nodes)  # each node is its own neighbour too
        norm = lax.rsqrt(degree)[:, None]

        def convolve(p: Any, x: jax.Array) -> jax.Array:
            x = dense(p, x) * norm
            return (x + segment_sum(x[senders], receivers, nodes)) * norm

        x = features
        for p in params[:-1]:
            x = jax.nn.relu(convolve(p, x))
        logits = convolve(params[-1], x)[:labelled]
        return cross_entropy(logits, labels)

    links = {"senders": Struct((edges,), np.int32), "receivers": Struct((edges,), np.int32)}
    features = Struct((nodes, widths[0]), np.float32)
    labels = Struct((labelled,), np.int32)
    return trained("gcn", loss, lambda key: perceptron_init(key, *widths), optax.adam(1e-2), features, links, labels)
