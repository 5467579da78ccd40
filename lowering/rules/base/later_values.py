"""What is read after an equation of memory that the equation overwrites: it moves elsewhere before.

Only calls of functions overwrite what others may still see: their results lie in the function's own variables, where
they are read until its next call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping

import numpy as np

from ipujax.lowering.jax_compat import Var
from ipujax.lowering.popops import Op
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.rules.base.last_reads import LastReads
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Copy, Graph, Sequence as ProgramSequence, substituted
from ipujax.runtime.tensor import Tensor, Variable, compose, is_key_dtype


class LaterValues:
    """The values of a jaxpr that are read after one of its equations.

    Args:
        env: the tensors of all values; changes when values move.
        reads: until where each variable is read.
        number: of the equation.
    """

    def __init__(self, env: MutableMapping[Var, Tensor], reads: LastReads, number: int) -> None:
        self._env, self._reads, self._number = env, reads, number

    def move_out(
        self, graph: Graph, variables: Iterable[Variable], prog: ProgramSequence
    ) -> Mapping[Variable, Variable]:
        """Copies what is read later of some variables.

        Args:
            graph: graph to add to.
            variables: mapped variables that are overwritten.
            prog: program to add to, before that.

        Returns:
            Where each variable that holds such values has been copied to.
        """
        moved: dict[Variable, Variable] = {}
        for old in variables:
            if self._reads.last(old) > self._number:
                name = f"{old.name}/kept"
                with graph.debug_origin(compose(graph.origin, old.origin)):
                    new = graph.add_variable(old.shape, old.dtype, name, graph.mappings[old])
                    copy_in_vertices(graph, Tensor.of(old), new, prog, name)
                (moved[old],) = new.variables()
        for old in moved:
            values = {var: substituted(self._env[var], moved) for var in self._reads.moved_from(old)}
            self._env.update(values)
            self._reads.add(values.items())
        return moved


def copy_in_vertices(graph: Graph, source: Tensor, destination: Tensor, prog: ProgramSequence, name: str) -> None:
    """Copies in vertices, so that copies next to each other share a compute set."""
    if is_key_dtype(source.dtype):
        prog.add(Copy(source, destination, name, graph.origin))
    else:
        elementwise(graph, _copying(source.dtype), [source], prog, name, destination)


@remembered
def _copying(dtype: np.dtype) -> Op:
    return Op("copy", lambda x: x, dtype, "copy")
