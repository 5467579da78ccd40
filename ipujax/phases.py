"""`ipu.phase`: a network too large for the chip runs phase by phase, its weights in streaming memory.

for i, layer in enumerate(layers):
    with ipu.phase(i):
        x = layer(x)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from ipujax.calls import whole_number
from ipujax.lowering.jaxpr import phase_scope
from ipujax.runtime.signatures import checking_calls


@checking_calls("ipu.phase")
@contextmanager
def phase(number: int) -> Iterator[None]:
    """Makes all that is traced inside a phase: it runs after the phases before it; gradients run in reverse.

    In a program with phases all arguments lie in streaming memory, as with `offload_argnums` of `ipu.jit`, and so does
    what a phase hands to any but the next one. Each phase loads what it needs. On two IPUs they take turns, so that one
    loads while the other computes. Donate what is updated: else its new value takes room of its own in streaming
    memory. Plain JAX ignores phases.

    Args:
        number: when it runs, from 0.

    Raises:
        ArgumentError: for anything but a whole number from 0.
    """
    checked = whole_number("ipu.phase needs the number of a phase", number, 0)
    with jax.named_scope(phase_scope(checked)):
        yield
