"""Access to the less stable surface of JAX 0.10, to tracing and jaxpr types: other files import all of it from here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from types import CodeType
from typing import Any, TypeVar

import jax
import jax.lax.linalg
import numpy as np
from jax.extend import core as _core, source_info_util
from jax.extend.core import primitives as _primitives
from jax.extend.mlir.dialects import func as func, sdy as sdy, stablehlo as stablehlo
from jax.interpreters import ad, batching, mlir as mlir, partial_eval

from ipujax.runtime.names_at_import import jax_jit

ClosedJaxpr = _core.ClosedJaxpr
Jaxpr = _core.Jaxpr
JaxprEqn = _core.JaxprEqn
Literal = _core.Literal
Primitive = _core.Primitive
Var = _core.Var
DropVar = _core.DropVar
Atom = Var | Literal

_T = TypeVar("_T")

# Parameter with the called jaxpr, by primitive name.
CALLEES: dict[str, str] = {
    "jit": "jaxpr",
    **dict.fromkeys(("remat2", "checkpoint", "composite", "compute_on", "xla_metadata_call"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
    "custom_vmap_call": "call",
    "linear_call": "callee",
    "ipu_pipeline": "loop",
    "remat_opt": "fwd_jaxpr",  # of a custom_vjp(optimize_remat=True); values for the gradient alone are dead code
}

check_jaxpr = _core.check_jaxpr
jaxpr_as_fun = _core.jaxpr_as_fun
scan_p = _primitives.scan_p
sharding_constraint_p = _primitives.sharding_constraint_p
jaxprs_in_params = _core.jaxprs_in_params
find_top_trace = _core.find_top_trace
new_jaxpr_eqn = _core.new_jaxpr_eqn
_PUBLIC = (value for module in (_primitives, jax.lax, jax.lax.linalg) for value in vars(module).values())
PUBLIC_PRIMITIVES = frozenset(value.name for value in _PUBLIC if isinstance(value, Primitive))
with jax.core.eval_context():  # correct also if a transformation traces the import
    EVALUATION = find_top_trace(())


def is_evaluating() -> bool:
    """True if operations of JAX compute their results now: no transformation traces them."""
    return find_top_trace(()) is EVALUATION


def is_eager() -> bool:
    """True if no jaxpr is being made of operations of JAX; `jax.grad` or `jax.vmap` may transform them."""
    trace = find_top_trace(())
    while trace is not EVALUATION:
        if isinstance(trace, _kind_of_jaxpr_traces()) or not hasattr(trace, "parent_trace"):
            return False
        trace = trace.parent_trace
    return True


@cache
def _kind_of_jaxpr_traces() -> type:
    kinds: list[type] = []
    with jax.ensure_compile_time_eval():
        jax.make_jaxpr(lambda: kinds.append(type(_core.find_top_trace(()))))()
    return kinds[0]


def make_primitive(
    name: str, compute: Callable[..., Any], abstract: Callable[..., Any], batched: Callable[..., Any] | None = None
) -> Primitive:
    """Makes a primitive with several results that plain JAX can run and vmap.

    Args:
        name: its name.
        compute: a JAX function of operands and parameters that returns the list of results.
        abstract: maps shapes and dtypes of the operands to `jax.ShapeDtypeStruct`s of the results.
        batched: maps operands, their batch axes and parameters to results and axes; None for `jax.vmap` of `compute`.
    """
    primitive = _computed_primitive(name, compute)
    primitive.def_abstract_eval(lambda *avals, **params: [_core_aval(out) for out in abstract(*avals, **params)])
    batching.primitive_batchers[primitive] = batched or partial(_batched_by_vmap, compute)
    return primitive


def _batched_by_vmap(compute: Callable[..., Any], xs: Any, axes: Any, **params: Any) -> tuple[Sequence[Any], list[int]]:
    results = jax.vmap(partial(compute, **params), axes)(*xs)
    return results, [0] * len(results)


def _computed_primitive(name: str, compute: Callable[..., Any]) -> Primitive:
    """Makes a primitive with several results that runs and lowers as a JAX function."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(compute)
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=True))
    return primitive


def implementations(primitive: Primitive) -> tuple[Any, ...]:
    """Functions of a primitive: it computes by the first, and is lowered by the others, from `register_lowering`."""
    return primitive.impl, mlir._platform_specific_lowerings["cpu"].get(primitive), mlir._lowerings.get(primitive)


def define_jvp(primitive: Primitive, rule: Callable[..., tuple[Sequence[Any], Sequence[Any]]]) -> None:
    """Defines the derivative of a primitive with several results.

    Args:
        primitive: the primitive.
        rule: maps operands, the tangent of each, and parameters to results and the tangent of each; None is zero.
    """

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
        results, pushed = rule(primals, [None if type(t) is ad.Zero else t for t in tangents], **params)
        zeros = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in results]
        return list(results), [zero if t is None else t for zero, t in zip(zeros, pushed, strict=True)]

    ad.primitive_jvps[primitive] = jvp


def define_transpose(primitive: Primitive, rule: Callable[..., Sequence[Any]]) -> None:
    """Defines the transpose of a primitive with several results that is linear in some operands.

    Args:
        primitive: the primitive.
        rule: maps cotangents of results (None is zero), operands (shape and dtype of those in which it is linear),
            which operands these are, and parameters to a cotangent of each operand, None for the others.
    """

    def transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
        is_linear = [ad.is_undefined_primal(x) for x in operands]
        values = [_shape_of(x) if linear else x for x, linear in zip(operands, is_linear, strict=True)]
        return list(rule([None if type(t) is ad.Zero else t for t in cotangents], values, is_linear, **params))

    ad.primitive_transposes[primitive] = transpose


def make_call_primitive(name: str, body: str, refuse_derivative: Callable[..., None]) -> Primitive:
    """Makes a primitive with several results that calls a jaxpr, and has no derivative; `jax.vmap` maps the jaxpr.

    Args:
        name: its name.
        body: the parameter with the `ClosedJaxpr`; its effects are the primitive's.
        refuse_derivative: called with the parameters when a derivative is requested; raises.
    """

    def compute(*operands: Any, **params: Any) -> list[Any]:
        return list(jaxpr_as_fun(params[body])(*operands))

    def abstract(*avals: Any, **params: Any) -> tuple[list[Any], Any]:
        return list(params[body].out_avals), params[body].effects

    def batched(axis: Any, operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[list[Any], list[int]]:
        results = list(jax.vmap(jaxpr_as_fun(params[body]), axes, axis_name=axis.name, axis_size=axis.size)(*operands))
        return results, [0] * len(results)

    def derivative(primals: Any, tangents: Any, **params: Any) -> None:
        refuse_derivative(**params)

    primitive = _computed_primitive(name, compute)
    primitive.def_effectful_abstract_eval(abstract)
    batching.fancy_primitive_batchers[primitive] = batched
    ad.primitive_jvps[primitive] = derivative
    return primitive


def make_holding_primitive(
    name: str, compute: Callable[..., Any], abstract: Callable[..., Any], callee: str
) -> Primitive:
    """Makes a primitive with several results that has a jaxpr as parameter, its effects, and dead-code elimination.

    Args:
        name: its name.
        compute: a JAX function of operands and parameters that returns the list of results.
        abstract: maps shapes and dtypes to `jax.ShapeDtypeStruct`s or abstract values of the results.
        callee: the parameter with the `ClosedJaxpr`, an input for each operand and an output for each result; dead code
            is dropped from it with unused results.
    """
    primitive = _computed_primitive(name, compute)
    primitive.def_effectful_abstract_eval(
        lambda *avals, **params: (
            [_core_aval(out) for out in abstract(*avals, **params)],
            without_axes(params[callee].jaxpr.effects),
        )
    )

    def drop_dead_code(used: list[bool], eqn: JaxprEqn) -> tuple[list[bool], JaxprEqn | None]:
        if not any(used) and not eqn.effects:
            return [False] * len(eqn.invars), None
        live = ClosedJaxpr(eliminate_dead_code(eqn.params[callee].jaxpr), eqn.params[callee].consts)
        # All operands stay: the inputs of the callee are paired with them by position.
        return [True] * len(eqn.invars), eqn.replace(params={**eqn.params, callee: live})

    partial_eval.dce_rules[primitive] = drop_dead_code
    return primitive


def without_axes(effects: Any) -> frozenset[Any]:
    """Effects but those of naming an axis, which the evaluation of a jaxpr over that axis binds."""
    # By class name: JAX does not export the class.
    return frozenset(effect for effect in effects if type(effect).__name__ != "NamedAxisEffect")


def call_equation(invars: Sequence[Atom], outvars: Sequence[Var], callee: ClosedJaxpr, like: JaxprEqn) -> JaxprEqn:
    """Equation that calls a jaxpr, with the source of another equation."""
    call = _primitives.closed_call_p
    params = {"call_jaxpr": callee}
    return new_jaxpr_eqn(list(invars), list(outvars), call, params, callee.jaxpr.effects, like.source_info)


def new_equation(
    primitive: Primitive, invars: Sequence[Atom], outvars: Sequence[Var], params: dict[str, Any], like: JaxprEqn | None
) -> JaxprEqn:
    """Equation without effects, with the source of another if there is one."""
    info = None if like is None else like.source_info
    return new_jaxpr_eqn(list(invars), list(outvars), primitive, params, frozenset(), info)


def source_of(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """Context in which equations are traced with the source lines and the name stack of another."""
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack)


def raw_frames(eqn: JaxprEqn) -> list[tuple[CodeType, int]]:
    """Code and instruction number of each frame an equation was traced in, innermost first."""
    traceback = eqn.source_info.traceback
    return list(zip(*traceback.raw_frames(), strict=True)) if traceback else []


def scopes_in(stack: Any) -> list[str]:
    """Scopes of a name stack, outermost first, without its transformations."""
    return [name.name for name in stack.stack if type(name).__name__ == "Scope"]


def without_scopes(stack: Any, prefix: str | tuple[str, ...]) -> Any:
    """Name stack without scopes whose names begin with a prefix, or with one of several."""
    remaining = tuple(x for x in stack.stack if type(x).__name__ != "Scope" or not x.name.startswith(prefix))
    return stack if len(remaining) == len(stack.stack) else type(stack)(remaining)


# Parameters that JAX has added to primitives, and code that binds primitives itself may leave out; all are None.
_WITH_ACCURACY = "cbrt cos exp exp2 expm1 log log1p logistic rsqrt sin sqrt tan tanh"
_OPTIONAL_PARAMS: dict[str, str] = {
    **dict.fromkeys(_WITH_ACCURACY.split(), "accuracy"),
    **dict.fromkeys(("broadcast_in_dim", "convert_element_type", "iota", "reshape"), "sharding"),
    **dict.fromkeys(("dot_general", "reduce_sum"), "out_sharding"),
}


def primitive_function(primitive: Primitive, params: dict[str, Any]) -> Callable[..., Any]:
    """A primitive with parameters as a function; parameters that JAX has added may be left out."""
    optional = _OPTIONAL_PARAMS.get(primitive.name)
    return partial(primitive.bind, **(params if optional is None else {optional: None, **params}))


def eval_equation(eqn: JaxprEqn, *operands: Any) -> Any:
    """Results of one equation on arrays, a list."""
    mesh = jax.sharding.get_abstract_mesh()  # of the evaluation: a pass may have replaced that of the trace
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def eval_jaxpr(
    jaxpr: ClosedJaxpr,
    operands: Sequence[_T],
    equation: Callable[[JaxprEqn, list[_T]], Sequence[_T]],
    constant: Callable[[Any], _T],
) -> list[_T]:
    """Interprets a jaxpr, one equation after the other, on values of any type (arrays, tracers, shapes).

    Args:
        jaxpr: the jaxpr.
        operands: a value for each input.
        equation: maps an equation and the values of its operands to the values of its results.
        constant: maps a constant or a literal, an array, to its value.

    Returns:
        The values of the results.
    """
    body = jaxpr.jaxpr
    env: dict[Var, _T] = dict(zip(body.invars, operands, strict=True))
    env.update(zip(body.constvars, map(constant, jaxpr.consts), strict=True))

    def read(atom: Atom) -> _T:
        aval: Any = atom.aval
        return constant(np.asarray(atom.val, aval.dtype)) if isinstance(atom, Literal) else env[atom]

    for eqn in body.eqns:
        results = equation(eqn, [read(atom) for atom in eqn.invars])
        env.update((v, x) for v, x in zip(eqn.outvars, results, strict=True) if not isinstance(v, DropVar))
    return [read(atom) for atom in body.outvars]


def traced_impl(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Jaxpr of the JAX code that implements an equation, maybe by its primitive again; None if it is no JAX code."""
    if eqn.effects:  # its code would have them while it is traced
        return None
    impl = partial(eqn.primitive.impl, **eqn.params)
    try:
        traced = trace(impl, [atom.aval for atom in eqn.invars], {}, ()).jaxpr
    except Exception:  # code for arrays only raises errors of any type for tracers
        return None
    result_avals: list[Any] = [var.aval for var in eqn.outvars]
    matches = [(x.shape, x.dtype) for x in traced.out_avals] == [(x.shape, x.dtype) for x in result_avals]
    return traced if matches else None


def trace_over_axis(fun: Callable[..., Any], avals: Sequence[Any], axis: str, size: int) -> tuple[ClosedJaxpr, Any]:
    """Traces a function of arrays over a named axis of a size; returns its jaxpr, and the tree of results as shapes."""
    return jax.make_jaxpr(fun, axis_env=[(axis, size)], return_shape=True)(*avals)


def _core_aval(out: Any) -> Any:
    """JAX's abstract value of a shape and dtype; an abstract value stays as it is."""
    return out if isinstance(out, jax.core.ShapedArray) else jax.core.ShapedArray(out.shape, out.dtype)


def _shape_of(atom: Atom) -> jax.ShapeDtypeStruct:
    aval: Any = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def is_on_host(aval: Any) -> bool:
    """True for an abstract value in `jax.memory.Space.Host`, such as one put to `pinned_host`."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def aval_on_host(shape: jax.ShapeDtypeStruct) -> Any:
    """Abstract value of an array on the host."""
    return jax.core.ShapedArray(shape.shape, shape.dtype, weak_type=shape.weak_type, memory_space=jax.memory.Space.Host)


def on_device(aval: Any) -> Any:
    """Abstract value of a value fetched from the host; others stay as they are."""
    return aval.update(memory_space=jax.memory.Space.Device) if is_on_host(aval) else aval


def on_host_if(aval: Any, is_there: bool) -> Any:
    """Abstract value moved to the host if `is_there`."""
    return aval.update(memory_space=jax.memory.Space.Host) if is_there else aval


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Shape of a variable or a literal."""
    aval: Any = atom.aval
    return tuple(aval.shape)


# Of a value that varies over no axis of a mesh; JAX has no public name for it.
_NO_MANUAL_AXES = jax.core.ShapedArray((), np.dtype(np.float32)).manual_axis_type


def without_manual_axes(aval: Any) -> Any:
    """Abstract value without the mesh axes over which it varies."""
    if getattr(aval, "manual_axis_type", _NO_MANUAL_AXES) == _NO_MANUAL_AXES:
        return aval
    return aval.update(manual_axis_type=_NO_MANUAL_AXES)


def with_rows(aval: Any, rows: int) -> Any:
    """Abstract value with another number of rows, along its first axis."""
    return aval.update(shape=(rows, *aval.shape[1:]))


def closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """Closed jaxpr of either form; the constants of an open one become its first inputs."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(with_constants_as_inputs(jaxpr), ())


def with_constants_as_inputs(jaxpr: Jaxpr) -> Jaxpr:
    """Jaxpr with its constants as first inputs."""
    if not jaxpr.constvars:
        return jaxpr
    # JAX checks that argument names are as many as inputs.
    names = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=names)


def eliminate_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """Drops equations that no output and no effect needs; keeps all inputs."""
    return _live(jaxpr, instantiate=True)[0]


def used_inputs(jaxpr: Jaxpr) -> tuple[bool, ...]:
    """Flag of each input: an output or an effect needs it."""
    return tuple(_live(jaxpr, instantiate=False)[1])


def _live(jaxpr: Jaxpr, *, instantiate: bool) -> tuple[Jaxpr, list[bool]]:
    """Jaxpr without dead code, and a flag of each input that is needed; with `instantiate` it keeps the others too."""
    # With `jax_enable_checks` JAX compares types, in which the axes of a mesh stay after `shard_map` is gone.
    with jax.enable_checks(False):
        return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=instantiate)


def trace(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], static_argnums: Sequence[int]) -> Any:
    """Traces a function of arrays or shapes: `.jaxpr` (closed), `.in_avals`, `.in_tree`, `.out_info`, `.out_tree`."""
    return jax_jit(fun, static_argnums=tuple(static_argnums)).trace(*args, **kwargs)


def argument_names(jaxpr: ClosedJaxpr) -> list[str]:
    """Name of each input as in the user's code, `params['w']`; `arg3` if JAX does not know it."""
    names = jaxpr.jaxpr.debug_info.arg_names or ()
    names_by_number = dict(enumerate(names))
    return [names_by_number.get(n) or f"arg{n}" for n in range(len(jaxpr.in_avals))]


def without_float0(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, list[int]]:
    """Drops inputs and results of dtype float0, gradients of integers; returns the numbers of the other inputs too."""
    body = jaxpr.jaxpr
    remaining_inputs = [n for n, aval in enumerate(jaxpr.in_avals) if not is_float0(aval)]
    remaining_outvars = [var for var in body.outvars if not is_float0(var.aval)]
    if (len(remaining_inputs), len(remaining_outvars)) == (len(body.invars), len(body.outvars)):
        return jaxpr, remaining_inputs
    # Equations of float0 only feed results that are dropped.
    live = eliminate_dead_code(body.replace(outvars=remaining_outvars))
    return ClosedJaxpr(live.replace(invars=[live.invars[n] for n in remaining_inputs]), jaxpr.consts), remaining_inputs


def with_float0(arrays: Iterable[Any], is_float0: Sequence[bool], shapes: Sequence[Sequence[int]]) -> list[Any]:
    """Inserts arrays of float0 into the results of a jaxpr without them; flags and shapes are of all results."""
    remaining = iter(arrays)
    pairs = zip(is_float0, shapes, strict=True)
    return [np.zeros(shape, jax.dtypes.float0) if empty else next(remaining) for empty, shape in pairs]


def constants_as_inputs(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """Jaxpr with its constants, which may be tracers, as first inputs; and the constants."""
    return ClosedJaxpr(with_constants_as_inputs(jaxpr.jaxpr), ()), list(jaxpr.consts)


def host_constants_as_inputs(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[Any, ...]]:
    """Jaxpr with constants in the host's memory as last inputs, since a program has to load them; and their values."""
    body = jaxpr.jaxpr
    on_host = [is_on_host(var.aval) for var in body.constvars]
    if not any(on_host):
        return jaxpr, ()
    pairs = list(zip(body.constvars, jaxpr.consts, on_host, strict=True))
    opened = body.replace(
        constvars=[var for var, _, is_there in pairs if not is_there],
        invars=[*body.invars, *(var for var, _, is_there in pairs if is_there)],
        debug_info=body.debug_info.with_unknown_names(),
    )
    result = ClosedJaxpr(opened, [value for _, value, is_there in pairs if not is_there])
    return result, tuple(value for _, value, is_there in pairs if is_there)


def part_of(jaxpr: Jaxpr, invars: list[Var], outvars: Sequence[Atom], eqns: list[JaxprEqn]) -> ClosedJaxpr:
    """Jaxpr of equations from inside another, without effects and constants."""
    names = jaxpr.debug_info.with_unknown_names()
    inner = jaxpr.replace(
        constvars=[], invars=invars, outvars=list(outvars), eqns=eqns, effects=frozenset(), debug_info=names
    )
    return ClosedJaxpr(inner, ())


def is_token(aval: Any) -> bool:
    """True for the abstract value of a token, which orders effects and holds no data."""
    return isinstance(aval, _core.AbstractToken)


def is_float0(aval: Any) -> bool:
    """True for an abstract value of the dtype of gradients of integers."""
    return bool(aval.dtype == jax.dtypes.float0)


def to_device(x: jax.Array) -> jax.Array:
    """Array in the memory where the engine computes."""
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(jax.typeof(x)) else x


def fetched(x: jax.Array) -> jax.Array:
    """Constant in the memory where the engine computes, under any trace."""
    with jax.ensure_compile_time_eval():
        return to_device(x)


def to_memory_of(x: jax.Array, aval: Any) -> jax.Array:
    """Array in the memory of an abstract value."""
    return jax.device_put(x, jax.memory.Space.Host) if is_on_host(aval) else x


def with_weak_type(x: jax.Array, weak_type: bool) -> jax.Array:
    """Array with or without weak type, which yields to the other operand's dtype in type promotion."""
    if bool(getattr(jax.typeof(x), "weak_type", False)) == weak_type:
        return x
    return jax.lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=weak_type, sharding=None)
