"""`ipu.check`: a function by plain JAX, by its lowered program and by the tile interpreter, compared.

compiled program, arguments ── compiled_program ──▶ CheckReport
    comparisons         jaxprs after each pass, by plain JAX; each equation, from the program's own operands
    differences         which differences rounding explains
"""

from ipujax.checking.check_report import CheckReport as CheckReport
from ipujax.checking.compiled_program import check_compiled as check_compiled
