"""`ipu.check`: a function by plain JAX, by its lowered program and by the tile interpreter, compared.

compiled program, arguments ── compiled ──▶ CheckReport
    passes       jaxprs after each pass, by plain JAX
    equations    each equation of the program, from the program's own operands
    rounding     which differences rounding explains
"""

from ipujax.checking.compiled import check_compiled as check_compiled
from ipujax.checking.report import (
    CheckReport as CheckReport,
    Mismatch as Mismatch,
    ResultDifference as ResultDifference,
)
