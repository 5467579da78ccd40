"""A function of one device over several replicas: its batch is split, all else is whole on each.

A script that knows of one device does not say which arguments are a batch. State has a result of its own shape and
dtype (weights, the optimiser's state); a batch has none, and its arrays have equally many rows. Shardings of these rows
over one IPU for each replica let the pass `partition` add the sums over the batch, so results stay the script's.

Input: a record. Output: its shardings.
Limits: where more than one number of rows remains, the batch is unknown, and `batch_size` has to name it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ipujax.jax_scripts.recorder import FunctionRecord
from ipujax.runtime.errors import ArgumentError
from ipujax.sharding import CallShardings

_AXIS = "replica"


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """Number of replicas, and of rows of a batch.

    Args:
        replicas: number of replicas.
        batch_size: rows of a batch; None for those of all arguments that are no state, if they are equally many.
    """

    replicas: int
    batch_size: int | None = None

    def shardings(self, record: FunctionRecord) -> CallShardings:
        """Return the shardings of a function.

        Raises:
            ArgumentError: a batch that is unknown, or that the replicas do not divide.
        """
        assert record.jaxpr is not None
        inputs = record.jaxpr.in_avals
        results = tuple(record.jaxpr.out_avals)
        states = set(map(_type_of, results))
        rows = sorted({x.shape[0] for x in inputs if _has_rows(x) and _type_of(x) not in states})
        size = self.batch_size
        if size is None and len(rows) == 1:
            (size,) = rows
        if size is None or size not in rows:
            raise ArgumentError(
                f"the batch is not known: arguments that are no state have {', '.join(map(str, rows)) or 'no'} rows",
                expected="one number of rows",
                got=f"replicas={self.replicas}, batch_size={self.batch_size}",
                hint="batch_size=, --batch-size",
            )
        if size % self.replicas:
            raise ArgumentError(
                f"{self.replicas} replicas do not divide a batch of {size} rows",
                expected="a divisor",
                got=self.replicas,
            )
        mesh = AbstractMesh((self.replicas,), (_AXIS,), axis_types=(AxisType.Auto,))
        split = NamedSharding(mesh, PartitionSpec(_AXIS))
        whole = NamedSharding(mesh, PartitionSpec())
        state = states & set(map(_type_of, inputs))

        def is_batch(x: Any) -> bool:
            return _has_rows(x) and x.shape[0] == size and _type_of(x) not in state

        return CallShardings(
            tuple(split if is_batch(x) else None for x in inputs),
            tuple(split if is_batch(x) else whole for x in results),
        )

    def __str__(self) -> str:
        rows = "the batch" if self.batch_size is None else f"a batch of {self.batch_size} rows"
        return f"{rows} split over {self.replicas} replicas"


def _type_of(x: Any) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype


def _has_rows(x: Any) -> bool:
    return len(x.shape) > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
