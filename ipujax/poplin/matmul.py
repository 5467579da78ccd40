"""Matrix multiplication, also in groups and in place.

Source: Poplar & PopLibs user guide, tutorial 4; poplin `MatMul.hpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipujax.lowering.emit import placing
from ipujax.lowering.poplin import matmul as _matmul
from ipujax.poplar.library import same_type
from ipujax.poplar.types import element_type
from ipujax.poplin.operands import Options, create_mapped_operands, settings
from ipujax.popops.elementwise import scaled_add_to
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Builder, Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor


def mat_mul(
    graph: Graph,
    a: Tensor,
    b: Tensor,
    prog: Program,
    name: str = "mat_mul",
    *,
    output_type: Any = None,
    options: Options = None,
) -> Tensor:
    """Multiply matrices [m, k] by [k, n].

    Args:
        graph: graph to add to.
        a: left matrix.
        b: right matrix.
        prog: program to add to.
        name: debug name.
        output_type: type of the result, that of `a` when None.
        options: "availableMemoryProportion", the share of a tile that the plan may use; "partialsType", "half" or
            "float".

    Returns:
        A new tensor [m, n].

    Raises:
        GraphError: shapes that do not match, or an operand without a tile mapping.
    """
    _check_ranks(name, a, b, 2)
    # The op library multiplies groups only: a matrix is a group of one.
    grouped = mat_mul_grouped(
        graph, a.expand_dims(0), b.expand_dims(0), prog, name, output_type=output_type, options=options
    )
    return grouped.reshape(grouped.shape[1:])


def mat_mul_grouped(
    graph: Graph,
    a: Tensor,
    b: Tensor,
    prog: Program,
    name: str = "mat_mul",
    *,
    output_type: Any = None,
    options: Options = None,
) -> Tensor:
    """Multiply groups of matrices, [g, m, k] by [g, k, n], to [g, m, n]; arguments as of `mat_mul`."""
    _check_ranks(name, a, b, 3)
    kind = None if output_type is None else element_type(output_type, name)
    # Operands without a tile mapping are an error here; only results and temporaries get one.
    with placing(graph, [a, b]):
        return _matmul(Builder(graph, prog, name), a, b, out_dtype=kind, **settings("matmul", options))


def mat_mul_acc(
    graph: Graph,
    c: Tensor,
    scale: float | Tensor,
    a: Tensor,
    b: Tensor,
    prog: Program,
    name: str = "mat_mul_acc",
    *,
    options: Options = None,
) -> None:
    """Add `scale · a · b` to a matrix `c`, in place; the scale is a number or a tensor of one element.

    Source: poplin::matMulAcc.
    """
    _check_ranks(name, a, b, 2)
    mat_mul_grouped_acc(graph, c.expand_dims(0), scale, a.expand_dims(0), b.expand_dims(0), prog, name, options=options)


def mat_mul_grouped_acc(
    graph: Graph,
    c: Tensor,
    scale: float | Tensor,
    a: Tensor,
    b: Tensor,
    prog: Program,
    name: str = "mat_mul_acc",
    *,
    options: Options = None,
) -> None:
    """Add `scale · a · b` to groups of matrices `c` [g, m, n], in place; arguments as of `mat_mul_acc`.

    Source: poplin::matMulGroupedAcc.
    """
    # In the type of `c`, so that partials are rounded once.
    product = mat_mul_grouped(graph, a, b, prog, name, output_type=c.dtype, options=options)
    scaled_add_to(graph, c, product, scale, prog, f"{name}/add")


def transpose_grouped_matrix(x: Tensor) -> Tensor:
    """Return a view [g, n, m] of groups of matrices [g, m, n].

    Raises:
        GraphError: a tensor of another rank.

    Source: poplin::transposeGroupedMatrix.
    """
    if x.ndim != 3:
        raise GraphError("x must be groups of matrices", expected="[g, m, n]", got=list(x.shape))
    return x.transpose((0, 2, 1))


def _check_ranks(name: str, a: Tensor, b: Tensor, rank: int) -> None:
    same_type(name, [a, b])
    if a.ndim != rank or b.ndim != rank:
        got = f"{list(a.shape)} by {list(b.shape)}"
        raise GraphError(f"{name} multiplies tensors of {rank} dimensions", got=got)


def create_mat_mul_input_lhs(
    graph: Graph, dtype: Any, a_shape: Sequence[int], b_shape: Sequence[int], name: str = "lhs", options: Options = None
) -> Tensor:
    """Create a matrix [m, k] or groups [g, m, k], mapped for `mat_mul` or `mat_mul_grouped` by one of `b_shape`."""
    return _create_operand(graph, dtype, (a_shape, b_shape), 0, name, options)


def create_mat_mul_input_rhs(
    graph: Graph, dtype: Any, a_shape: Sequence[int], b_shape: Sequence[int], name: str = "rhs", options: Options = None
) -> Tensor:
    """Create a matrix [k, n] or groups [g, k, n], mapped for `mat_mul` or `mat_mul_grouped` of one of `a_shape`."""
    return _create_operand(graph, dtype, (a_shape, b_shape), 1, name, options)


# Both accept matrices and groups of them; PopLibs has two names for each.
create_mat_mul_grouped_input_lhs = create_mat_mul_input_lhs
create_mat_mul_grouped_input_rhs = create_mat_mul_input_rhs


def _create_operand(
    graph: Graph, dtype: Any, shapes: tuple[Sequence[int], Sequence[int]], position: int, name: str, options: Options
) -> Tensor:
    def build(scratch: Graph, operands: Sequence[Tensor]) -> None:
        # Views: mapping them maps the variables of the operands themselves.
        a, b = (x if x.ndim == 3 else x.expand_dims(0) for x in operands)
        _matmul(Builder(scratch, Program(), name), a, b, **settings("matmul", options))

    return create_mapped_operands(graph, [(shape, dtype) for shape in shapes], build, [position], [name])[0]
