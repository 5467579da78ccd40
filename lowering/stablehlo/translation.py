"""Translation of a module of StableHLO into operations of JAX.

Input: the bytes of a module, and a value for each argument of its function. Output: the values of its results, made by
operations of JAX, which `jax.make_jaxpr` turns into a jaxpr. Calls are inlined; a loop with a known trip count becomes
a scan, others stay loops; indices and shapes are computed while the module is read, so that those of polymorphic
modules are known. An operation without a counterpart becomes a module of its own, see `exported_calls`.
Source: the StableHLO specification; JAX, "Exporting and serializing staged-out computations".
Limits: values of 64 bits only where JAX has them; no tokens.

Attributes, types and constants of operations are values of Python and NumPy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import mlir, stablehlo
from ipujax.lowering.stored_modules import StoredModule
from ipujax.runtime.names_at_import import jax_jit

ir = mlir.ir
Operation = Any  # an operation of a module, as MLIR gives it to Python: operands, results, attributes, regions
Region = Any  # code inside an operation: one block, whose last operation names the results
_DTYPES = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint2", "uint4", "uint8", "uint16", "uint32"),
    *("uint64", "bfloat16", "float16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)
SMALL_ELEMENTS = 64  # of arrays that are computed while a module is read: indices, shapes


class UntranslatedError(ValueError):
    """An operation that has no counterpart in JAX; the text names it."""


@cache
def _dtypes_by_name() -> dict[str, np.dtype[Any]]:
    with mlir.make_ir_context():
        return {str(mlir.dtype_to_ir_type(jnp.dtype(name))): jnp.dtype(name) for name in _DTYPES}


def has_64_bits() -> bool:
    """True if JAX computes with numbers of 64 bits."""
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64


def dtype_of(kind: Any) -> np.dtype[Any]:
    """Dtype of the elements of a tensor type."""
    name = str(ir.RankedTensorType(kind).element_type) if isinstance(kind, ir.RankedTensorType) else str(kind)
    dtype = _dtypes_by_name().get(name)
    if dtype is None:
        raise UntranslatedError(f"a value of type {name}")
    return dtype


def shape_of(kind: Any) -> tuple[int, ...]:
    """Shape of a tensor type; −1 for a dimension that only values have."""
    tensor = ir.RankedTensorType(kind)
    return tuple(-1 if tensor.is_dynamic_dim(n) else int(tensor.get_dim_size(n)) for n in range(tensor.rank))


def static_shape(kind: Any) -> tuple[int, ...]:
    """Shape of a tensor type whose dimensions are all known."""
    shape = shape_of(kind)
    if -1 in shape:
        raise UntranslatedError(f"a result of type {kind}, whose shape only a run knows")
    return shape


def ints(op: Operation, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
    """Integers of an attribute; the default where it is absent."""
    return tuple(int(n) for n in op.attributes[name]) if name in op.attributes else tuple(default)


def integer(op: Operation, name: str, default: int = 0) -> int:
    """Integer of an attribute; the default where it is absent."""
    return int(ir.IntegerAttr(op.attributes[name]).value) if name in op.attributes else default


def flag(op: Operation, name: str) -> bool:
    """Truth of an attribute; False where it is absent."""
    return name in op.attributes and bool(ir.BoolAttr(op.attributes[name]).value)


def flags(op: Operation, name: str, length: int) -> tuple[bool, ...]:
    """Truths of an attribute; all False where it is absent."""
    return tuple(bool(x) for x in op.attributes[name]) if name in op.attributes else (False,) * length


def pairs(op: Operation, name: str, length: int) -> list[tuple[int, int]]:
    """Pairs of integers of an attribute; zeros where it is absent."""
    if name not in op.attributes:
        return [(0, 0)] * length
    return [(int(low), int(high)) for low, high in np.array(op.attributes[name]).reshape(length, 2)]


def text(op: Operation, name: str) -> str:
    """Text of an attribute, or the name of a symbol; "" where it is absent."""
    if name not in op.attributes:
        return ""
    attribute = op.attributes[name]
    return str(ir.StringAttr(attribute).value) if isinstance(attribute, ir.StringAttr) else str(attribute).lstrip("@")


def word(op: Operation, name: str) -> str:
    """Word of an enumeration, as LT of `#stablehlo<comparison_direction LT>`; "" where it is absent."""
    return str(op.attributes[name]).rstrip(">").rpartition(" ")[2] if name in op.attributes else ""


def constant_value(op: Operation, *, is_broadcast: bool = False) -> Any:
    """Array of a `stablehlo.constant`.

    Args:
        op: the operation.
        is_broadcast: whether an array of many equal elements may be an operation that fills it, which needs no memory.
    """
    kind = op.results[0].type
    dtype = dtype_of(kind)
    shape = static_shape(kind)
    is_of_numpy = dtype.kind in "biuf" and "int2" not in dtype.name and "int4" not in dtype.name
    # A copy: the attribute ends with its module.
    value = np.array(op.attributes["value"]).astype(dtype) if is_of_numpy else _constant_by_xla(op, shape, dtype)
    first = value.reshape(-1)[:1]
    if is_broadcast and value.size > SMALL_ELEMENTS and bool((value == first).all()):
        return jax.lax.full(shape, first[0], dtype)
    return value.reshape(shape)


def _constant_by_xla(op: Operation, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Array of a constant that XLA computes: MLIR gives Python no buffer of these dtypes."""
    kind = str(op.results[0].type)
    line = str(op).partition(" = ")[2]
    module = f"module {{ func.func public @main() -> {kind} {{ %0 = {line}\n return %0 : {kind} }} }}"
    stored = StoredModule(module, "constant", (), (jax.ShapeDtypeStruct(shape, dtype),))
    return np.asarray(jax_jit(stored).lower().compile()()[0])


Values = list[Any]  # arrays of JAX or, where known, of NumPy
Rule = Callable[["Scope", Any, Values], Sequence[Any]]
Environment = dict[Any, Any]  # values by those of the module

SINGLE = "*"  # name of the rule of operations that have none
# Of operations that hold others, or are single themselves: their errors are those of the module.
FINAL = ("func.call", *(f"stablehlo.{name}" for name in ("while", "case", "if", "composite", "custom_call")))

_OF_WORDS = ("stablehlo.bitcast_convert", "stablehlo.rng_bit_generator")  # see `elementwise.Words64`
_AT_RUN_TIME = ("stablehlo.rng_bit_generator", "stablehlo.custom_call", "func.call")

# Parts of the names of operations that name no scope of the user's: calls and loops of JAX.
_NO_SCOPE = re.compile(r"jit|closed_call|while|body|cond|scan|branch_\d+_fun|checkpoint|remat\d*|rematted_computation")
_TRANSFORMED = re.compile(r"(\w+)\((.*)\)")


@dataclass(frozen=True)
class Success:
    """The report that a routine has succeeded, or an array of such truths: NaN marks failures in its results already.

    Args:
        shape: of the array of the module.
        dtype: likewise.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, eq=False)
class Scope:
    """Values of one region, and the functions of its module.

    Args:
        functions: operation of each function by name.
        rules: rule of each operation by name.
        values: values of the region and of those around it.
        meshes: mesh by name.
    """

    functions: Mapping[str, Operation]
    rules: Mapping[str, Rule]
    values: Environment
    meshes: Mapping[str, jax.sharding.AbstractMesh]

    def block(self, region: Region, arguments: Sequence[Any]) -> Values:
        """Values of the results of a region on its arguments; those of regions around it are read too."""
        block = region.blocks[0]
        values = {**self.values, **dict(zip(block.arguments, arguments, strict=True))}
        return Scope(self.functions, self.rules, values, self.meshes).run(block)

    def function(self, name: str, arguments: Sequence[Any]) -> Values:
        """Values of the results of a function of the module."""
        block = self.functions[name].regions[0].blocks[0]
        values = dict(zip(block.arguments, arguments, strict=True))
        return Scope(self.functions, self.rules, values, self.meshes).run(block)

    def run(self, block: Any) -> Values:
        """Runs the operations of a block, adding results to `values`; returns the values that the block returns."""
        for op in block.operations:
            operation = op.operation
            operands = [self.values[x] for x in operation.operands]
            if operation.name in ("func.return", "stablehlo.return"):
                return operands
            with scopes_of(operation.location):
                results = self.results(operation, operands)
            self.values.update(zip(operation.results, results, strict=True))
        raise UntranslatedError("a block without an end")

    def results(self, op: Operation, operands: Values) -> Values:
        """Values of the results of an operation, by its rule.

        An operation that the rule cannot translate, or that has none, is a call of a module of it alone (`SINGLE`).
        """
        try:
            return self._results_of(self.rules.get(op.name, self.rules[SINGLE]), op, operands)
        except UntranslatedError:
            if op.name in FINAL or op.name not in self.rules:
                raise
            return self._results_of(self.rules[SINGLE], op, operands)

    def _results_of(self, rule: Rule, op: Operation, operands: Values) -> Values:
        """Results of an operation: computed at once, as numbers, for indices and shapes; else as operations of JAX.

        Where JAX has no numbers of 64 bits, an operation on them is computed at once if it can be, else it has no
        counterpart. Control flow and calls do (`FINAL`), whose operands of 64 bits may be unused, and operations that
        read such numbers as pairs of words. What reads the report of a routine (`Success`) is known after success.
        """
        if any(isinstance(x, Success) for x in operands):
            return _after_success(op, operands)
        is_wide = not has_64_bits() and _reads_64_bits(op, operands)
        if _is_computed_now(op, operands, is_wide=is_wide):
            with jax.ensure_compile_time_eval(), jax.enable_x64(is_wide or has_64_bits()):
                results = [np.asarray(x) if isinstance(x, jax.Array) else x for x in rule(self, op, operands)]
            results = [_made_on_tiles(x) if is_wide else x for x in results]
        elif is_wide and op.name not in (*FINAL, *_OF_WORDS):
            raise UntranslatedError(f"{op.name} with numbers of 64 bits, which JAX does not have here")
        else:
            results = list(rule(self, op, operands))
        for result, value in zip(op.results, results, strict=True):
            _check_type(op, result.type, value)
        return results


def _after_success(op: Operation, operands: Values) -> Values:
    """Results of an operation that reads the report of a routine: a selection takes what holds after success."""
    if op.name == "stablehlo.select":
        return [operands[1]]
    return [Success(shape_of(result.type), dtype_of(result.type)) for result in op.results]


def _is_computed_now(op: Operation, operands: Values, *, is_wide: bool) -> bool:
    """True for operations on indices and shapes: small arrays of whole numbers or truths that are values already.

    Also for operations on values of 64 bits of any size, `is_wide`, that JAX does not have here: by these it counts the
    elements of random numbers.
    """
    are_values = all(isinstance(x, np.ndarray) for x in operands) and op.name not in _AT_RUN_TIME
    are_small = all(isinstance(x, np.ndarray) and x.size <= SMALL_ELEMENTS and x.dtype.kind in "biu" for x in operands)
    return are_values and not op.regions and (is_wide or (are_small and bool(operands)))


def _reads_64_bits(op: Operation, operands: Values) -> bool:
    kinds = [result.type for result in op.results if isinstance(result.type, ir.RankedTensorType)]
    return any(
        dtype.itemsize == 8 and dtype.kind in "iuf" for dtype in (*(x.dtype for x in operands), *map(dtype_of, kinds))
    )


def _made_on_tiles(value: Any) -> Any:
    """Many numbers that count up, or are equal, as operations that make them on tiles; others stay constants.

    So they need no memory of the program. Numbers of 64 bits stay too: JAX may not have them here.
    """
    if not isinstance(value, np.ndarray) or value.size <= SMALL_ELEMENTS or value.dtype.itemsize == 8:
        return value
    flat = value.reshape(-1)
    if (flat == flat[0]).all():
        return jax.lax.full(value.shape, flat[0], value.dtype)
    if (flat == np.arange(value.size, dtype=value.dtype)).all():
        return jax.lax.reshape(jax.lax.iota(value.dtype, value.size), value.shape)
    return value


def _check_type(op: Operation, kind: Any, value: Any) -> None:
    """Refuse a result of another type than the module's: a wrong translation, or 64 bits that JAX does not have."""
    if value is None or not isinstance(kind, ir.RankedTensorType):
        return
    expected = shape_of(kind)
    is_equal = len(expected) == len(value.shape) and all(
        m in (-1, n) for m, n in zip(expected, value.shape, strict=True)
    )
    if not is_equal or value.dtype != dtype_of(kind):
        raise UntranslatedError(
            f"{op.name} with a result of type {kind}, which is {value.dtype}{list(value.shape)} here"
        )


def scopes_of(location: Any) -> ExitStack:
    """Context with the scopes of the user's that a location of the module names."""
    stack = ExitStack()
    for name in scope_names(getattr(location, "name_str", None) or ""):
        stack.enter_context(jax.named_scope(name))
    return stack


def scope_names(name: str) -> list[str]:
    """Scopes in the name of an operation, as `layer` of `jit(f)/transpose(jvp(layer))/while/body/dot_general`."""
    names = []
    for part in name.split("/")[:-1]:
        while match := _TRANSFORMED.fullmatch(part):
            part = "" if _NO_SCOPE.fullmatch(match[1]) else match[2]
        if part and not _NO_SCOPE.fullmatch(part):
            names.append(part)
    return names


def module_of(serialized: bytes) -> Any:
    """Module of bytes that `jax.export` serialized."""
    context = mlir.make_ir_context()
    with context:
        return stablehlo.deserialize_portable_artifact(context, serialized)


def functions_of(module: Any) -> dict[str, Any]:
    """Operation of each function of a module by name."""
    operations = [op.operation for op in module.body.operations]
    return {ir.StringAttr(op.attributes["sym_name"]).value: op for op in operations if op.name == "func.func"}
