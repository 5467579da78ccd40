"""Dumps of a compilation: jaxprs and graphs as DOT, all intermediate forms as JSON, and the tile map of variables.

IPUJAX_DOT, IPUJAX_DUMP ──▶ DumpRequest          jaxpr after each pass, graph, program ── Dumps ──▶ files
"""

from typing import TYPE_CHECKING

from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.lowering.dumps.dumps import (
        ENVIRONMENT as ENVIRONMENT,
        LOWERED as LOWERED,
        TRACE as TRACE,
        DumpRequest as DumpRequest,
        Dumps as Dumps,
        intermediate_json as intermediate_json,
        steps as steps,
        write_json as write_json,
    )
    from ipujax.lowering.dumps.json_forms import EquationKinds as EquationKinds, tile_map as tile_map
else:
    __getattr__ = lazy_names(__name__)
