"""From jaxpr to Poplar graph.

Passes over jaxprs, one lowering rule a primitive, the PopLibs-like op library, and the planners.
"""
