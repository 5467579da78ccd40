"""Exchange between tiles: bytes each tile sends and receives, and pieces; the cost of a superstep."""

from ipujax.runtime.exchange.count import Demand as Demand, Traffic as Traffic, cut_at_homes as cut_at_homes
from ipujax.runtime.exchange.demand import access_demand as access_demand, mappings_of as mappings_of
from ipujax.runtime.exchange.runs import (
    Bases as Bases,
    Runs as Runs,
    block_runs as block_runs,
    concat_runs as concat_runs,
    flat_bases as flat_bases,
)
from ipujax.runtime.exchange.sample import ragged_rows as ragged_rows
from ipujax.runtime.exchange.superstep import (
    Row as Row,
    atom_bytes_of as atom_bytes_of,
    atom_cycles as atom_cycles,
    atom_name as atom_name,
    copy_cycles as copy_cycles,
    exchange_cycles as exchange_cycles,
    least_cycles as least_cycles,
    receive_code_bytes as receive_code_bytes,
    receive_cycles as receive_cycles,
    receiver_code_bytes as receiver_code_bytes,
    row_of as row_of,
    send_code_bytes as send_code_bytes,
    shortest_atom as shortest_atom,
    slow_bytes as slow_bytes,
    slow_copy_cycles as slow_copy_cycles,
    superstep as superstep,
    sync_cycles as sync_cycles,
)
from ipujax.runtime.exchange.traffic import (
    TrafficWindow as TrafficWindow,
    access_traffic as access_traffic,
    access_window as access_window,
    copy_traffic as copy_traffic,
    copy_windows as copy_windows,
    geometry as geometry,
    independent_parts as independent_parts,
    mappings_from as mappings_from,
    traffic_on as traffic_on,
)
