"""Dumps of a compilation: jaxprs and graphs as DOT, all intermediate forms as JSON, and the tile map of variables.

IPUJAX_DOT, IPUJAX_DUMP ──▶ DumpRequest          jaxpr after each pass, graph, program ── Dumps ──▶ files
"""

from ipujax.lowering.dumps.dump_request import LOWERED as LOWERED, TRACE as TRACE, DumpRequest as DumpRequest
from ipujax.lowering.dumps.dumps import Dumps as Dumps, write_json as write_json
from ipujax.lowering.dumps.intermediate import intermediate_json as intermediate_json
from ipujax.lowering.dumps.tile_map import tile_map as tile_map
