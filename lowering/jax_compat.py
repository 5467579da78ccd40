"""The only file that touches JAX's less stable surface: tracing and jaxpr types.

Written for jax 0.10. Everything else in ipujax imports these names from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any, TypeVar

import jax
import jax.lax.linalg
import numpy as np
from jax.extend import core as _core
from jax.extend.core import primitives as _primitives
from jax.interpreters import ad, batching, mlir, partial_eval

ClosedJaxpr = _core.ClosedJaxpr
Jaxpr = _core.Jaxpr
JaxprEqn = _core.JaxprEqn
Literal = _core.Literal
Primitive = _core.Primitive
Var = _core.Var
DropVar = _core.DropVar
Atom = Var | Literal

_T = TypeVar("_T")

# Parameter that holds the callee, by primitive name.
CALLEES: dict[str, str] = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "composite": "jaxpr",
    "linear_call": "callee",
    "ipu_pipeline": "loop",
    "remat_opt": "fwd_jaxpr",  # of a custom_vjp(optimize_remat=True); what only the gradient needs is dead code
}

check_jaxpr = _core.check_jaxpr
jaxpr_as_fun = _core.jaxpr_as_fun
jaxprs_in_params = _core.jaxprs_in_params
new_jaxpr_eqn = _core.new_jaxpr_eqn
_PUBLIC = (value for module in (_primitives, jax.lax, jax.lax.linalg) for value in vars(module).values())
PUBLIC_PRIMITIVES = frozenset(value.name for value in _PUBLIC if isinstance(value, Primitive))

with jax.ensure_compile_time_eval():  # also where this is imported under a transformation
    _EVALUATION = _core.find_top_trace(())


def is_evaluating() -> bool:
    """Whether operations of JAX compute their results now: no transformation is tracing them."""
    return _core.find_top_trace(()) is _EVALUATION


def make_primitive(
    name: str, compute: Callable[..., Any], abstract: Callable[..., Any], batched: Callable[..., Any] | None = None
) -> Primitive:
    """A primitive with several results that plain JAX can run and vmap.

    Args:
        name: its name.
        compute: a JAX function of operands and parameters that returns the list of results.
        abstract: the same from shapes and dtypes to `jax.ShapeDtypeStruct`s.
        batched: from operands, the batch axis of each (None without) and parameters to results and their axes; without
            it, vmap refuses.
    """
    primitive = _computed_primitive(name, compute)
    primitive.def_abstract_eval(lambda *avals, **params: [_core_aval(out) for out in abstract(*avals, **params)])
    if batched is not None:
        batching.primitive_batchers[primitive] = batched
    return primitive


def _computed_primitive(name: str, compute: Callable[..., Any]) -> Primitive:
    """A primitive with several results that runs and lowers as a JAX function of operands and parameters."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(compute)
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=True))
    return primitive


def make_call_primitive(name: str, body: str, refuse_derivative: Callable[..., None]) -> Primitive:
    """A primitive with several results that means a jaxpr it holds, and has no derivative.

    Args:
        name: its name.
        body: the parameter that holds the `ClosedJaxpr`; its effects are the primitive's.
        refuse_derivative: called with the parameters where one is asked for; raises.
    """

    def compute(*operands: Any, **params: Any) -> list[Any]:
        return list(jaxpr_as_fun(params[body])(*operands))

    def abstract(*avals: Any, **params: Any) -> tuple[list[Any], Any]:
        return list(params[body].out_avals), params[body].effects

    def batched(axis: Any, operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[list[Any], list[int]]:
        inside = jax.vmap(jaxpr_as_fun(params[body]), axes, 0, axis_name=axis.name, axis_size=axis.size)
        results = list(inside(*operands))
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
    """A primitive with several results that evaluates a jaxpr, with the effects of that jaxpr.

    Args:
        name: its name.
        compute: a JAX function of operands and parameters that returns the list of results.
        abstract: the same from shapes and dtypes to `jax.ShapeDtypeStruct`s or abstract values.
        callee: the parameter that holds the jaxpr, a `ClosedJaxpr`, with an input for each operand and an output for
            each result; those that nothing needs are dropped from it with the results.
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
        return [True] * len(eqn.invars), eqn.replace(params={**eqn.params, callee: live})

    partial_eval.dce_rules[primitive] = drop_dead_code
    return primitive


def without_axes(effects: Any) -> frozenset[Any]:
    """Effects but those of naming an axis, which whoever evaluates a jaxpr over one has bound."""
    return frozenset(effect for effect in effects if type(effect).__name__ != "NamedAxisEffect")


def call_equation(invars: Sequence[Atom], outvars: Sequence[Var], callee: ClosedJaxpr, like: JaxprEqn) -> JaxprEqn:
    """An equation that calls a jaxpr, at the place of another equation."""
    params = {"call_jaxpr": callee}
    return new_jaxpr_eqn(
        list(invars), list(outvars), _primitives.closed_call_p, params, callee.jaxpr.effects, like.source_info
    )


def new_equation(
    primitive: Primitive, invars: Sequence[Atom], outvars: Sequence[Var], params: dict[str, Any], like: JaxprEqn | None
) -> JaxprEqn:
    """An equation without effects, at the place of another if there is one."""
    info = None if like is None else like.source_info
    return new_jaxpr_eqn(list(invars), list(outvars), primitive, params, frozenset(), info)


def context_mesh(eqn: JaxprEqn) -> jax.sharding.AbstractMesh:
    """The mesh that was set where an equation was traced, as by `jax.set_mesh`; of no axes where none was."""
    return eqn.ctx.cur_abstract_mesh


def raw_frames(eqn: JaxprEqn) -> list[tuple[CodeType, int]]:
    """The code and the number of the instruction of each frame an equation was traced in, innermost first."""
    traceback = eqn.source_info.traceback
    return list(zip(*traceback.raw_frames(), strict=True)) if traceback else []


def scopes_in(stack: Any) -> list[str]:
    """The scopes of a name stack, outermost first, without its transformations."""
    return [name.name for name in stack.stack if type(name).__name__ == "Scope"]


def without_scopes(stack: Any, beginning: str) -> Any:
    """A name stack without scopes whose names begin so."""
    kept = tuple(x for x in stack.stack if type(x).__name__ != "Scope" or not x.name.startswith(beginning))
    return stack if len(kept) == len(stack.stack) else type(stack)(kept)


def spliced(fun: Callable[..., Any], eqn: JaxprEqn) -> list[JaxprEqn]:
    """Equations that a function of the operands traces to, in the place of one equation of one result.

    Args:
        fun: from arrays to an array, by functions of `jax.lax` that call no others.
        eqn: what they replace: its operands are theirs, its result, line and scope too.
    """
    body = jax.make_jaxpr(fun)(*(_shape_of(x) for x in eqn.invars))
    named: dict[Var, Any] = dict(zip(body.jaxpr.invars, eqn.invars, strict=True))
    assert not body.consts, "what is spliced has no constants"
    (result,) = body.jaxpr.outvars
    named_results: dict[Any, Var] = {result: eqn.outvars[0]}
    own = []
    for inner in body.jaxpr.eqns:
        invars = [named.get(x, x) if isinstance(x, Var) else x for x in inner.invars]
        outvars = [x if isinstance(x, DropVar) else named_results.get(x) or Var(x.aval) for x in inner.outvars]
        named.update(zip(inner.outvars, outvars, strict=True))
        own.append(inner.replace(invars=invars, outvars=outvars, source_info=eqn.source_info))
    return own


def eval_equation(eqn: JaxprEqn, *operands: Any) -> Any:
    """The results of one equation on arrays, a list."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def eval_jaxpr(
    jaxpr: ClosedJaxpr,
    operands: Sequence[_T],
    equation: Callable[[JaxprEqn, list[_T]], Sequence[_T]],
    constant: Callable[[Any], _T],
) -> list[_T]:
    """The results of a jaxpr in an interpretation of its equations, one after the other.

    Args:
        jaxpr: what is evaluated.
        operands: a value for each input.
        equation: from an equation and the values of its operands to those of its results.
        constant: from a constant or a literal, an array, to its value.
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
    """What a primitive's implementation does in JAX; None where it is no JAX code. It may be the primitive again.

    Args:
        eqn: an equation of the primitive, which gives shapes, dtypes and parameters.
    """

    def impl(*operands: Any) -> Any:
        return eqn.primitive.impl(*operands, **eqn.params)

    try:
        traced = trace(impl, [atom.aval for atom in eqn.invars], {}, ()).jaxpr
    except Exception:  # it may be code for arrays only, and raise whatever that raises for tracers
        return None
    wanted: list[Any] = [var.aval for var in eqn.outvars]
    same = [(x.shape, x.dtype) for x in traced.out_avals] == [(x.shape, x.dtype) for x in wanted]
    return traced if same else None


def trace_over_axis(fun: Callable[..., Any], avals: Sequence[Any], axis: str, size: int) -> tuple[ClosedJaxpr, Any]:
    """Traces a function of arrays as one of `size` that run it over a named axis.

    Returns:
        The jaxpr, and the tree of results as `jax.ShapeDtypeStruct`s.
    """
    return jax.make_jaxpr(fun, axis_env=[(axis, size)], return_shape=True)(*avals)


def _core_aval(out: Any) -> Any:
    """JAX's own form of a shape and dtype; what is in that form stays."""
    return out if isinstance(out, jax.core.ShapedArray) else jax.core.ShapedArray(out.shape, out.dtype)


def _shape_of(atom: Atom) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a variable or a literal."""
    aval: Any = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def is_on_host(aval: Any) -> bool:
    """Whether an abstract value is one of `jax.memory.Space.Host`, as what is put to `pinned_host`."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def aval_on_host(shape: jax.ShapeDtypeStruct) -> Any:
    """The abstract value of an array on the host."""
    return jax.core.ShapedArray(shape.shape, shape.dtype, weak_type=shape.weak_type, memory_space=jax.memory.Space.Host)


def on_device(aval: Any) -> Any:
    """The abstract value of what is fetched from the host; others as they are."""
    return aval.update(memory_space=jax.memory.Space.Device) if is_on_host(aval) else aval


def on_host_if(aval: Any, is_there: bool) -> Any:
    """An abstract value of what is kept on the host, if it is."""
    return aval.update(memory_space=jax.memory.Space.Host) if is_there else aval


def shape_of(atom: Atom) -> tuple[int, ...]:
    """The shape of a variable or a literal."""
    aval: Any = atom.aval
    return tuple(aval.shape)


_NO_MANUAL_AXES = jax.core.ShapedArray((), np.dtype(np.float32)).manual_axis_type


def without_manual_axes(aval: Any) -> Any:
    """An abstract value that does not say over which axes of a mesh it varies."""
    if getattr(aval, "manual_axis_type", _NO_MANUAL_AXES) == _NO_MANUAL_AXES:
        return aval
    return aval.update(manual_axis_type=_NO_MANUAL_AXES)


def with_rows(aval: Any, rows: int) -> Any:
    """An abstract value with another number of rows, along its first axis."""
    return aval.update(shape=(rows, *aval.shape[1:]))


def closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """A closed jaxpr, whichever is given; the constants of an open one become its first inputs."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(with_constants_as_inputs(jaxpr), ())


def with_constants_as_inputs(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with its constants as further inputs, before the others."""
    if not jaxpr.constvars:
        return jaxpr
    names = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=names)


def eliminate_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """Drops equations that neither an output nor an effect needs; keeps all inputs."""
    return _live(jaxpr, instantiate=True)[0]


def used_inputs(jaxpr: Jaxpr) -> tuple[bool, ...]:
    """For each input whether an output or an effect needs it."""
    return tuple(_live(jaxpr, instantiate=False)[1])


def _live(jaxpr: Jaxpr, instantiate: bool) -> tuple[Jaxpr, list[bool]]:
    # With `jax_enable_checks` JAX compares types, in which the axes of a mesh stay after `shard_map` is gone.
    with jax.enable_checks(False):
        return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=instantiate)


def trace(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], static_argnums: Sequence[int]) -> Any:
    """Traces a function: `.jaxpr` (closed), `.in_avals`, `.in_tree`, `.out_info`, `.out_tree`.

    `args` may be arrays or `jax.ShapeDtypeStruct`s.
    """
    return jax.jit(fun, static_argnums=tuple(static_argnums)).trace(*args, **kwargs)


def argument_names(jaxpr: ClosedJaxpr) -> list[str]:
    """A name for each input, as the user would write it: `params['w']`; `arg3` where JAX does not know."""
    names = jaxpr.jaxpr.debug_info.arg_names or ()
    known = dict(enumerate(names))
    return [known.get(n) or f"arg{n}" for n in range(len(jaxpr.in_avals))]


def without_float0(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, list[int]]:
    """The jaxpr without inputs and results of dtype float0, which hold no data.

    They are the gradients of whole numbers, and have no bytes. What computes them is dead code afterwards.

    Returns:
        The jaxpr, and which of the inputs it kept.
    """
    body = jaxpr.jaxpr
    moved = [n for n, aval in enumerate(jaxpr.in_avals) if not is_float0(aval)]
    kept = [var for var in body.outvars if not is_float0(var.aval)]
    if (len(moved), len(kept)) == (len(body.invars), len(body.outvars)):
        return jaxpr, moved
    live = eliminate_dead_code(body.replace(outvars=kept))
    return ClosedJaxpr(live.replace(invars=[live.invars[n] for n in moved]), jaxpr.consts), moved


def with_float0(arrays: Iterable[Any], is_float0: Sequence[bool], shapes: Sequence[Sequence[int]]) -> list[Any]:
    """Results of a jaxpr without float0, with arrays of float0 in their places.

    Args:
        arrays: the results that hold data, in order.
        is_float0: of each result whether it is of dtype float0.
        shapes: of each result.
    """
    given = iter(arrays)
    pairs = zip(is_float0, shapes, strict=True)
    return [np.zeros(shape, jax.dtypes.float0) if empty else next(given) for empty, shape in pairs]


def constants_as_inputs(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """The jaxpr with its constants, which may be tracers, as further inputs before the others; and the constants."""
    return ClosedJaxpr(with_constants_as_inputs(jaxpr.jaxpr), ()), list(jaxpr.consts)


def host_constants_as_inputs(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[Any, ...]]:
    """The jaxpr with those of its constants that are on the host as further inputs behind the others; and these."""
    body = jaxpr.jaxpr
    there = [is_on_host(var.aval) for var in body.constvars]
    if not any(there):
        return jaxpr, ()
    pairs = list(zip(body.constvars, jaxpr.consts, there, strict=True))
    opened = body.replace(
        constvars=[var for var, _, is_there in pairs if not is_there],
        invars=[*body.invars, *(var for var, _, is_there in pairs if is_there)],
        debug_info=body.debug_info.with_unknown_names(),
    )
    kept = ClosedJaxpr(opened, [value for _, value, is_there in pairs if not is_there])
    return kept, tuple(value for _, value, is_there in pairs if is_there)


def part_of(jaxpr: Jaxpr, invars: list[Var], outvars: list[Var], eqns: list[JaxprEqn]) -> ClosedJaxpr:
    """A jaxpr of its own for equations from inside another, without effects and constants."""
    names = jaxpr.debug_info.with_unknown_names()
    part = jaxpr.replace(constvars=[], invars=invars, outvars=outvars, eqns=eqns, effects=frozenset(), debug_info=names)
    return ClosedJaxpr(part, ())


def is_token(aval: Any) -> bool:
    """Whether an abstract value is that of a token, which orders effects and holds nothing."""
    return isinstance(aval, _core.AbstractToken)


def is_float0(aval: Any) -> bool:
    """Whether an abstract value has the dtype of the gradients of whole numbers."""
    return bool(aval.dtype == jax.dtypes.float0)


def to_device(x: jax.Array) -> jax.Array:
    """The array in the memory where the engine computes."""
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(jax.typeof(x)) else x


def fetched(x: jax.Array) -> jax.Array:
    """A constant in the memory where the engine computes, whatever is being traced."""
    with jax.ensure_compile_time_eval():
        return to_device(x)


def to_memory_of(x: jax.Array, aval: Any) -> jax.Array:
    """The array in the memory of an abstract value."""
    return jax.device_put(x, jax.memory.Space.Host) if is_on_host(aval) else x


def with_weak_type(x: jax.Array, weak_type: bool) -> jax.Array:
    """The same array, weakly typed or not: whether it gives way to the other operand's dtype in type promotion."""
    if bool(getattr(jax.typeof(x), "weak_type", False)) == weak_type:
        return x
    return jax.lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=weak_type, sharding=None)
