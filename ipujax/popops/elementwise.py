"""Elementwise operations: one table of functions by PopLibs' names, and `map` over expressions of them.

Each name `op` gives `op(graph, a, …, prog, name)`, which returns a new tensor, and `op_in_place`, which writes to its
first operand. Shapes broadcast as in numpy; types must be equal. A new tensor is mapped as the operand of most even
tile mapping is, however few tiles that uses, as PopLibs does it (`createOutputForElementWiseOp`).
Limits: an expression runs as one compute set an operation; PopLibs may fuse it into one.

Sums of scaled tensors in place, the update of an optimiser, are functions of their own.
Source: popops `ScaledAdd.hpp`. Scales and the second tensor are cast to the type of the first, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.poplar.library import add_elementwise, add_elementwise as _add, check_tensors, checked, same_type
from ipujax.poplar.types import cast_values, element_type
from ipujax.popops.expr import NUM_OF_ONE_TYPE, Expression, evaluate
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor, dtype_name

Scale = float | Tensor
Speciality = Literal["default", "x_minus_ax_plus_by"]


def scaled_add_to(
    graph: Graph,
    a: Tensor,
    b: Tensor,
    scale: Scale,
    prog: Program,
    name: str = "scaled_add_to",
    *,
    scale_a: Scale | None = None,
    speciality: Speciality = "default",
) -> None:
    """Compute `a = scale_a · a + scale · b`, in place.

    Args:
        graph: graph to add to.
        a: written.
        b: of the same shape.
        scale: of `b`; a number, or a tensor of one element.
        prog: program to add to.
        name: debug name.
        scale_a: of `a`, 1 when None.
        speciality: "x_minus_ax_plus_by" computes `a = a - scale_a · a + scale · b` instead.

    Raises:
        GraphError: shapes that differ, a scale of several elements, or an unknown speciality, or one without its scale.

    Source: popops::scaledAddTo, where the order is A, scaleA, B, scaleB; ScaledAddSpecialisation.
    """
    _add_scaled(graph, a, b, scale, scale_a, 1, speciality, prog, name)


def scaled_subtract_from(
    graph: Graph,
    a: Tensor,
    b: Tensor,
    scale: Scale,
    prog: Program,
    name: str = "scaled_subtract_from",
    *,
    scale_a: Scale | None = None,
) -> None:
    """Compute `a = scale_a · a - scale · b`, in place; arguments as of `scaled_add_to`.

    Source: popops::scaledSubtractFrom.
    """
    _add_scaled(graph, a, b, scale, scale_a, -1, "default", prog, name)


def _add_scaled(
    graph: Graph,
    a: Tensor,
    b: Tensor,
    scale: Scale,
    scale_a: Scale | None,
    sign: int,
    speciality: str,
    prog: Program,
    name: str,
) -> None:
    """Add the update `a = scale_a · a ± scale · b`, or as `speciality` says, to a program; refuse other operands."""
    # Scales that are numbers are constants of the vertices, not operands.
    scales = [s for s in (scale, scale_a) if isinstance(s, Tensor)]
    if a.shape != b.shape:
        raise GraphError(f"{name}: tensors differ in shape", expected=a.shape, got=b.shape)
    if any(s.size != 1 for s in scales):
        raise GraphError(f"{name}: a scale is one number", got=[s.shape for s in scales])
    check_scales(name, a.dtype, scale, scale_a)
    if speciality not in ("default", "x_minus_ax_plus_by") or (speciality != "default" and scale_a is None):
        expected = '"default", or "x_minus_ax_plus_by" with scale_a'
        raise GraphError(f"{name}: unknown speciality", expected=expected, got=repr(speciality))

    def compute(x: jax.Array, y: jax.Array, *scalars: jax.Array) -> jax.Array:
        """Compute the new `a`; `scalars` are the scales that are tensors."""
        unused = iter(scalars)

        # Called for `scale` first, then for `scale_a`: the order of `scales`.
        def factor(s: Scale) -> jax.Array:
            return next(unused).reshape(()).astype(x.dtype) if isinstance(s, Tensor) else jnp.asarray(s, x.dtype)

        term_b = y.astype(x.dtype) * factor(scale)
        scaled_a = x if scale_a is None else x * factor(scale_a)
        term_a = scaled_a if speciality == "default" else x - scaled_a
        return term_a + term_b if sign > 0 else term_a - term_b

    add_elementwise(graph, compute, [a, b, *scales], prog, name, [a])


def check_scales(name: str, dtype: Any, *scales: Scale | None) -> None:
    """Refuse scales of integers that are none: they are cast to the type of the elements, where 0.5 would be 0."""
    for scale in scales if np.dtype(dtype).kind in "iu" else ():
        if isinstance(scale, Tensor) and scale.dtype.kind not in "iu":
            got = dtype_name(scale.dtype)
            raise GraphError(f"{name}: the scale of {dtype_name(dtype)}", expected="an integer", got=got)
        if scale is not None and not isinstance(scale, Tensor):
            cast_values(scale, np.dtype(dtype), f"{name}: the scale")


Operation = Callable[..., Tensor]


# PopLibs' name, and the function of arrays. Operands must be of one type, except where `NUM_OF_ONE_TYPE` says fewer.
UNARY: dict[str, Callable[..., Any]] = {
    "abs": lax.abs,
    "asin": lax.asin,
    "bitwise_not": lax.bitwise_not,
    "cbrt": lax.cbrt,
    "ceil": lax.ceil,
    "cos": lax.cos,
    "count_leading_zeros": lax.clz,
    "erf": lax.erf,
    "exp": lax.exp,
    "expm1": lax.expm1,
    "floor": lax.floor,
    "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
    "inv": lax.reciprocal,
    "is_finite": lax.is_finite,
    "is_inf": jnp.isinf,
    "is_nan": jnp.isnan,
    "log": lax.log,
    "log1p": lax.log1p,
    "logical_not": jnp.logical_not,
    "nearby_int": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "neg": lax.neg,
    "popcount": lax.population_count,
    "relu": lambda x: jnp.maximum(x, 0),
    "round": lax.round,  # halves away from zero, as C's round (assumed of popops)
    "rsqrt": lax.rsqrt,
    "sigmoid": lax.logistic,
    "signum": lax.sign,
    "sin": lax.sin,
    "sqrt": lax.sqrt,
    "square": lax.square,
    "tan": lax.tan,
    "tanh": lax.tanh,
    "trunc": lambda x: jnp.where(x < 0, lax.ceil(x), lax.floor(x)),
}
BINARY: dict[str, Callable[..., Any]] = {
    "add": jnp.add,
    "atan2": jnp.arctan2,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xnor": lambda a, b: jnp.bitwise_not(jnp.bitwise_xor(a, b)),
    "bitwise_xor": jnp.bitwise_xor,
    "div": lambda a, b: lax.div(*jnp.broadcast_arrays(a, b)),  # integers: towards zero, as in C
    "eq": jnp.equal,
    "gt": jnp.greater,
    "gteq": jnp.greater_equal,
    "inv_std_dev_to_variance": lambda inverse, epsilon: 1 / lax.square(inverse) - epsilon,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "lt": jnp.less,
    "lteq": jnp.less_equal,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "mul": jnp.multiply,
    "neq": jnp.not_equal,
    "pow": jnp.power,
    "rem": lambda a, b: lax.rem(*jnp.broadcast_arrays(a, b)),
    "shift_left": jnp.left_shift,
    "shift_right": lambda a, b: lax.shift_right_logical(*jnp.broadcast_arrays(a, b)),
    "shift_right_sign_extend": lambda a, b: lax.shift_right_arithmetic(*jnp.broadcast_arrays(a, b)),
    "sub": jnp.subtract,
    "variance_to_inv_std_dev": lambda variance, epsilon: lax.rsqrt(variance + epsilon),
}
TERNARY: dict[str, Callable[..., Any]] = {
    "clamp": lambda x, low, high: lax.clamp(jnp.broadcast_to(low, x.shape), x, jnp.broadcast_to(high, x.shape)),
    "select": lambda chosen, other, predicate: jnp.where(predicate, chosen, other),
}
OPERATIONS = UNARY | BINARY | TERNARY
_NEW_TYPE = frozenset(  # results are BOOL, so that there is no in-place form
    ("is_finite", "is_inf", "is_nan", "eq", "gt", "gteq", "lt", "lteq", "neq")
)


def _operation(name: str, *, in_place: bool) -> Operation:
    """Make the public function of one row of the tables."""
    fun = OPERATIONS[name]
    count = 1 if name in UNARY else 2 if name in BINARY else 3
    names = "abc"[:count]

    def operation(*args: Any, **kwargs: Any) -> Tensor:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        graph, *operands, prog, debug_name = call.args
        # JAX would promote operands of different types; Poplar does not convert implicitly.
        same_type(name, operands[: NUM_OF_ONE_TYPE.get(name)])
        if name == "select":
            _check_predicate(operands[2])
        return _add(graph, fun, operands, prog, debug_name, [operands[0]] if in_place else ())

    # A signature of its own, so that `help`, completion and `checked` see the operands by name.
    kinds = {"graph": Graph, **dict.fromkeys(names, Tensor), "prog": Program}
    parameters = [Parameter(word, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind) for word, kind in kinds.items()]
    debug = Parameter("name", Parameter.POSITIONAL_OR_KEYWORD, annotation=str, default=name)
    signature = operation.__signature__ = Signature([*parameters, debug])  # type: ignore[attr-defined]
    operation.__name__ = operation.__qualname__ = f"{name}_in_place" if in_place else name
    to = "writes it to the first operand" if in_place else "returns it"
    operation.__doc__ = f"Computes `{name}` elementwise and {to}: (graph, {', '.join(names)}, prog, name)."
    return checked(operation.__name__, operation)


def _check_predicate(predicate: Tensor) -> None:
    check_tensors("select", predicate)
    if predicate.dtype != np.bool_:
        raise GraphError("select: the predicate", expected="bool", got=dtype_name(predicate.dtype), hint="popops.cast")


FUNCTIONS: dict[str, Operation] = {name: _operation(name, in_place=False) for name in OPERATIONS}
FUNCTIONS |= {f"{name}_in_place": _operation(name, in_place=True) for name in OPERATIONS if name not in _NEW_TYPE}


def map(graph: Graph, expression: Expression, tensors: Sequence[Tensor], prog: Program, name: str = "map") -> Tensor:
    """Compute an expression of tensors elementwise: `map(graph, Add(_1, Mul(_2, Const(3))), [a, b], prog)`.

    Args:
        graph: graph to add to.
        expression: of `popops.expr`; `_1` stands for the first tensor.
        tensors: operands, of shapes that broadcast.
        prog: program to add to.
        name: debug name.

    Returns:
        A new tensor.

    Raises:
        GraphError: a placeholder without a tensor, tensors that do not broadcast or differ in type, or a constant that
            their type cannot represent.
    """
    return _add(graph, lambda *arrays: evaluate(expression, arrays, OPERATIONS), tensors, prog, name)


def map_in_place(
    graph: Graph, expression: Expression, tensors: Sequence[Tensor], prog: Program, name: str = "map"
) -> None:
    """Write an expression of tensors to the first of them; arguments as of `map`."""
    _add(graph, lambda *arrays: evaluate(expression, arrays, OPERATIONS), tensors, prog, name, tensors[:1])


def cast(graph: Graph, x: Tensor, dtype: Any, prog: Program, name: str = "cast") -> Tensor:
    """Convert a tensor to a type; returns the tensor itself if it has that type."""
    kind = element_type(dtype, name)
    return _add(graph, lambda a: a.astype(kind), [x], prog, name)
