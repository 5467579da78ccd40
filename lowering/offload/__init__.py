"""Streaming memory: the values it holds, and the equations that load and store them."""

from ipujax.lowering.offload.control_flow import put_results as put_results
from ipujax.lowering.offload.io_tiles import IoTiles as IoTiles
from ipujax.lowering.offload.memory_spaces import is_streamed as is_streamed, memory_spaces as memory_spaces
from ipujax.lowering.offload.micro_batch_streams import (
    NO_STREAMS as NO_STREAMS,
    Streams as Streams,
    batch_arguments as batch_arguments,
    could_stream_loops as could_stream_loops,
    sent_rows as sent_rows,
    stream as stream,
)
from ipujax.lowering.offload.offload import (
    BATCH_BYTES as BATCH_BYTES,
    ON_CHIP as ON_CHIP,
    Offloading as Offloading,
    offload as offload,
)
from ipujax.lowering.offload.primitives import MOVES as MOVES
