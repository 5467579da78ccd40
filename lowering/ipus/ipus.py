"""Values on several IPUs: each IPU lowers its equations, and operands on other IPUs are copied to it.

Input: a graph, a maker of lowerings, and a program. Output: a lowering for each IPU, on its view of the graph, and
`copy_to`, which adds copies between IPUs. A copy has the same tile mapping as the original, on the tiles of the other
IPU.

A view's target has one IPU, its tiles are numbered from 0, and vertices and variables are added to the full graph, on
the tiles of that IPU which compute; I/O tiles have a view of their own. It holds only mappings that were set through
it, so that a value of another IPU is no operand there: it must be copied first.

Limits: a value is copied once to each IPU that uses it, before its first use there. So all uses must come later in the
program, or in functions that it calls later, and no value may be read that overwrites one that has been copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import jax

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr import variables
from ipujax.lowering.layer_notes import origin_of
from ipujax.lowering.layout import MemoryOrder, layout_like, linear_mapping, map_linearly, memory_order
from ipujax.lowering.passes import traced
from ipujax.lowering.source_info import inside_scope
from ipujax.runtime.graph import ComputeSet, Copy, Graph, Sequence as ProgramSequence, VertexGroup, shift_vertices
from ipujax.runtime.tensor import Origin, Tensor, TileMapping, Variable, check_mapping, shift_tiles, substitute


class IpuView(Graph):
    """The view of one IPU.

    Args:
        graph: the graph of all IPUs.
        ipu: number of the IPU.
        of_io_tiles: whether it is the view of the I/O tiles instead of the tiles that compute.
    """

    def __init__(self, graph: Graph, ipu: int, *, of_io_tiles: bool = False) -> None:
        """Makes a graph of the tiles of one IPU, numbered from 0, with the variables and vertices of the full graph.

        Args:
            graph: the full graph, of all IPUs.
            ipu: number of the IPU.
            of_io_tiles: whether the tiles are those that move data from and to memory off chip; else the others.
        """
        tiles_per_ipu = graph.target.tiles_per_ipu
        num_io_tiles = graph.io_tiles
        tiles = num_io_tiles if of_io_tiles else tiles_per_ipu - num_io_tiles
        target = graph.target.replace(num_ipus=1, tiles_per_ipu=tiles)
        super().__init__(target, graph.replication_factor, graph.byte_cost_cycles)
        self.full_graph = graph
        self.ipu = ipu
        self._io_view: IpuView | None = None
        self.variables = graph.variables
        self.groups = graph.groups
        self.notes = graph.notes
        self.off_chip = graph.off_chip
        # The I/O tiles of an IPU are its last.
        self.first_tile = ipu * tiles_per_ipu + (tiles_per_ipu - num_io_tiles if of_io_tiles else 0)

    @property
    def origin(self) -> Origin:
        """Origin of the vertices that are being added: that of this view, else of the full graph."""
        return self.full_graph.origin if self.scope.origin == Origin() else self.scope.origin

    @property
    def io_view(self) -> IpuView | None:
        """The view of the I/O tiles of the IPU, None if there are none."""
        if self._io_view is None and self.full_graph.io_tiles:
            self._io_view = IpuView(self.full_graph, self.ipu, of_io_tiles=True)
        return self._io_view

    def set_tile_mapping(self, variable: Variable, mapping: TileMapping) -> None:
        check_mapping(mapping, variable.shape, self.target.num_tiles, repr(variable))
        self.full_graph.set_tile_mapping(variable, shift_tiles(mapping, self.first_tile))
        self.mappings[variable] = mapping

    def add_copy_of(self, constant: Variable) -> Variable:
        """Adds another constant of the same value, unmapped."""
        copy = replace(constant)
        self.variables.append(copy)
        return copy

    def holds(self, variable: Variable) -> bool:
        """True if a variable is mapped to this IPU."""
        return variable in self.mappings

    def add_vertices(self, compute_set: ComputeSet, group: VertexGroup) -> None:
        super().add_vertices(compute_set, replace(group, tile=shift_vertices(group.tile, self.first_tile)))


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
        into: Mapping[Var, Tensor] | None = ...,
        row_sums: Mapping[Var, Any] = ...,
    ) -> None:
        """Lowers equations in order, adding to `prog`; tensors of their results are added to `env`.

        `results` are read after them, `after` is called behind each. Results may be written `into` given tensors, or
        rows of those that loops compute be added to `row_sums`.
        """

    def read(self, env: Mapping[Var, Tensor], atom: Atom) -> Tensor: ...

    def find_roles(self, eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> None: ...

    def note_roles(self, values: Sequence[Var], tensors: Sequence[Tensor]) -> None: ...


# From a graph, and the tensors that results may be written to, by the variables of the results.
MakeLowering = Callable[[Graph, Mapping[Var, Tensor]], LowersEquations]


class Ipus:
    """The IPUs of a graph, each with a view and a lowering.

    Args:
        graph: the graph of all IPUs.
        make_lowering: creates the lowering of a graph.
        prog: program that equations, and copies between IPUs, are added to.
    """

    def __init__(self, graph: Graph, make_lowering: MakeLowering, prog: ProgramSequence) -> None:
        """Takes the graph of all IPUs; the view and the lowering of each IPU are made at their first use."""
        self.graph = graph
        self.prog = prog
        self._make_lowering = make_lowering
        self._views: dict[int, IpuView] = {}
        self._emissions: dict[Hashable, Any] = {}  # of all views: equal IPUs plan equal operations once
        self._lowerings: dict[int, LowersEquations] = {}
        self._local_constants: dict[tuple[Variable, int], Variable] = {}  # by the original and the IPU of the copy
        self._copies: dict[tuple[Tensor, int], Tensor] = {}  # likewise
        self._jaxprs: dict[tuple[object, ...], ClosedJaxpr] = {}  # of emitted functions, with the types of operands

    def view(self, ipu: int) -> IpuView:
        """The view of one IPU as a graph."""
        if ipu not in self._views:
            view = self._views[ipu] = IpuView(self.graph, ipu)
            view.emissions = self._emissions
        return self._views[ipu]

    def lowering(self, ipu: int) -> LowersEquations:
        """The lowering of one IPU."""
        if ipu not in self._lowerings:
            self._lowerings[ipu] = self._make_lowering(self.view(ipu), {})
        return self._lowerings[ipu]

    def variable_ipu(self, variable: Variable) -> int | None:
        """The IPU a variable is mapped to; None if it is unmapped."""
        return next((ipu for ipu, view in self._views.items() if view.holds(variable)), None)

    def equation(
        self,
        eqn: JaxprEqn,
        env: Mapping[Var, Tensor],
        ipu: int,
        into: Mapping[Var, Tensor] = MappingProxyType({}),
    ) -> list[Tensor]:
        """Adds an equation to the program, on an IPU, with copies of operands from other IPUs; returns its results.

        Args:
            eqn: the equation.
            env: tensors of its operands, on any IPU.
            ipu: number of the IPU.
            into: tensors that the rule writes results to if it can, by the variables of the results.
        """
        lowering = self.lowering(ipu)
        with self.graph.debug_origin(origin_of(eqn, self.graph.origin)):
            local = {var: self.copy_to(env[var], ipu) for var in variables(eqn.invars)}
        return list(lowering.equation(eqn, [lowering.read(local, atom) for atom in eqn.invars], self.prog, into))

    def emit(
        self,
        ipu: int,
        fun: Callable[..., jax.Array],
        operands: Sequence[Tensor],
        prog: ProgramSequence,
        name: str,
        into: Tensor | None = None,
    ) -> Tensor:
        """Adds the computation of a function of arrays; returns its result, `into` if that is given.

        Args:
            ipu: number of the IPU; the operands are mapped to it.
            fun: the function, of one result; traced once for operands of equal types.
            operands: its arguments.
            prog: program to add to: that of these IPUs, or of a function that it calls.
            name: debug name.
            into: tensor that the result is written to; it may be an operand, but share no element with part of another.
        """
        key = fun, tuple((x.shape, x.dtype) for x in operands)
        if key not in self._jaxprs:
            self._jaxprs[key], _ = traced(fun, operands, byte_cost=self.graph.byte_cost_cycles)
        unnamed = self._jaxprs[key]
        body = unnamed.jaxpr.replace(eqns=[inside_scope(eqn, name) for eqn in unnamed.eqns])
        jaxpr = ClosedJaxpr(body, unnamed.consts)
        (out,) = body.outvars
        targets = {out: into} if into is not None and isinstance(out, Var) else {}
        (result,) = self._make_lowering(self.view(ipu), targets).jaxpr(jaxpr, operands, prog)
        if into is None or result is into:  # rules that cannot write to `into` return a new tensor
            return result
        map_linearly(self.view(ipu), result)
        prog.add(Copy(result, into, name, self.graph.origin))
        return into

    def tensor_ipu(self, tensor: Tensor) -> int | None:
        """The IPU that an entire tensor is mapped to; None if to several, or unmapped."""
        ipus = {self.variable_ipu(variable) for variable in tensor.variables()}
        return ipus.pop() if len(ipus) == 1 else None

    def may_hold(self, tensor: Tensor, ipu: int) -> bool:
        """True if nothing of a tensor is mapped to another IPU."""
        return not self._foreign_variables(tensor, ipu)

    def copy_to(
        self,
        tensor: Tensor,
        ipu: int,
        variable_copies: Mapping[tuple[Variable, int], Variable] = MappingProxyType({}),
    ) -> Tensor:
        """The tensor on an IPU: itself if nothing of it is mapped to another, else a copy.

        The copy is added to the program at the first request, and returned at further ones.

        Args:
            tensor: any view; unmapped variables may still be mapped by their first use on the IPU.
            ipu: number of the IPU.
            variable_copies: existing copies of entire variables, by variable and IPU, to be viewed instead.
        """
        foreign = self._foreign_variables(tensor, ipu)
        if not foreign:
            return tensor
        # An earlier copy has the same value, whether or not it views one of `variable_copies`.
        if (tensor, ipu) not in self._copies:
            local = self._with_local_constants(tensor, foreign, ipu)
            replaced = {v: variable_copies[v, ipu] for v in local.variables() if (v, ipu) in variable_copies}
            self._copies[tensor, ipu] = self._add_smallest_copy(substitute(local, replaced), ipu)
        return self._copies[tensor, ipu]

    def _foreign_variables(self, tensor: Tensor, ipu: int) -> list[Variable]:
        """Variables of a tensor that are mapped to other IPUs."""
        return [v for v in tensor.variables() if self.variable_ipu(v) not in (None, ipu)]

    def _with_local_constants(self, tensor: Tensor, foreign: Sequence[Variable], ipu: int) -> Tensor:
        """A view with constants of other IPUs replaced by local copies, which need no exchange."""
        table = {}
        for variable in foreign:
            if variable.is_constant:
                if (variable, ipu) not in self._local_constants:
                    self._local_constants[variable, ipu] = self.view(ipu).add_copy_of(variable)
                table[variable] = self._local_constants[variable, ipu]
        return substitute(tensor, table)

    def _add_smallest_copy(self, tensor: Tensor, ipu: int) -> Tensor:
        """Adds the copy of a tensor to an IPU that has fewest elements; returns the tensor there.

        It is a copy of entire variables, viewed as they were, or of the view if that has fewer elements.

        Args:
            tensor: view of variables, some on other IPUs.
            ipu: number of the IPU.
        """
        foreign = self._foreign_variables(tensor, ipu)
        if not foreign:
            return tensor
        for variable in tensor.variables():
            if self.variable_ipu(variable) is None:
                map_linearly(self.view(ipu), Tensor.of(variable))
        if sum(variable.size for variable in foreign) <= tensor.size:  # so a broadcast is sent before it is expanded
            table: dict[Variable, Variable] = {}
            for variable in foreign:
                (table[variable],) = self._add_copy(Tensor.of(variable), ipu).variables()
            return substitute(tensor, table)
        return self._add_copy(tensor, ipu)

    def _add_copy(self, tensor: Tensor, ipu: int) -> Tensor:
        copy = self.add_like(tensor, ipu, f"to IPU {ipu}")
        self.graph.note_role(copy, self.graph.role_of(tensor))
        self.prog.add(Copy(tensor, copy, f"to IPU {ipu}", self.graph.origin))
        return copy

    def add_like(self, tensor: Tensor, ipu: int, name: str, dtype: Any = None) -> Tensor:
        """A new variable on an IPU with the layout of a tensor of mapped variables, viewed in its shape.

        Args:
            tensor: the tensor whose shape and layout it has.
            ipu: number of the IPU.
            name: debug name.
            dtype: that of the tensor when None.
        """
        # A tensor may view its variable transposed, or in groups of columns: the new one is stored in the same order.
        order = memory_order(tensor) or MemoryOrder.own(tensor.shape)
        ordered = order.of_variable(tensor)
        shape, mapping = self._layout_like(ordered)
        variable = self.view(ipu).add_variable(shape, tensor.dtype if dtype is None else dtype, name, mapping)
        return order.of_view(variable.reshape(ordered.shape))

    def _layout_like(self, tensor: Tensor) -> tuple[Sequence[int], TileMapping]:
        """A shape and a mapping on any IPU: those of a tensor that is mapped to one IPU, else linear."""
        ipu = self.tensor_ipu(tensor)
        layout = None if ipu is None else layout_like(self.view(ipu), tensor)
        # All views have equally many tiles, so that view 0 stands for any.
        return layout or (tensor.shape, linear_mapping(self.view(0), tensor.size, tensor.dtype))
