"""Memory of each tile: live ranges of variables packed into tile SRAM, frames of functions, code and state."""

from ipujax.runtime.memory.always_live import (
    EXCHANGE_CODE as EXCHANGE_CODE,
    FIXED as FIXED,
    code_of_exchanges as code_of_exchanges,
    exchange_code_bytes as exchange_code_bytes,
    received_at_once as received_at_once,
)
from ipujax.runtime.memory.contents import TileContents as TileContents, VariableTiles as VariableTiles
from ipujax.runtime.memory.frames import Owner as Owner
from ipujax.runtime.memory.live import LIVE as LIVE, Occupancy as Occupancy, starts_and_ends as starts_and_ends
from ipujax.runtime.memory.live_item import (
    ALWAYS_ROLES as ALWAYS_ROLES,
    BUFFERS as BUFFERS,
    GAPS as GAPS,
    ROLES as ROLES,
    LiveItem as LiveItem,
)
from ipujax.runtime.memory.memory_breakdown import BreakdownRow as BreakdownRow, LiveBytes as LiveBytes
from ipujax.runtime.memory.out_of_memory import (
    Attempt as Attempt,
    attempt_lines as attempt_lines,
    check_memory as check_memory,
    fits as fits,
    ways_to_fit as ways_to_fit,
)
from ipujax.runtime.memory.report import MemoryReport as MemoryReport, memory_report as memory_report
