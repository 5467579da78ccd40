"""popsolver: a small solver of constraints over whole numbers, under Poplar's names in snake_case.

    from ipujax import popsolver

    m = popsolver.Model()
    rows, columns = m.add_variable(1, 64, "rows"), m.add_variable(1, 64, "columns")
    m.less_or_equal(m.product([rows, columns]), 64)
    worst = m.product([m.ceildiv(m.add_constant(100), rows), m.ceildiv(m.add_constant(40), columns)])
    m.minimise(worst)[rows]

Source: PopLibs, `popsolver/Model.hpp`. Limits: domains are intervals; a `call` narrows nothing until all its operands
have values.
"""

from ipujax.popsolver.solver import (
    MAX_VALUE as MAX_VALUE,
    InfeasibleModelError as InfeasibleModelError,
    Model as Model,
    SearchLimitError as SearchLimitError,
    Solution as Solution,
    Variable as Variable,
)
from ipujax.public import public_names as _public_names

__dir__ = _public_names(globals())
