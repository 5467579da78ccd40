"""The Poplar layer: target, graph, program and codelets; compile, engine, tile interpreter and profile data.

Files in the order data passes through them: `target` and `presets` describe the machine; `variable`, `tensor`,
`mapping`, `vertices`, `codelet`, `graph` and `program` are what is compiled; `exchange`, `liveness`, `cost`, `timeline`
and `verifier` are the parts of `compile`; `engine` and `interpreter` run the result; `profile` reports it.
"""
