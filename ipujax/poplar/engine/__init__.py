"""Engines: load and run programs, host streams and channels, options, profiles as Poplar prints them."""

from ipujax.poplar.engine.engine import Engine as Engine
from ipujax.poplar.engine.engine_options import (
    serialize_to_cbor as serialize_to_cbor,
    serialize_to_json as serialize_to_json,
)
from ipujax.poplar.engine.streams import StreamCallback as StreamCallback
