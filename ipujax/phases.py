"""`ipu.phase`: a network too large for the chip runs phase by phase, its weights in streaming memory.

for i, layer in enumerate(layers):
    with ipu.phase(i):
        x = layer(x)
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from ipujax.arguments import whole_number
from ipujax.lowering.jaxpr import phase_scope
from ipujax.runtime.name_scope import NameScope
from ipujax.runtime.signatures import checking_calls


@checking_calls("ipu.phase")
def phase(number: int) -> AbstractContextManager[None]:
    """Trace the code inside as a phase of execution, which runs after those of lower numbers; gradients in reverse.

    In a program with phases all arguments are in streaming memory, as with `offload_argnums` of `ipu.jit`, and so are
    results of a phase that another than the next one reads. Each phase loads its operands. On two IPUs phases
    alternate: one loads while the other computes. Donate arguments that are updated: else their new values take memory
    of their own. Plain JAX ignores phases.

    Args:
        number: position of the phase in the order of execution, from 0.

    Raises:
        ArgumentError: for anything but an integer from 0.
    """
    index = whole_number("ipu.phase needs the number of a phase", number, 0)
    # A name scope, as for `ipu.stage`: it reaches the gradients, and plain JAX ignores it.
    return NameScope(phase_scope(index))
