"""Table of the records of primitives."""

from __future__ import annotations

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.popops import OP_COSTS
from ipujax.lowering.primitives import numeric_records, shape_records
from ipujax.lowering.primitives.numeric_records import elementwise_record
from ipujax.lowering.primitives.record import PrimitiveRecord

_FAMILIES = (shape_records, numeric_records)
_UNKNOWN = PrimitiveRecord()

RECORDS: dict[str, PrimitiveRecord] = {name: x for family in _FAMILIES for name, x in family.RECORDS.items()}
assert len(RECORDS) == sum(len(family.RECORDS) for family in _FAMILIES), "a primitive has two records"


def record_of(primitive: JaxprEqn | str) -> PrimitiveRecord:
    """The record of an equation's primitive, or of a name; one that tells nothing if there is none."""
    name = primitive if isinstance(primitive, str) else primitive.primitive.name
    if name in RECORDS:
        return RECORDS[name]
    # A row of costs that a user has added is enough for an elementwise primitive.
    return elementwise_record(name) if name in OP_COSTS else _UNKNOWN
