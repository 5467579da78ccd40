"""Modules of StableHLO as jaxprs: what was exported is lowered and costed by its operations, like any function."""
