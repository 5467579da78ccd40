"""Roles of variables: the use of a value in a training step or an inference.

A role is text that reports show. A variable without a noted role is one of `INTERMEDIATES` if a traced function
produced it, one of `PARTIALS` if it is to be combined, and `UNKNOWN` in a graph that was built by hand.
"""

WEIGHTS = "weights"
OPTIMISER_STATE = "optimiser state"
STATE = "other state"
GRADIENTS = "gradients"
STORED = "activations, kept"
RECOMPUTED = "activations, recomputed"
INPUTS = "inputs"
ARGUMENTS = "arguments"
RESULTS = "results"
CONSTANTS = "constants"
PARTIALS = "partial results"
INTERMEDIATES = "other intermediates"
UNKNOWN = "variables of no known role"

VARIABLE_ROLES = (
    *(WEIGHTS, OPTIMISER_STATE, STATE, GRADIENTS, STORED, RECOMPUTED, INPUTS, ARGUMENTS, RESULTS),
    *(PARTIALS, INTERMEDIATES, UNKNOWN, CONSTANTS),
)
