"""From jaxpr to Poplar graph: passes over jaxprs, one lowering rule a primitive, the PopLibs-like op library, the planners."""
