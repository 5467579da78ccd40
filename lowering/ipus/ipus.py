"""Values on several IPUs: each IPU lowers its equations, and what it needs of others is copied to it.

Input: a graph and what lowers equations into a graph. Output: a lowering for each IPU, on its view of the graph, and
`bring`, which adds copies between IPUs. What lies on one tile of an IPU goes to the same tile of the other.

Limits: a value is copied once to each IPU that uses it, where it is first used there; so all uses must come later in
the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import jax

from ipujax.lowering.ipus.ipu_view import IpuView
from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr import variables
from ipujax.lowering.layout import MemoryOrder, layout_like, linear_mapping, map_linearly, memory_order
from ipujax.lowering.passes import traced
from ipujax.runtime.graph import Copy, Graph, Sequence as ProgramSequence, substituted
from ipujax.runtime.tensor import Tensor, TileMapping, Variable


class LowersEquations(Protocol):
    """Lowers jaxprs into one graph, as `lower.Lowering` does."""

    def jaxpr(self, jaxpr: ClosedJaxpr, operands: Sequence[Tensor], prog: ProgramSequence) -> list[Tensor]: ...

    def equation(
        self, eqn: JaxprEqn, operands: list[Tensor], prog: ProgramSequence, into: Mapping[Var, Tensor]
    ) -> Sequence[Tensor]: ...

    def equations(
        self,
        eqns: Sequence[JaxprEqn],
        env: dict[Var, Tensor],
        prog: ProgramSequence,
        results: Sequence[Atom],
        after: Callable[[JaxprEqn], object] = ...,
    ) -> None: ...

    def read(self, env: Mapping[Var, Tensor], atom: Atom) -> Tensor: ...

    def find_roles(self, eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> None: ...

    def note_roles(self, values: Sequence[Var], tensors: Sequence[Tensor]) -> None: ...


# From a graph, and tensors that may be written at once by the variables whose values go there.
MakeLowering = Callable[[Graph, Mapping[Var, Tensor]], LowersEquations]


class Ipus:
    """The IPUs of a graph.

    Args:
        graph: the graph of all IPUs.
        make: makes what lowers equations into a graph.
    """

    def __init__(self, graph: Graph, make: MakeLowering) -> None:
        self.graph, self._make = graph, make
        self._views: dict[int, IpuView] = {}
        self._lowerings: dict[int, LowersEquations] = {}
        self._constants: dict[tuple[Variable, int], Variable] = {}
        self._brought: dict[tuple[Tensor, int], Tensor] = {}

    def view(self, ipu: int) -> IpuView:
        """One IPU as a graph."""
        if ipu not in self._views:
            self._views[ipu] = IpuView(self.graph, ipu)
        return self._views[ipu]

    def lowering(self, ipu: int) -> LowersEquations:
        """The lowering of one IPU."""
        if ipu not in self._lowerings:
            self._lowerings[ipu] = self._make(self.view(ipu), {})
        return self._lowerings[ipu]

    def home(self, variable: Variable) -> int | None:
        """The IPU a variable lies on; None while it lies nowhere."""
        return next((ipu for ipu, view in self._views.items() if view.holds(variable)), None)

    def equation(
        self,
        eqn: JaxprEqn,
        env: Mapping[Var, Tensor],
        ipu: int,
        prog: ProgramSequence,
        into: Mapping[Var, Tensor] = MappingProxyType({}),
    ) -> list[Tensor]:
        """Lowers an equation on an IPU, what it reads brought there.

        Args:
            eqn: the equation.
            env: tensors anywhere, of what it reads.
            ipu: where.
            prog: program to add to.
            into: tensors that are written at once, by the variables of its results, where its rule can.

        Returns:
            The tensors of its results.
        """
        lowering = self.lowering(ipu)
        local = {var: self.bring(env[var], ipu, prog) for var in variables(eqn.invars)}
        return list(lowering.equation(eqn, [lowering.read(local, atom) for atom in eqn.invars], prog, into))

    def emit(
        self,
        ipu: int,
        fun: Callable[..., jax.Array],
        operands: Sequence[Tensor],
        prog: ProgramSequence,
        name: str,
        into: Tensor | None = None,
    ) -> Tensor:
        """Adds what a function of arrays computes.

        Args:
            ipu: where; the operands lie there.
            fun: the function, of one result.
            operands: its arguments.
            prog: program to add to.
            name: debug name.
            into: where the result is written; it may be an operand, but share no element with part of another.

        Returns:
            The result: `into` if that is given.
        """
        jaxpr, _ = traced(fun, operands, name, self.graph.byte_price_cycles)
        (out,) = jaxpr.jaxpr.outvars
        targets = {out: into} if into is not None and isinstance(out, Var) else {}
        (result,) = self._make(self.view(ipu), targets).jaxpr(jaxpr, operands, prog)
        if into is None or result is into:
            return result
        map_linearly(self.view(ipu), result)
        prog.add(Copy(result, into, name, self.graph.origin))
        return into

    def home_of(self, tensor: Tensor) -> int | None:
        """The IPU that all of a tensor lies on; None if it lies on several, or nowhere."""
        homes = {self.home(variable) for variable in tensor.variables()}
        return homes.pop() if len(homes) == 1 else None

    def bring(
        self,
        tensor: Tensor,
        ipu: int,
        prog: ProgramSequence,
        copies: Mapping[tuple[Variable, int], Variable] = MappingProxyType({}),
    ) -> Tensor:
        """The tensor on an IPU: itself where nothing of it lies elsewhere, else a copy.

        Args:
            tensor: any view; what lies nowhere yet may still be placed by its first use there.
            ipu: number of the IPU.
            prog: where copies are added.
            copies: of whole variables, by the IPU they are on, to be viewed instead.
        """
        foreign = self._elsewhere(tensor, ipu)
        if not foreign:
            return tensor
        if (tensor, ipu) not in self._brought:
            local = self._with_own_constants(tensor, foreign, ipu)
            there = {v: copies[v, ipu] for v in local.variables() if (v, ipu) in copies}
            self._brought[tensor, ipu] = self._copied(substituted(local, there), ipu, prog)
        return self._brought[tensor, ipu]

    def _elsewhere(self, tensor: Tensor, ipu: int) -> list[Variable]:
        return [v for v in tensor.variables() if self.home(v) not in (None, ipu)]

    def _with_own_constants(self, tensor: Tensor, foreign: Sequence[Variable], ipu: int) -> Tensor:
        """The same view of constants of its own, which need not be sent."""
        table = {}
        for variable in foreign:
            if variable.is_constant:
                if (variable, ipu) not in self._constants:
                    self._constants[variable, ipu] = self.view(ipu).add_copy_of(variable)
                table[variable] = self._constants[variable, ipu]
        return substituted(tensor, table)

    def _copied(self, tensor: Tensor, ipu: int, prog: ProgramSequence) -> Tensor:
        foreign = self._elsewhere(tensor, ipu)
        if not foreign:
            return tensor
        for variable in tensor.variables():
            if self.home(variable) is None:
                map_linearly(self.view(ipu), Tensor.of(variable))
        if sum(variable.size for variable in foreign) <= tensor.size:  # a broadcast, say, is not sent in full
            table: dict[Variable, Variable] = {}
            for variable in foreign:
                (table[variable],) = self._dense(Tensor.of(variable), ipu, prog).variables()
            return substituted(tensor, table)
        return self._dense(tensor, ipu, prog)

    def _dense(self, tensor: Tensor, ipu: int, prog: ProgramSequence) -> Tensor:
        copy = self.like(tensor, ipu, f"to IPU {ipu}")
        self.graph.note_role(copy, self.graph.role_of(tensor))
        prog.add(Copy(tensor, copy, f"to IPU {ipu}", self.graph.origin))
        return copy

    def like(self, tensor: Tensor, ipu: int, name: str, dtype: Any = None) -> Tensor:
        """A new variable on an IPU, laid out like a tensor of mapped variables, and seen in its shape.

        Args:
            tensor: what it is to be like.
            ipu: where.
            name: debug name.
            dtype: that of the tensor when None.
        """
        held = memory_order(tensor) or MemoryOrder.own(tensor.shape)
        seen = held.of_variable(tensor)
        shape, mapping = self._layout(seen)
        new = self.view(ipu).add_variable(shape, tensor.dtype if dtype is None else dtype, name, mapping)
        return held.of_view(new.reshape(seen.shape))

    def _layout(self, tensor: Tensor) -> tuple[Sequence[int], TileMapping]:
        """A shape and a mapping on one IPU that follow a tensor as far as it lies on one IPU."""
        home = self.home_of(tensor)
        found = None if home is None else layout_like(self.view(home), tensor)
        return found or (tensor.shape, linear_mapping(self.view(0), tensor.size, tensor.dtype))
