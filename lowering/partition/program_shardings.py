"""Shardings of a program for the pass `partition`: of its arguments and results, and whether one splits a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding

from ipujax.lowering.partition.specs import MeshAxes, spec_of
from ipujax.runtime.target import Target


@dataclass(frozen=True, slots=True)
class Shardings:
    """Shardings of a program's arguments and results, and the machine that it is partitioned for.

    Args:
        inputs: sharding of each input, None for any; all None when empty.
        outputs: sharding of each result, likewise.
        target: machine whose cycles decide; a Mk2 when None.
    """

    inputs: tuple[NamedSharding | None, ...] = ()
    outputs: tuple[NamedSharding | None, ...] = ()
    target: Target | None = None


NONE = Shardings()


def splits(sharding: Any) -> bool:
    """True if devices of a named sharding have different parts of a value, or partial sums."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size <= 1:  # a mesh without axes has 0
        return False
    mesh = MeshAxes.of(sharding.mesh)
    return not spec_of(sharding.spec, len(sharding.spec.partitions), mesh).is_whole
