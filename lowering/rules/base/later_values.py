"""Values that are read after an equation overwrites their memory: they are copied elsewhere before.

Only calls of functions overwrite memory that other equations still read: results are in the function's own
variables, and are read there until its next call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping

import numpy as np

from ipujax.lowering.jax_compat import Var
from ipujax.lowering.popops import Op
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.rules.base.last_reads import LastReads
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Builder, Copy, Graph, Sequence as ProgramSequence, substitute
from ipujax.runtime.tensor import Tensor, Variable, compose, is_key_dtype


class LaterValues:
    """Values that are read after equation `number`; `env` has the tensors of all values, `reads` their last reads."""

    def __init__(self, env: MutableMapping[Var, Tensor], reads: LastReads, number: int) -> None:
        self._env = env
        self._reads = reads
        self._number = number

    def move_out(
        self, graph: Graph, variables: Iterable[Variable], prog: ProgramSequence
    ) -> Mapping[Variable, Variable]:
        """Copies the variables that are read later, in `prog`; returns old variable → copy."""
        copies: dict[Variable, Variable] = {}
        for old in variables:
            if self._reads.last(old) > self._number:
                name = f"{old.name}/kept"
                with graph.debug_origin(compose(graph.origin, old.origin)):
                    new = graph.add_variable(old.shape, old.dtype, name, graph.mappings[old])
                    copy_in_vertices(Builder(graph, prog, name), Tensor.of(old), new)
                (copies[old],) = new.variables()
        for old in copies:
            # From here on these values are views of the copies.
            values = {var: substitute(self._env[var], copies) for var in self._reads.moved_from(old)}
            self._env.update(values)
            self._reads.add(values.items())
        return copies


def copy_in_vertices(builder: Builder, source: Tensor, destination: Tensor) -> None:
    """Copies in vertices, so that adjacent copies share a compute set."""
    # Keys have no codelet.
    if is_key_dtype(source.dtype):
        builder.prog.add(Copy(source, destination, builder.name, builder.graph.origin))
    else:
        elementwise(builder, _copying(source.dtype), [source], destination)


@remembered
def _copying(dtype: np.dtype) -> Op:
    return Op("copy", lambda x: x, dtype, "copy")
