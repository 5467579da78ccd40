"""Kernels of Pallas as jaxprs: loops over the grid, with the blocks that each step reads and writes.

Input: an equation `pallas_call`. Output: a jaxpr of arrays. A block is loaded in the innermost loop that its index map
depends on, and stored at the end of that iteration: a block that all inner steps add to stays where it is. References
of the kernel become values as `lowering.refs` does it. The numbers are those of `pallas_call(interpret=True)`, also of
elements that no step writes.
Source: JAX, "Pallas: grids and BlockSpecs"; the interpreter of Pallas, jax 0.10.
Limits: see `_is_simple`; other kernels are lowered as JAX interprets them, see `stablehlo.exported_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import (
    CALLEES,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    closed,
    eval_equation,
    eval_jaxpr,
    jaxpr_as_fun,
    source_of,
    used_inputs,
)
from ipujax.lowering.jaxpr import CONTROL_FLOW, primitive_names, scan_body, while_body, while_condition

Values = list[Any]
_INDICES = frozenset({"program_id", "num_programs"})


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of one array of a kernel.

    While the grid runs, the array has the numbers of blocks as its first dimensions: a block is one slot of a stack.

    Args:
        shape: of the array, padded to whole blocks.
        sizes: of a block, with all dimensions of the array.
        squeezed: dimensions that a block of the kernel does not have.
        counted: dimensions along which the index map counts blocks, not elements.
        depth: number of grid dimensions that the index map depends on, counted to the last one.
        index_map: from indices of the grid and the prefetched scalars to those of a block.
        is_natural: whether no index of a block is below 0, where it would count from the end.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    squeezed: tuple[int, ...]
    counted: tuple[int, ...]
    depth: int
    index_map: Callable[[Values, Values], Values]
    is_natural: bool

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of a block as the kernel has it."""
        return tuple(n for d, n in enumerate(self.sizes) if d not in self.squeezed)

    def stacked(self, array: Any) -> Any:
        """The array with its blocks as slots, padded to whole blocks."""
        split: list[int] = []
        for d, (n, size) in enumerate(zip(self.shape, self.sizes, strict=True)):
            split += [n // size, size] if d in self.counted else [n]
        return lax.transpose(lax.reshape(_pad_to(array, self.shape), split), self._order)

    def unstacked(self, stack: Any, shape: tuple[int, ...]) -> Any:
        """The array of a stack of blocks, without what pads it."""
        array = lax.reshape(lax.transpose(stack, np.argsort(self._order)), self.shape)
        return array if self.shape == shape else lax.slice(array, (0,) * len(shape), shape)

    @property
    def _order(self) -> list[int]:
        """Dimensions of the array, those in blocks cut in two: the numbers of blocks are first, elements behind."""
        positions = np.cumsum([0, *(2 if d in self.counted else 1 for d in range(len(self.shape)))])
        numbers = [int(positions[d]) for d in self.counted]
        return [*numbers, *(n for n in range(int(positions[-1])) if n not in numbers)]

    def starts(self, indices: Values, scalars: Values) -> Values:
        """First element of a block in the stack, by dimension."""
        of_array = self.index_map(indices, scalars)
        elements = [np.int32(0) if d in self.counted else start for d, start in enumerate(of_array)]
        return [*(of_array[d] for d in self.counted), *elements]

    @property
    def _slot(self) -> tuple[int, ...]:
        """Shape of a block as a slice of the stack."""
        return *(1 for _ in self.counted), *self.sizes

    def load(self, stack: Any, starts: Values) -> Any:
        """The block at a position of a stack; of a stack of one block that is no slice."""
        if stack.shape == self._slot:
            return lax.reshape(stack, self.block_shape)
        # Where no index is negative, the primitive itself saves JAX's arithmetic for those that count from the end.
        if self.is_natural:
            slot = lax.dynamic_slice_p.bind(stack, *starts, slice_sizes=self._slot)
        else:
            slot = lax.dynamic_slice(stack, starts, self._slot)
        return lax.reshape(slot, self.block_shape)

    def store(self, stack: Any, block: Any, starts: Values) -> Any:
        """The stack of blocks with the one at a position replaced; of a stack of one block that is no slice."""
        slot = lax.reshape(block, self._slot)
        if stack.shape == self._slot:
            return slot
        if self.is_natural:
            return lax.dynamic_update_slice_p.bind(stack, slot, *starts)
        return lax.dynamic_update_slice(stack, slot, starts)


def pallas_callee(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Jaxpr that computes a call of a Pallas kernel by loops over its grid, without references; None if it cannot.

    That is a kernel that needs more than a grid, see `_is_simple`.
    """
    if not _is_simple(eqn):
        return None
    # Equations get the line of the call, without its scopes, which inlining adds.
    place = eqn.source_info.replace(name_stack=type(eqn.source_info.name_stack)())
    with source_of(eqn.replace(source_info=place)):
        traced = jax.make_jaxpr(_Kernel(eqn).run)(*(atom.aval for atom in eqn.invars))
    # The inliner keeps the lines of a user's function, and gives those of a library's the line of the call: by the file
    # in the debug info, which has to be that of the kernel. Its names of arguments are those of references.
    names = eqn.params["jaxpr"].debug_info.with_unknown_names()
    body = traced.jaxpr
    return ClosedJaxpr(
        body.replace(debug_info=names._replace(arg_names=None, result_paths=None)) if names else body, traced.consts
    )


def _is_simple(eqn: JaxprEqn) -> bool:
    """True for a Pallas kernel that loops can compute: a fixed grid of blocks, and values that are arrays of numbers.

    So without semaphores, copies between memories, padded blocks, or indices of the grid in nested scopes. A call with
    effects simulates a TPU (`InterpretParams`), with its errors, races and memory that is undefined.
    """
    grid = eqn.params["grid_mapping"]
    kernel = eqn.params["jaxpr"]
    entries = [entry for mapping in grid.block_mappings for entry in mapping.block_shape]
    dtypes = [getattr(var.aval, "dtype", None) for var in kernel.invars]
    return (
        not eqn.effects
        and grid.local_grid_env is None
        and all(isinstance(n, int) for n in grid.grid)
        and all(type(entry).__name__ in _SIZES and getattr(entry, "padding", (0, 0)) == (0, 0) for entry in entries)
        and all(dtype is None or not jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes)
        and _indices_are_reached(kernel)
    )


# Size of a block along a dimension by the class of its entry, and whether an index counts blocks or elements.
_SIZES: dict[str, Callable[[Any], int]] = {
    "Blocked": lambda entry: entry.block_size,
    "Element": lambda entry: entry.block_size,
    "Squeezed": lambda _: 1,
}


def _indices_are_reached(jaxpr: Jaxpr) -> bool:
    """True if indices of the grid are read only where `_evaluate_kernel` gives them: in control flow and in calls."""
    for eqn in jaxpr.eqns:
        if _reads_indices(eqn):
            inner = [getattr(x, "jaxpr", x) for x in _inner_jaxprs(eqn)]
            if eqn.primitive.name not in CONTROL_FLOW | set(CALLEES) or not all(map(_indices_are_reached, inner)):
                return False
    return True


def _inner_jaxprs(eqn: JaxprEqn) -> list[Any]:
    """The jaxprs among the parameters of an equation."""
    values = (x if isinstance(x, tuple | list) else (x,) for x in eqn.params.values())
    return [each for value in values for each in value if isinstance(each, Jaxpr | ClosedJaxpr)]


def _reads_indices(eqn: JaxprEqn) -> bool:
    return any(not _INDICES.isdisjoint(primitive_names(getattr(x, "jaxpr", x))) for x in _inner_jaxprs(eqn))


class _Kernel:
    """A kernel's call, as a function of its operands.

    The references of a kernel are prefetched scalars, blocks of operands, blocks of results, and scratch memory, in
    this order, which is also that of the values that the loops carry.
    """

    def __init__(self, eqn: JaxprEqn) -> None:
        """Reads a `pallas_call`: its grid, and the types of blocks and scratch memory that its kernel refers to."""
        self._params = eqn.params
        grid = eqn.params["grid_mapping"]
        self._grid: tuple[int, ...] = tuple(grid.grid)
        self._num_scalars: int = grid.num_index_operands
        # Dimensions of the grid that the kernel's author wrote, and its code knows; `jax.vmap` adds others.
        self._author_dims = [n for n in range(len(self._grid)) if n not in grid.vmapped_dims]
        self._mappings = tuple(grid.block_mappings)
        self._jaxpr: Jaxpr = eqn.params["jaxpr"]
        self._blocks = [self._blocks_of(mapping) for mapping in self._mappings]
        scratch = self._jaxpr.invars[self._num_scalars + len(self._blocks) :]
        self._scratch = [_without_ref(var.aval) for var in scratch]

    def run(self, *operands: Any) -> Values:
        """Computes the call of a Pallas kernel in JAX; returns its results. Loops over the grid carry stacks of blocks.

        A result begins as the operand that it aliases, else uninitialized; it stays so if the grid is empty.

        Args:
            operands: prefetched scalars, then the arrays.
        """
        scalars = list(operands[: self._num_scalars])
        inputs = list(operands[self._num_scalars :])
        aliased = {out: n for n, out in self._params["input_output_aliases"]}  # number of the operand, by result
        results = self._mappings[len(inputs) :]
        outs = [
            operands[aliased[n]] if n in aliased else _uninitialized(mapping.array_aval)
            for n, mapping in enumerate(results)
        ]
        stacks = [blocks.stacked(x) for x, blocks in zip((*inputs, *outs), self._blocks, strict=True)]
        values = [*scalars, *stacks, *map(_uninitialized, self._scratch)]
        if prod(self._grid):
            values = self._run_loops([], values, scalars, self._body_without_refs(values))
        first = self._num_scalars + len(inputs)
        return [
            blocks.unstacked(values[first + n], mapping.array_aval.shape)
            for n, (mapping, blocks) in enumerate(zip(results, self._blocks[len(inputs) :], strict=True))
        ]

    def _blocks_of(self, mapping: Any) -> _Blocks:
        """Blocks of an operand or result of a Pallas kernel: sizes, and how many loops over the grid select a block.

        Args:
            mapping: Pallas' record of it: shapes of array and block, and the index map from the grid to a block.
        """
        entries = tuple(mapping.block_shape)
        kinds = [type(entry).__name__ for entry in entries]
        sizes = tuple(_SIZES[kind](entry) for kind, entry in zip(kinds, entries, strict=True))
        index_map: ClosedJaxpr = mapping.index_map_jaxpr
        used = used_inputs(index_map.jaxpr)[: len(self._grid)]
        # Indices that cannot be negative, so that none has to be clamped: those of the grid, and literals.
        natural_indices = (
            *index_map.jaxpr.invars[: len(self._grid)],
            *(x for x in index_map.jaxpr.outvars if _is_natural(x)),
        )
        return _Blocks(
            shape=tuple(n + -n % size for n, size in zip(mapping.array_aval.shape, sizes, strict=True)),
            sizes=sizes,
            squeezed=tuple(n for n, kind in enumerate(kinds) if kind == "Squeezed"),
            counted=tuple(n for n, kind in enumerate(kinds) if kind != "Element"),
            depth=max((n + 1 for n, is_used in enumerate(used) if is_used), default=0),
            index_map=lambda indices, scalars: _evaluate_index_map(index_map, indices, scalars),
            is_natural=all(any(x is y for y in natural_indices) for x in index_map.jaxpr.outvars),
        )

    def _body_without_refs(self, values: Values) -> ClosedJaxpr:
        """The kernel's jaxpr without references: from indices of the grid and old values of references to new values.

        Args:
            values: values of all references: for arrays the stacks of their blocks.
        """
        first = self._num_scalars
        shapes = [x.shape for x in values]
        shapes[first : first + len(self._blocks)] = [blocks.block_shape for blocks in self._blocks]
        avals = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, values, strict=True)]
        indices = [jax.ShapeDtypeStruct((), np.int32)] * len(self._grid)

        def fun(indices: Values, state: Values) -> Any:
            author_indices = [indices[n] for n in self._author_dims]
            sizes = [np.int32(self._grid[n]) for n in self._author_dims]
            kernel = closed(self._jaxpr)
            return _run_state(lambda refs: _evaluate_kernel(kernel, list(refs), author_indices, sizes))(state)

        return _jaxpr_without_refs(fun, indices, avals)

    def _run_loops(self, indices: Values, values: Values, scalars: Values, body: ClosedJaxpr) -> Values:
        """Runs a Pallas kernel in a loop over the next dimension of the grid, and in it over the others.

        Each array is a stack of all its blocks. The loop that selects a block loads it, so that inner loops carry the
        block alone, and stores it after them.

        Args:
            indices: indices along the dimensions that outer loops go through; a further one for each inner loop.
            values: values of all references: of arrays the stacks of their blocks, or a block that is loaded.
            scalars: the prefetched scalars.
            body: the kernel, from indices and values of all references to their new values.

        Returns:
            New values of all references.
        """
        depth = len(indices)
        first = self._num_scalars
        # Blocks that depend on no further dimension: loaded here, and stored after the inner loops.
        loaded = {first + n: blocks for n, blocks in enumerate(self._blocks) if blocks.depth == depth}
        padded_indices = [*indices, *(np.int32(0) for _ in self._grid[depth:])]
        starts = {n: blocks.starts(padded_indices, scalars) for n, blocks in loaded.items()}
        inner = [loaded[n].load(x, starts[n]) if n in loaded else x for n, x in enumerate(values)]
        # Numbers of the references that the kernel writes; loops carry no others.
        changed = [n for n, x in enumerate(body.jaxpr.outvars) if x is not body.jaxpr.invars[len(self._grid) + n]]

        def step(index: Any, carries: Values) -> Values:
            replaced = dict(zip(changed, carries, strict=True))
            state = [replaced.get(n, x) for n, x in enumerate(inner)]
            after = self._run_loops([*indices, index], state, scalars, body)
            return [after[n] for n in changed]

        if depth == len(self._grid):
            finals = list(jaxpr_as_fun(body)(*indices, *inner))
        else:
            size = self._grid[depth]
            carries = [inner[n] for n in changed]
            carries = step(np.int32(0), carries) if size == 1 else lax.fori_loop(0, size, step, carries)
            replaced = dict(zip(changed, carries, strict=True))
            finals = [replaced.get(n, x) for n, x in enumerate(inner)]
        return [
            (loaded[n].store(x, finals[n], starts[n]) if n in loaded else finals[n]) if n in changed else x
            for n, x in enumerate(values)
        ]


def _without_ref(aval: Any) -> Any:
    """Abstract value of what a reference holds."""
    return getattr(aval, "inner_aval", aval)


def _uninitialized(aval: Any) -> Any:
    """Values of memory that nothing has written, as Pallas interprets it: no number, the smallest integer, or false."""
    dtype = aval.dtype
    if jnp.issubdtype(dtype, jnp.inexact):
        return lax.full(aval.shape, np.nan, dtype)
    return lax.full(aval.shape, False if dtype == jnp.bool_ else jnp.iinfo(dtype).min, dtype)


def _pad_to(x: Any, shape: tuple[int, ...]) -> Any:
    """Array with more elements at its ends, in which nothing has been written."""
    if x.shape == shape:
        return x
    ends = [(0, m - n, 0) for m, n in zip(shape, x.shape, strict=True)]
    return lax.pad(x, _uninitialized(jax.ShapeDtypeStruct((), x.dtype)), ends)


def _is_natural(atom: Any) -> bool:
    """True for a number that is known, and not negative."""
    return isinstance(atom, Literal) and int(atom.val) >= 0


def _run_state(fun: Callable[[Any], Any]) -> Callable[[Any], Any]:
    from jax.experimental.pallas import run_state  # a slow import, which has happened where a kernel is called

    return run_state(fun)


def _jaxpr_without_refs(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Jaxpr of a function that runs code on references, such as a kernel, with values in place of the references.

    Traced twice: the first jaxpr has references, which JAX's rules then replace as its equations are evaluated.
    """
    staged = jax.make_jaxpr(fun)(*args)

    def of_arrays(*values: Any) -> Values:
        return eval_jaxpr(staged, values, _run_equation, lambda x: x)

    return jax.make_jaxpr(of_arrays)(*staged.in_avals)


def _run_equation(eqn: JaxprEqn, operands: Values) -> Sequence[Any]:
    """Results of an equation; of a function of references by JAX's implementation, which has none."""
    if eqn.primitive.name != "run_state":
        return eval_equation(eqn, *operands)
    return eqn.primitive.impl(*operands, **eqn.params)


def _evaluate_index_map(index_map: ClosedJaxpr, indices: Values, scalars: Values) -> Values:
    """Results of an index map of a Pallas kernel: the number of a block along each dimension.

    It reads prefetched scalars as references. With scalars it is run on references, to which it writes its results, as
    JAX has rules to replace these by values.
    """
    inner: Any = jaxpr_as_fun(index_map)
    if not scalars:
        return list(inner(*indices))
    results = [lax.full((), 0, aval.dtype) for aval in index_map.out_avals]

    def fun(indices: Values, scalars: Values, results: Values) -> Any:
        def write(refs: Any) -> None:
            scalar_refs, result_refs = refs
            for ref, value in zip(result_refs, inner(*indices, *scalar_refs), strict=True):
                ref[...] = value

        return _run_state(write)((scalars, results))[1]

    discharged = _jaxpr_without_refs(fun, indices, scalars, results)
    return list(jaxpr_as_fun(discharged)(*indices, *scalars, *results))


def _evaluate_kernel(jaxpr: ClosedJaxpr, operands: Values, indices: Values, sizes: Values) -> Values:
    """Evaluates a Pallas kernel for one point of the grid, with values for `program_id` and `num_programs`.

    Args:
        jaxpr: the kernel, or a jaxpr inside it.
        operands: a value for each input.
        indices: index along each dimension of the grid.
        sizes: size of each dimension of the grid.
    """

    def with_indices(inner: Any) -> Callable[..., Values]:
        return lambda *xs: _evaluate_kernel(closed(inner), list(xs), indices, sizes)

    def evaluate_equation(eqn: JaxprEqn, xs: Values) -> Sequence[Any]:
        """An equation with values for `program_id` and `num_programs`, also in the loops and branches it holds."""
        name = eqn.primitive.name
        params = eqn.params
        with source_of(eqn):
            if name in _INDICES:
                return [(indices if name == "program_id" else sizes)[params["axis"]]]
            if not _reads_indices(eqn):
                return eval_equation(eqn, *xs)
            if name == "cond":
                return list(lax.switch(xs[0], [with_indices(branch) for branch in params["branches"]], *xs[1:]))
            if name == "scan":
                return _trace_scan(with_indices(params["jaxpr"]), xs, params)
            if name == "while":
                cond, body = with_indices(params["cond_jaxpr"]), with_indices(params["body_jaxpr"])
                return _trace_while(cond, body, xs, params)
            return with_indices(params[CALLEES[name]])(*xs)

    return eval_jaxpr(jaxpr, operands, evaluate_equation, constant=lambda x: x)


def _trace_scan(body: Callable[..., Values], xs: Values, params: dict[str, Any]) -> Values:
    """A `scan` of the kernel, traced again: its body reads indices of the grid, which its jaxpr cannot take.

    Args:
        body: function that evaluates the body with these indices.
        xs: operands of the loop.
        params: parameters of the `scan`.
    """
    inside = scan_body(params)
    consts, carry, stacks = (xs[places] for places in inside.operands)

    def step(carry: Values, row: Values) -> tuple[Values, Values]:
        results = body(*consts, *carry, *row)
        return list(results[inside.results.carries]), list(results[inside.results.stacks])

    carry, rows = lax.scan(step, carry, stacks, params["length"], params["reverse"])
    return [*carry, *rows]


def _trace_while(
    cond: Callable[..., Values], body: Callable[..., Values], xs: Values, params: dict[str, Any]
) -> Values:
    """A `while` of the kernel, traced again: its functions read indices of the grid, which its jaxprs cannot take.

    Args:
        cond: function that evaluates the condition with these indices.
        body: likewise the body.
        xs: operands of the loop.
        params: parameters of the `while`.
    """
    tested_constants = xs[while_condition(params).operands.constants]
    constants, carries, _ = (xs[places] for places in while_body(params).operands)
    return list(
        lax.while_loop(
            lambda carry: cond(*tested_constants, *carry)[0],
            lambda carry: body(*constants, *carry),
            carries,
        )
    )
