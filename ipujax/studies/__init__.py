"""Studies of many machines: `ipu.sweep` costs a function on each, `ipu.sensitivities` says which constants count.

function, grid ──points──▶ jobs ──point costs──▶ costs ──sweep──▶ `Sweep`, a table
"""

from typing import TYPE_CHECKING

from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.studies.sensitivity_table import Sensitivities as Sensitivities, sensitivities as sensitivities
    from ipujax.studies.sweep_table import Sweep as Sweep
    from ipujax.studies.sweeping import sweep as sweep
else:
    __getattr__ = lazy_names(__name__)
