"""Loss scaling that follows the gradients: halved when many of them are large, doubled when few are.

Source: PopART's `AutomaticLossScalingSettings`. Only gradients of weights count; PopART counts others too.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ipujax.popart.options import AutomaticLossScalingSettings

_LARGEST = 65504.0  # float16
_FACTOR = 2.0


def next_scale(gradients: Any, states: Any, settings: AutomaticLossScalingSettings) -> dict[str, Any]:
    """Return the loss scale of the next batch, and the number of batches since the last change.

    Args:
        gradients: scaled, by name of the weight.
        states: with "scale" and "batches".
        settings: of the session.
    """
    tracked = settings.toTrackTensors
    chosen = [g for name, g in gradients.items() if not tracked or name in tracked]
    # The gradients are scaled still: a share of float16's range is their distance to overflow.
    edge = settings.binEdgeLocation * _LARGEST
    large = sum(jnp.sum(jnp.abs(g.astype(jnp.float32)) > edge) for g in chosen)
    share = large / sum(g.size for g in chosen)
    is_above = share > settings.thresholdUpperCountProportion
    batches = states["batches"] + 1
    is_due = batches >= settings.updatePeriod
    changed = jnp.where(is_above, states["scale"] / _FACTOR, states["scale"] * _FACTOR)
    return {
        "scale": jnp.where(is_due, changed, states["scale"]),
        "batches": jnp.where(is_due, 0, batches),
    }
