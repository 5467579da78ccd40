"""Recurrent layers as JAX functions, for popnn, ONNX and PopART: a table of cells, and one scan over time.

cells ── CELLS ──▶ layer_scan ── run_layer ──▶ outputs, last state, intermediates
"""

from ipujax.recurrent.cells import (
    CELLS as CELLS,
    Cell as Cell,
    Functions as Functions,
    Stack as Stack,
    State as State,
    Units as Units,
    lstm_step as lstm_step,
)
from ipujax.recurrent.layer_scan import (
    CellWeights as CellWeights,
    run_layer as run_layer,
    running_mask as running_mask,
    where as where,
    where_each as where_each,
)
