"""Primitives: one record of what is true of each, which passes and cost estimates read."""

from typing import TYPE_CHECKING

from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.lowering.popops import exact_value as exact_value
    from ipujax.lowering.primitives.record import (
        Factors as Factors,
        Labels as Labels,
        Problem as Problem,
        elementwise as elementwise,
        shapes as shapes,
    )
    from ipujax.lowering.primitives.record_table import (
        RECORDS as RECORDS,
        has_state as has_state,
        is_matrix_product as is_matrix_product,
        record_of as record_of,
    )
    from ipujax.lowering.primitives.shape_records import INDEX as INDEX, LOOK_UPS as LOOK_UPS
else:
    __getattr__ = lazy_names(__name__)
