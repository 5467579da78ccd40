"""The filter of a hidden Markov model: the forward algorithm by `lax.scan`, in log space. Nothing is trained.

Source: Rabiner, "A Tutorial on Hidden Markov Models" (1989), section III A.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.nn import log_softmax, logsumexp

from .model import Model, Struct


def hmm(states: int = 32, symbols: int = 64, length: int = 128) -> Model:
    """The filter of one sequence: log probabilities of states given the symbols so far, and of all symbols.

    Args:
        states: hidden ones.
        symbols: that can be observed.
        length: symbols of a sequence.
    """

    def init(key: jax.Array) -> Any:
        shapes = {"start": (states,), "transition": (states, states), "emission": (symbols, states)}
        axes = {"start": 0, "transition": 1, "emission": 0}  # along these, probabilities add up to 1
        keys = jax.random.split(key, len(shapes))
        logits = {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
        return ({name: log_softmax(value, axes[name]) for name, value in logits.items()},)

    def step(params: Any, observations: jax.Array) -> tuple[jax.Array, jax.Array]:
        def observe(predicted: jax.Array, symbol: jax.Array) -> Any:
            joint = predicted + params["emission"][symbol]
            evidence = logsumexp(joint)
            filtered = joint - evidence
            return logsumexp(filtered[:, None] + params["transition"], 0), (filtered, evidence)

        _, (filtered, evidence) = lax.scan(observe, params["start"], observations)
        return filtered, evidence.sum()

    return Model("hmm", step, init, (Struct((length,), np.int32),), donate=False)
