"""Makes codelets of the runtime from codelet classes and the shapes of their connections.

    SumVertex, shapes ((4,), ())  →  Codelet("SumVertex", fields in: float32, out: float32, compute, cycles)

A field without elements is not connected and reads as an empty array. A vector list is one operand, the concatenation
of its vectors. A codelet with state is made for each group of vertices, with a table of the state of each vertex.

Limits: the size of the vertex state is an estimate (`assumed`: 4 bytes a pointer or length).

A codelet without an estimate of its own takes the cycles of the operations of its JAX function. Code compiled from C++
issues one instruction a cycle (reference, needs of a first-principles model, point 5: the tutorials' dot product, 4
instructions a multiply-add, is within 4 % of hardware). Each element of a field is a load or a store; each element that
an operation computes, or that a reduction reads, is one instruction; a dot of n elements then takes 4 n. A division, a
root or another function takes the instructions of its row of PopLibs' estimators (reference 1.3) without that row's own
loads, stores and loop: 3 for a division of floats, 272 of integers, 4 for a logarithm. An iteration of a loop ends with
two more, which compare and branch, as in those rows. Data movement is counted with the loads, but a conversion from an
integer or to one is an instruction.

All of the estimate is `assumed`. Its limits: no instruction waits for another's result; a loop with a data-dependent
trip count counts once, a branch counts as its longest side.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import ceil, isfinite, prod
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.passes.count_loops import count_loops
from ipujax.lowering.popops import OP_COSTS, kind_of, scalar_instructions
from ipujax.poplar.vertex.vertex import NUM_DIMS, Vertex, VertexField
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import GraphError, whole_number
from ipujax.runtime.graph import BlockShapes, Codelet, Field
from ipujax.runtime.target import Target, nearest
from ipujax.runtime.tensor import dtype_name

OVERHEAD_CYCLES = 10  # assumed: entry, loading of pointers, exit
# poplibs popopsCycleEstimators.cpp: a C++ loop over vectors adds 5 cycles, two loads and a store among them.
_LOOP_INSTRUCTIONS = 2

_MOVES = {"broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice", "dynamic_update_slice"}
_VIEWS = {"expand_dims", "gather", "iota", "pad", "reshape", "rev", "slice", "squeeze", "stop_gradient", "transpose"}
_FREE = frozenset(_MOVES | _VIEWS)


def instructions(function: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Count the instructions of one call of a codelet's function of arrays."""
    jaxpr = count_loops(jax.make_jaxpr(function)(*arguments))
    accessed_elements = sum(prod(aval.shape) for aval in (*jaxpr.in_avals, *jaxpr.out_avals))
    return OVERHEAD_CYCLES + accessed_elements + _instructions_of_jaxpr(jaxpr.jaxpr)


def _instructions_of_jaxpr(jaxpr: Any) -> int:
    return sum(_instructions_of_equation(eqn) for eqn in jaxpr.eqns)


def _instructions_of_equation(eqn: Any) -> int:
    """Return the instructions of an equation in a vertex, estimated from shapes; loops on data count once."""
    name = eqn.primitive.name
    body_counts = [_instructions_of_jaxpr(jaxpr) for jaxpr in _jaxprs_in_params(eqn.params)]
    if body_counts:
        body = (max if name == "cond" else sum)(body_counts)
        # `length` is the trip count of a scan, of which some iterations are unrolled; that of a `while` is data, so it
        # counts once, and compares in its condition.
        length = int(eqn.params.get("length", 1))
        iterations = {"scan": _LOOP_INSTRUCTIONS * -(-length // int(eqn.params.get("unroll", 1))), "while": 1}
        return body * length + iterations.get(name, 0)
    computed_elements = max((prod(var.aval.shape) for var in eqn.outvars), default=0)
    if name in _FREE:
        return computed_elements if name == "convert_element_type" and _crosses_registers(eqn) else 0
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        # A multiplication and an addition; with the two loads of its operands, 4 instructions an element.
        return 2 * computed_elements * prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    read_elements = max((prod(var.aval.shape) for var in eqn.invars), default=0)
    return max(computed_elements, read_elements) * _instructions_of_element(eqn)


def _crosses_registers(eqn: Any) -> bool:
    """True if numbers go from integer registers to those of floats, or back."""
    kinds = [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in (eqn.invars[0], eqn.outvars[0])]
    return kinds[0] != kinds[1]


def _instructions_of_element(eqn: Any) -> int:
    """Instructions that compute one element: several of a function such as `exp`, one of a sum or a comparison."""
    # A negative power is costed as a division of two operands.
    is_reciprocal = eqn.primitive.name == "integer_pow" and eqn.params["y"] < 0
    name = "div" if is_reciprocal else eqn.primitive.name
    if name not in OP_COSTS or kind_of(name) != "function":
        return 1
    return scalar_instructions(name, eqn.invars[0].aval.dtype, 2 if is_reciprocal else len(eqn.invars))


def _jaxprs_in_params(params: dict[str, Any]) -> list[Any]:
    flat = [
        parameter for value in params.values() for parameter in (value if isinstance(value, tuple | list) else (value,))
    ]
    opened = [getattr(parameter, "jaxpr", parameter) for parameter in flat]
    return [parameter for parameter in opened if hasattr(parameter, "eqns")]


# For each connected field, in order: () for a scalar, (n,) for a vector, the length of each vector for a list.
Shapes = tuple[tuple[int, ...], ...]
_POINTER_BYTES = 4  # assumed: a pointer or a length in the vertex state


def connected_fields(cls: type[Vertex]) -> tuple[VertexField, ...]:
    """Return the fields that connect to tensors, in order."""
    return tuple(field for field in cls.fields if not field.is_state)


def state_fields(cls: type[Vertex]) -> tuple[VertexField, ...]:
    """Return the fields that are state of the vertex, in order."""
    return tuple(field for field in cls.fields if field.is_state)


def num_elements(field: VertexField, shape: tuple[int, ...]) -> int:
    """Return the number of elements of a field whose connection has this shape."""
    return sum(shape) if field.kind == "list" else prod(shape)


def place_of(cls: type[Vertex], function: str = "compute") -> str:
    """Return the source line of a codelet's function, for errors."""
    code = getattr(getattr(cls, function), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno} ({cls.__name__}.{function})" if code else cls.__name__


def vertex_codelet(cls: type[Vertex], shapes: Shapes) -> Codelet:
    """Return the codelet of vertices without state; raises GraphError if `compute` does not match written fields."""
    return _codelet(cls, shapes, lambda *blocks: _run(cls, shapes, {}, blocks))


def codelet_with_state(cls: type[Vertex], shapes: Shapes, state: Mapping[str, np.ndarray]) -> Codelet:
    """Return the codelet of vertices with state; `state` has by attribute the value of each vertex, [vertices]."""

    def compute(*blocks: jax.Array, origins: tuple[Any, ...]) -> Any:
        (number,) = origins  # index of the block along the axis "vertex"
        return _run(cls, shapes, {name: jnp.asarray(values)[number] for name, values in state.items()}, blocks)

    return replace(_codelet(cls, shapes, compute), takes=("origins",))


@remembered
def codelet_of_call(cls: type[Vertex], shapes: Shapes, state: tuple[tuple[str, Any], ...], code: Hashable) -> Codelet:
    """Return the codelet of vertices that all have the same state, one for all calls of equal arguments.

    Args:
        cls: the codelet class.
        shapes: of its `connected_fields`.
        state: value of each state field, by attribute.
        code: what the code of the class is equal by: its members, and values that it reads, may be replaced.

    Raises:
        GraphError: `compute` does not match the written fields.
    """

    def compute(*blocks: jax.Array) -> Any:
        return _run(cls, shapes, {name: jnp.asarray(value, dtypes[name]) for name, value in state}, blocks)

    dtypes = {field.attribute: field.dtype for field in state_fields(cls)}
    return _codelet(cls, shapes, compute)


def result_shapes(cls: type[Vertex], read_shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the shape of each written field that `compute` returns for these shapes of the read fields."""
    read = [field for field in connected_fields(cls) if field.is_read]
    written = [field for field in connected_fields(cls) if field.is_written]
    arguments_by_attribute = {
        f.attribute: jax.ShapeDtypeStruct(shape, f.dtype) for f, shape in zip(read, read_shapes, strict=True)
    }
    arguments_by_attribute |= {f.attribute: jax.ShapeDtypeStruct((), f.dtype) for f in state_fields(cls)}

    def values(arguments: dict[str, Any]) -> list[Any]:
        return _sort_by_field(cls, cls.compute(**{name: arguments[name] for name in cls.parameters}), written)

    shapes = [tuple(value.shape) for value in jax.eval_shape(values, arguments_by_attribute)]
    for field, shape in zip(written, shapes, strict=True):
        read_shape = arguments_by_attribute[field.attribute].shape if field.is_read else None
        if len(shape) != NUM_DIMS[field.kind] or read_shape not in (None, shape):
            expected = (
                f"a {field.kind}"
                if read_shape is None
                else f"{dtype_name(field.dtype)}{list(read_shape)}, as it was given"
            )
            raise _wrong_result(cls, f"shape {list(shape)} for field {field.name}", expected)
    return shapes


def with_cycles(codelet: Codelet, cycles: np.ndarray) -> Codelet:
    """Return a codelet with these cycles of each vertex, int64 broadcastable to the grid; −1 keeps the estimate."""

    def estimated_cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        return cycles if np.all(cycles >= 0) else np.where(cycles >= 0, cycles, codelet.cycles(shapes, target))

    return replace(codelet, cycles=estimated_cycles, costed_by="vertex")


def _codelet(cls: type[Vertex], shapes: Shapes, compute: Callable[..., Any]) -> Codelet:
    """Return the runtime's codelet of a vertex class for connections of these shapes; see `vertex_codelet`."""
    connected = connected_fields(cls)
    specs, state = _specs(cls, shapes)
    # Traced for the checks in `_run` only: a wrong result is an error when the codelet is made, not at the first run.
    jax.eval_shape(lambda blocks, values: _run(cls, shapes, values, blocks), specs, state)
    fields = tuple(
        Field(field.name, field.direction, field.dtype)  # type: ignore[arg-type]  # state is not connected
        for field, shape in zip(connected, shapes, strict=True)
        if num_elements(field, shape)
    )
    state_bytes = sum(_state_bytes(field, shape) for field, shape in zip(connected, shapes, strict=True))
    state_bytes += sum(field.dtype.itemsize for field in state_fields(cls))
    return Codelet(
        cls.vertex_name,
        fields,
        compute,
        _cycles(cls, shapes),
        state_bytes,
        cls.code_bytes,
        supervisor=False,
        language=cls.language,
        costed_by="machine",
    )


def _specs(cls: type[Vertex], shapes: Shapes) -> tuple[list[jax.ShapeDtypeStruct], dict[str, jax.ShapeDtypeStruct]]:
    """Return the arguments of `_run`: blocks of non-empty read fields, and the state by attribute."""
    pairs = zip(connected_fields(cls), shapes, strict=True)
    blocks = [
        jax.ShapeDtypeStruct((sum(shape),) if field.kind == "list" else shape, field.dtype)
        for field, shape in pairs
        if field.is_read and num_elements(field, shape)
    ]
    return blocks, {field.attribute: jax.ShapeDtypeStruct((), field.dtype) for field in state_fields(cls)}


def _state_bytes(field: VertexField, shape: tuple[int, ...]) -> int:
    # A vector has a pointer and a length; a list of vectors has these of its table, and of each vector.
    # A scalar is a pointer alone.
    words = {"scalar": 1, "vector": 2, "list": 2 + 2 * len(shape)}[field.kind]
    return words * _POINTER_BYTES


def _cycles(cls: type[Vertex], shapes: Shapes) -> Callable[[BlockShapes, Target], np.ndarray]:
    """Return the cycle formula of a codelet: its class's own, else the estimate from instructions."""
    if cls.cycles is not None:
        return lambda blocks, target: np.asarray(_declared_cycles(cls, shapes, target), np.int64)
    blocks, state = _specs(cls, shapes)
    names = list(state)

    def flat(*values: jax.Array) -> Any:
        return _run(cls, shapes, dict(zip(names, values[len(blocks) :], strict=True)), values[: len(blocks)])

    # Counted once, when the codelet is made: the estimate depends on shapes only, not on the target.
    count = instructions(flat, [*blocks, *state.values()])
    return lambda blocks, target: np.asarray(count, np.int64)


def _declared_cycles(cls: type[Vertex], shapes: Shapes, target: Target) -> int:
    """Return the cycles of one vertex by the `cycles` of its class."""
    estimate = cls.cycles
    pairs = list(zip(connected_fields(cls), shapes, strict=True))
    assert estimate is not None
    arguments: dict[str, Any] = {f.attribute: _spec(f, shape) for f, shape in pairs}
    arguments |= {"shapes": {f.name: shape for f, shape in pairs}, "target": target}
    cycles = estimate(**{name: arguments[name] for name in cls.cycle_parameters})
    cycles = cycles.item() if hasattr(cycles, "item") and cycles.ndim == 0 else cycles
    # Infinite and undefined estimates stay floats, which `whole_number` refuses.
    cycles = ceil(cycles) if isinstance(cycles, float) and isfinite(cycles) else cycles
    return whole_number(cycles, f"cycles of codelet {cls.vertex_name}", where=place_of(cls, "cycles"))


def _spec(field: VertexField, shape: tuple[int, ...]) -> Any:
    """Return the shape and dtype of a field's connection; of each vector of a list."""
    if field.kind == "list":
        return tuple(jax.ShapeDtypeStruct((n,), field.dtype) for n in shape)
    return jax.ShapeDtypeStruct(shape, field.dtype)


def _run(cls: type[Vertex], shapes: Shapes, state: Mapping[str, Any], blocks: Sequence[jax.Array]) -> tuple[Any, ...]:
    """Call `compute` of one vertex on the blocks of non-empty read fields; returns those of written fields."""
    arguments = dict(state)
    # `blocks` has none for an empty connection: `compute` sees an empty array in its place.
    remaining_blocks = iter(blocks)
    connected = list(zip(connected_fields(cls), shapes, strict=True))
    for field, shape in connected:
        if field.is_read:
            block = next(remaining_blocks) if num_elements(field, shape) else jnp.zeros((0,), field.dtype)
            arguments[field.attribute] = _split(block, shape) if field.kind == "list" else block
    result = cls.compute(**{name: arguments[name] for name in cls.parameters})
    written = [(field, shape) for field, shape in connected if field.is_written]
    values = _sort_by_field(cls, result, [field for field, _ in written])
    return tuple(
        _check_block(cls, field, shape, value)
        for (field, shape), value in zip(written, values, strict=True)
        if num_elements(field, shape)
    )


def _split(block: jax.Array, lengths: tuple[int, ...]) -> tuple[jax.Array, ...]:
    return tuple(block[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0)))


def _sort_by_field(cls: type[Vertex], result: Any, written: Sequence[VertexField]) -> list[Any]:
    """Return the results of `compute` in the order of the written fields."""
    names = [field.name for field in written]
    # A dict may use names or attributes of fields: `in` or `in_`.
    if isinstance(result, Mapping):
        values_by_name = {_field_name(written, key): value for key, value in result.items()}
        if set(values_by_name) != set(names):
            raise _wrong_result(cls, f"values of {sorted(values_by_name)}", f"values of {names}")
        return [values_by_name[name] for name in names]
    # The tuple of the vectors of a single list is one value, not a value for each field.
    is_one_list = len(written) == 1 and written[0].kind == "list"
    values = list(result) if isinstance(result, tuple | list) and not is_one_list else [result]
    if len(values) != len(written):
        raise _wrong_result(cls, f"{len(values)} values", f"a value for each of {names}")
    return values


def _field_name(written: Sequence[VertexField], key: str) -> str:
    return next((field.name for field in written if key in (field.name, field.attribute)), key)


def _check_block(cls: type[Vertex], field: VertexField, shape: tuple[int, ...], value: Any) -> jax.Array:
    """Return the block of a written field, after a check of type and shape."""
    if field.kind != "list":
        return _check_array(cls, field, shape, value)
    vectors = list(value)
    if len(vectors) != len(shape):
        raise _wrong_result(cls, f"{len(vectors)} vectors of {field.name}", f"{len(shape)} vectors")
    return jnp.concatenate([_check_array(cls, field, (n,), vector) for n, vector in zip(shape, vectors, strict=True)])


def _check_array(cls: type[Vertex], field: VertexField, shape: tuple[int, ...], value: Any) -> jax.Array:
    """Return a result as an array of its field's type; refuse another shape or type."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        got = f"a {type(value).__name__} for field {field.name}"
        raise _wrong_result(cls, got, f"{dtype_name(field.dtype)}{list(shape)}") from error
    # Python numbers and weakly typed arrays take the type of the field, as they do in JAX.
    is_plain = not hasattr(value, "dtype") or bool(getattr(jax.typeof(array), "weak_type", False))
    if array.shape != shape or (array.dtype != field.dtype and not is_plain):
        got = f"{dtype_name(array.dtype)}{list(array.shape)}"
        raise _wrong_result(cls, f"{got} for field {field.name}", f"{dtype_name(field.dtype)}{list(shape)}")
    return array.astype(field.dtype)


def _wrong_result(cls: type[Vertex], got: str, expected: str) -> GraphError:
    return GraphError(f"compute of {cls.vertex_name} returns {got}", where=place_of(cls), expected=expected, got=got)


def codelets_in(source: type[Vertex] | ModuleType | Sequence[type[Vertex]]) -> list[type[Vertex]]:
    """Return the codelet classes of an argument of `Graph.add_codelets`: one, several, or all that a module defines."""
    if isinstance(source, ModuleType):
        classes = [
            value for value in vars(source).values() if _is_codelet(value) and value.__module__ == source.__name__
        ]
        classes = [cls for cls in classes if hasattr(cls, "compute")]  # without one it is a base of codelets
    else:
        classes = list(source) if isinstance(source, list | tuple) else [source]
    for cls in classes:
        if not _is_codelet(cls):
            expected = "subclasses of poplar.Vertex, or a module of them"
            raise GraphError("a codelet must be a class", expected=expected, got=repr(cls))
        if not hasattr(cls, "compute") or not any(field.is_written for field in cls.fields):
            raise GraphError(f"codelet {cls.__name__} is unfinished", expected="a compute and a field that is written")
    return classes


def _is_codelet(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Vertex) and value is not Vertex


def field_number(cls: type[Vertex], name: str) -> int:
    """Number of a field by its name; raises GraphError that names the nearest field."""
    names = [field.name for field in cls.fields]
    if name not in names:
        message = f"codelet {cls.vertex_name} has no field {name!r}"
        raise GraphError(message, expected=f"one of {names}", got=repr(name), hint=nearest(name, names))
    return names.index(name)
