"""Expressions of elementwise operations, for `popops.map`.

    expression ::= PlaceHolder(n) (_1, _2, …) | Const(number) | Cast(expression, dtype)
                 | Apply(operation, expression, …)

`Add(_1, _2)`, `_1 + _2` and so on make `Apply` nodes, under PopLibs' names. Operators are Python's, `&`, `|`,
`^` and `~` those of bits, `>>` keeps the sign; `==` compares expressions themselves, so equality is `Equal(_1, _2)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.poplar.types import cast_values, element_type
from ipujax.runtime.errors import GraphError, user_line
from ipujax.runtime.tensor import dtype_name

NUM_OF_ONE_TYPE = {"select": 2}  # leading operands that must be of one type; all of them for other operations


def _maker(operation: str) -> Callable[..., Expression]:
    def make(*operands: Any) -> Expression:
        return Apply(operation, *operands)

    make.__doc__ = f"Return the expression `popops.{operation}` of expressions or numbers."
    return make


def _operators(operation: str) -> tuple[Callable[..., Expression], Callable[..., Expression]]:
    # The second is the reflected form: Python calls it for `number + expression` with the operands swapped.
    return _maker(operation), lambda a, b: Apply(operation, b, a)


class Expression:
    """Node of an expression tree; Python's operators build larger trees."""

    __slots__ = ()

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("sub")
    __mul__, __rmul__ = _operators("mul")
    __truediv__, __rtruediv__ = _operators("div")
    __mod__, __rmod__ = _operators("rem")
    __pow__, __rpow__ = _operators("pow")
    __and__, __rand__ = _operators("bitwise_and")
    __or__, __ror__ = _operators("bitwise_or")
    __xor__, __rxor__ = _operators("bitwise_xor")
    __lshift__, __rlshift__ = _operators("shift_left")
    __rshift__, __rrshift__ = _operators("shift_right_sign_extend")
    __lt__, __le__, __gt__, __ge__ = map(_maker, ("lt", "lteq", "gt", "gteq"))
    __neg__, __invert__, __abs__ = map(_maker, ("neg", "bitwise_not", "abs"))

    def __bool__(self) -> bool:
        """Raise `GraphError`: a chained comparison or `and` would drop a part of the expression."""
        raise GraphError(
            "an expression has no truth value",
            expected="operators on expressions",
            got="a chained comparison, `and`, `or`, `not` or `if`",
            where=user_line(),
            hint="And(0 < _1, _1 < 1), Or, Not, Select",
        )


@dataclass(frozen=True, slots=True)
class PlaceHolder(Expression):
    """Tensor of an expression, by its number from 1."""

    number: int

    def __repr__(self) -> str:
        return f"_{self.number}"


@dataclass(frozen=True, slots=True)
class Const(Expression):
    """Number, cast to the type of the other operands, which must be able to represent it."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class Cast(Expression):
    """Expression converted to a type."""

    operand: Expression
    dtype: Any


class Apply(Expression):
    """Operation of `popops` by name, on expressions or numbers."""

    __slots__ = ("operands", "operation")

    def __init__(self, operation: str, *operands: Any) -> None:
        self.operation = operation
        self.operands = tuple(x if isinstance(x, Expression) else Const(x) for x in operands)

    def __repr__(self) -> str:
        return f"{self.operation}({', '.join(map(repr, self.operands))})"


def evaluate(
    expression: Expression, arrays: Sequence[jax.Array], operations: Mapping[str, Callable[..., Any]]
) -> jax.Array:
    """Compute an expression of arrays.

    Args:
        expression: tree of placeholders, constants and operations.
        arrays: values of the placeholders, in order.
        operations: functions of arrays by name.

    Raises:
        GraphError: a placeholder without an array, an expression of constants alone, operands that differ in type, or a
            constant that the type of the others does not hold.
    """
    match expression:
        case PlaceHolder(number):
            if not 1 <= number <= len(arrays):  # numbers start at 1, as in PopLibs
                expected = f"_1 … _{len(arrays)}"
                raise GraphError(f"placeholder _{number} has no tensor", where=user_line(), expected=expected)
            return arrays[number - 1]
        case Cast(operand, dtype):
            return evaluate(operand, arrays, operations).astype(element_type(dtype, "a Cast"))
        case Apply():
            values = [evaluate(x, arrays, operations) for x in expression.operands if not isinstance(x, Const)]
            if not values:
                raise GraphError("an expression must have a placeholder", where=user_line(), got=repr(expression))
            # The predicate of a select is BOOL and must not decide the type of a number.
            dtype = next((v.dtype for v in values if v.dtype != bool), values[0].dtype)
            unused_values = iter(values)
            operands = [
                jnp.asarray(cast_values(x.value, dtype, f"a constant of {expression!r}"))
                if isinstance(x, Const)
                else next(unused_values)
                for x in expression.operands
            ]
            types = [dtype_name(v.dtype) for v in operands[: NUM_OF_ONE_TYPE.get(expression.operation)]]
            if len(set(types)) > 1:
                message = f"operands of {expression!r} differ in type"
                raise GraphError(message, where=user_line(), got=", ".join(types), hint="popops.expr.Cast")
            shape = jnp.broadcast_shapes(*(v.shape for v in operands))
            # Scalars are broadcast first, so that they become immediates of the vertex whatever the operation.
            broadcast = [jnp.broadcast_to(v, shape) if v.ndim == 0 else v for v in operands]
            return operations[expression.operation](*broadcast)
    raise GraphError("an expression must have a placeholder", where=user_line(), got=repr(expression))


# Names for the first six; further ones are `PlaceHolder(7)` and so on.
_1, _2, _3, _4, _5, _6 = (PlaceHolder(n) for n in range(1, 7))

Add, Sub, Mul, Divide, Max, Min, Pow, Rem, Atan2 = map(
    _maker, ("add", "sub", "mul", "div", "max", "min", "pow", "rem", "atan2")
)
Abs, Neg, Inv, Square, Sqrt, Rsqrt, Cbrt, Signum = map(
    _maker, ("abs", "neg", "inv", "square", "sqrt", "rsqrt", "cbrt", "signum")
)
Exp, Expm1, Log, Log1p, Erf = map(_maker, ("exp", "expm1", "log", "log1p", "erf"))
Sin, Cos, Tan, Asin, Tanh, Sigmoid, Relu, GeluErf = map(
    _maker, ("sin", "cos", "tan", "asin", "tanh", "sigmoid", "relu", "gelu_erf")
)
Ceil, Floor, Round, NearbyInt, Trunc = map(_maker, ("ceil", "floor", "round", "nearby_int", "trunc"))
IsFinite, IsInf, IsNaN = map(_maker, ("is_finite", "is_inf", "is_nan"))
Equal, NotEqual, Gt, Gte, Lt, Lte = map(_maker, ("eq", "neq", "gt", "gteq", "lt", "lteq"))
And, Or, Not, Select, Clamp = map(_maker, ("logical_and", "logical_or", "logical_not", "select", "clamp"))
BitwiseAnd, BitwiseOr, BitwiseXor, BitwiseXnor, BitwiseNot = map(
    _maker, ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_xnor", "bitwise_not")
)
Shl, Shr, ShrSE, PopCount, CountLeadingZeros = map(
    _maker, ("shift_left", "shift_right", "shift_right_sign_extend", "popcount", "count_leading_zeros")
)
InvStdDevToVariance, VarianceToInvStdDev = map(_maker, ("inv_std_dev_to_variance", "variance_to_inv_std_dev"))
