"""`ipu.check`: a function by plain JAX, by its lowered program and by the tile interpreter, compared.

compiled program, arguments ── compiled_program ──▶ CheckReport
    compared_passes     jaxprs after each pass, by plain JAX
    probed_equations    each equation of the program, from the program's own operands
    rounding            which differences rounding explains
"""

from ipujax.checking.check_report import (
    CheckReport as CheckReport,
    Mismatch as Mismatch,
    ResultDifference as ResultDifference,
)
from ipujax.checking.compiled_program import check_compiled as check_compiled
