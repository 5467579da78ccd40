"""The Poplar layer: target, graph, program and codelets; compile, engine, tile interpreter and profile data.

Packages in the order data passes through them: `target` describes the machine; `tensor`, `graph` and `host` hold what
is compiled; `analysis`, `verify`, `exchange`, `cost`, `timeline` and `memory` are the parts of `compile`; `engine` and
`interpreter` run the result; `profile` reports it.
"""

from ipujax.runtime.names_at_import import record_imports as _record_imports

_record_imports()
