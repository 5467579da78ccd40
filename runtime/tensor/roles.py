"""Roles of variables: what a value is for in a training step or an inference.

A role is text that reports show. What a program says nothing of is `INTERMEDIATES` if a traced function made it,
`PARTIALS` if it waits to be combined, and `UNKNOWN` in a graph that was built by hand.
"""

from __future__ import annotations

WEIGHTS = "weights"
OPTIMISER_STATE = "optimiser state"
STATE = "other state"
GRADIENTS = "gradients"
KEPT = "activations, kept"
RECOMPUTED = "activations, recomputed"
INPUTS = "inputs"
ARGUMENTS = "arguments"
RESULTS = "results"
CONSTANTS = "constants"
PARTIALS = "partial results"
INTERMEDIATES = "other intermediates"
UNKNOWN = "variables of no known role"

VARIABLE_ROLES = (
    *(WEIGHTS, OPTIMISER_STATE, STATE, GRADIENTS, KEPT, RECOMPUTED, INPUTS, ARGUMENTS, RESULTS),
    *(PARTIALS, INTERMEDIATES, UNKNOWN, CONSTANTS),
)
