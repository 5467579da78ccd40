"""How much more a cycle counts where an array lies thinner than a vector for each worker of its tiles.

Spread over more tiles, work takes fewer cycles, but hardly fewer once each worker has a vector, while every further
tile pays its start. Where arrays would lie thinner than that, cycles count more: otherwise the optimizer of a small
network would take all of a chip for a gain under 1 %, and the less so the larger the batch.
"""

from __future__ import annotations

from ipujax.runtime.target import Target


def thinness_weight(num_tiles: float, num_bytes: int, target: Target, weight: float) -> float:
    """What a cycle of work on some tiles counts, 1 or more: the more, the less of a vector each of their workers has.

    Args:
        num_tiles: tiles that take part.
        num_bytes: of the array that lies there.
        target: the machine.
        weight: by how much a cycle counts more where each worker has one vector.
    """
    full_tiles = max(1.0, num_bytes / (target.worker_contexts * target.vector_width_bytes))
    return 1 + weight * (num_tiles / full_tiles) ** 2
