"""Primitives: one record of what is true of each, which passes and cost estimates read."""

from typing import TYPE_CHECKING

from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.lowering.primitives.factors import (
        Factors as Factors,
        Labels as Labels,
        elementwise as elementwise,
        shapes as shapes,
    )
    from ipujax.lowering.primitives.indexing_records import INDEX as INDEX
    from ipujax.lowering.primitives.record import PrimitiveRecord as PrimitiveRecord
    from ipujax.lowering.primitives.record_table import RECORDS as RECORDS, record_of as record_of
else:
    __getattr__ = lazy_names(__name__)
