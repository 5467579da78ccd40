"""`ClipNormSettings`: gradients scaled so that their norm, over some or all weights, is not above a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from ipujax.popart.exceptions import popart_exception


class ClipNormSettings:
    """Weights whose gradients are clipped together by their norm.

    Args:
        weightIds: names of the weights.
        maxNorm: largest norm.

    Raises:
        popart_exception: no positive norm.
    """

    def __init__(self, weightIds: Sequence[str], maxNorm: float) -> None:
        if not maxNorm > 0:
            raise popart_exception("maxNorm must be a positive number", expected="more than 0", got=maxNorm)
        self.weightIds: list[str] | None = list(weightIds)
        self.maxNorm = float(maxNorm)

    @staticmethod
    def clipWeights(weightIds: Sequence[str], maxNorm: float) -> ClipNormSettings:
        """Return settings for some weights."""
        return ClipNormSettings(weightIds, maxNorm)

    @staticmethod
    def clipAllWeights(maxNorm: float) -> ClipNormSettings:
        """Return settings for all weights."""
        settings = ClipNormSettings([], maxNorm)
        # None stands for all weights: their names are not known yet.
        settings.weightIds = None
        return settings

    def names(self, weights: Sequence[str]) -> list[str]:
        """Return the names of the weights, of all where none are named.

        Args:
            weights: names of all weights.
        """
        return list(weights) if self.weightIds is None else self.weightIds


def clip_by_norm(gradients: Mapping[str, jax.Array], settings: Sequence[ClipNormSettings]) -> dict[str, jax.Array]:
    """Return gradients of which no group has a norm above its limit.

    Args:
        gradients: by name of the weight, without loss scaling.
        settings: groups; a weight in several is clipped by each in turn.
    """
    clipped = dict(gradients)
    for group in settings:
        names = group.names(list(gradients))
        # Summed in float32: squares of float16 gradients overflow above 256.
        squares = [jnp.sum(jnp.square(clipped[name].astype(jnp.float32))) for name in names]
        norm = jnp.sqrt(jnp.sum(jnp.stack(squares)))
        # PopART divides by the larger of norm and limit, so that a norm of zero divides by the limit.
        scale = group.maxNorm / jnp.maximum(norm, group.maxNorm)
        for name in names:
            clipped[name] = (clipped[name] * scale).astype(clipped[name].dtype)
    return clipped
