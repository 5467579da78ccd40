"""Errors name the user's line, the value that was given and a remedy; and no step is left half done."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.hijax import AbstractValue
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax import poplar
from ipujax.lowering.jax_compat import ClosedJaxpr, Var
from ipujax.lowering_plan.traced_plan import check_values

DEVICE = ipu.IPUModel(tiles_per_ipu=4)
X = jnp.arange(6.0).reshape(2, 3)


def error_of(call: Callable[[], Any], kind: type[Exception] = ipu.IpuError) -> Any:
    """The error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    return caught.value


def add(a: Any, b: Any = 0.0, *, c: Any = 0.0) -> Any:
    return a + b + c


def yielding(x: Any) -> Any:
    yield x


# --- arguments --------------------------------------------------------------------------------------------------------

KEY = jax.random.key(0)
MODULE = eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=KEY), eqx.nn.Lambda(lambda x: x)])
NO_ARRAYS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str, str, str]] = {
    "string": (("no", X), {}, "argument a of add", "str 'no'", "static_argnums=0"),
    "in a tuple": ((X, ("up", 2)), {}, r"argument b\[0\] of add", "str 'up'", "static_argnums=1"),
    "by keyword": ((X,), {"c": ("up", max)}, r"argument c\[0\] of add", "str 'up'", "static_argnames='c'"),
    # Those that no setting makes static, as they cannot be hashed.
    "beside arrays": ((X, {"k": [X, "no"]}), {}, r"argument b\['k'\]\[1\] of add", "str 'no'", r"eqx.partition\(b, "),
    "function beside arrays": ((X,), {"c": (X, max)}, r"argument c\[1\] of add", "builtin_function", r"partition\(c, "),
    "module": (
        (eqx.nn.Linear(2, 2, key=KEY), MODULE),
        {},
        r"argument b\.layers\[1\]",
        "function <func",
        r"partition\(b, ",
    ),
    "function in a dict": ((X, {"k": max}), {}, r"argument b\['k'\] of add", "builtin_function", "close over b, which"),
    "strange dtype": ((np.array(["s"]),), {}, "argument a of add", "ndarray of <U1", "close over a, which"),
    "objects": ((X, np.array([None])), {}, "argument b of add", "ndarray of object", "convert it to an array"),
}


@pytest.mark.parametrize("device", [DEVICE, ipu.CPU()], ids=repr)
@pytest.mark.parametrize("name", NO_ARRAYS)
def test_no_array(name: str, device: Any) -> None:
    args, kwargs, what, got, hint = NO_ARRAYS[name]
    fun = ipu.jit(add, device=device)
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    error = error_of(lambda: fun(*args, **kwargs), ipu.ArgumentError)
    assert error.where == f"test_errors.py:{line} (<lambda>)"
    for text in (what, f"got: {got}", f"at: test_errors.py:{line}", f"try: .*{hint}"):
        with pytest.raises(ipu.ArgumentError, match=text):
            raise error
    if device == DEVICE:
        assert error_of(lambda: fun.lower(*args, **kwargs), ipu.ArgumentError).what == error.what
    np.testing.assert_array_equal(fun(X), X)


def test_static_arguments_need_not_be_arrays_and_others_still_must() -> None:
    fun = ipu.jit(lambda a, how, b: a, device=DEVICE, static_argnums=1)
    with pytest.raises(ipu.ArgumentError, match=r"argument b of <lambda>(.|\n)*static_argnums=2"):
        fun(X, "up", "no")
    with pytest.raises(ipu.ArgumentError, match=r"argument b of <lambda>(.|\n)*static_argnames='b'"):
        fun(X, how="up", b="no")


@pytest.mark.parametrize("call", ["__call__", "lower"])
def test_messages_of_jax_pass_through(call: str) -> None:
    """They name the place already: results that are no arrays, keys that have no order."""
    for fun, args in ((lambda a: {"b": "text"}, (X,)), (lambda a: {1: a, "b": a}, (X,))):
        expected = error_of(lambda a=args, f=fun: jax.jit(f)(*a), Exception)
        actual = error_of(lambda a=args, f=fun: getattr(ipu.jit(f, device=DEVICE), call)(*a), Exception)
        assert type(actual) is type(expected) and str(actual) == str(expected)


SETTINGS: dict[str, Any] = {"static_argnums": 1, "static_argnames": "c"}
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any], str]] = {
    "none": ((), {}, {}, r"add cannot be called like this: .*'a'(.|\n)*expected: add\(a, b=…, \*, c=…\)(.|\n)*add\(\)"),
    "too many": (
        (X, X, X),
        {},
        {},
        r"too many positional(.|\n)*got: add\(float32\[2,3\], float32\[2,3\], float32\[2,3\]\)",
    ),
    "unknown name": ((X,), {"d": 1, "e": "s"}, {}, r"unexpected keyword argument 'd'(.|\n)*got: .*d=1, e='s'"),
    "misspelt name": ((X,), {"cc": 1}, {}, r"unexpected keyword argument 'cc'(.|\n)*try: 'c'"),
    "twice": ((X,), {"a": X}, {}, r"multiple values for argument 'a'"),
    "list": ((X, [1]), {}, SETTINGS, r"static argument b of add cannot be hashed(.|\n)*got: list \[1\](.|\n)*a tuple"),
    "list by name": ((X,), {"b": [1]}, {"static_argnums": 1}, r"static argument b of add cannot be hashed"),
    "named list": ((X, 1), {"c": [1]}, SETTINGS, r"static argument c of add cannot be hashed"),
    "array": ((X, np.ones(3)), {}, SETTINGS, r"static argument b(.|\n)*got: ndarray(.|\n)*if it holds arrays"),
    "module": (
        (X, MODULE),
        {},
        SETTINGS,
        r"static argument b(.|\n)*got: Sequential(.|\n)*eqx.partition\(b, eqx.is_array\)",
    ),
}


@pytest.mark.parametrize("call", ["__call__", "lower"])
@pytest.mark.parametrize("name", CALLS)
def test_bad_calls(name: str, call: str) -> None:
    """Each is also of the type that `jax.jit` raises, so that handlers of that catch it."""
    args, kwargs, settings, text = CALLS[name]
    theirs = error_of(lambda: jax.jit(add, **settings)(*args, **kwargs), Exception)
    ours = error_of(lambda: getattr(ipu.jit(add, device=DEVICE, **settings), call)(*args, **kwargs), ipu.ArgumentError)
    assert isinstance(ours, type(theirs)) and ours.where.startswith("test_errors.py:")
    with pytest.raises(ipu.ArgumentError, match=text):
        raise ours


def test_an_error_inside_of_a_wrapper_is_not_one_of_the_call() -> None:
    """Whatever the function it wraps says: an error inside is not taken for one of the call."""
    raised = TypeError("mine")

    @functools.wraps(lambda a: a)
    def wrapper(a: Any, b: Any) -> Any:
        raise raised

    assert error_of(lambda: ipu.jit(wrapper, device=DEVICE)(X, X), TypeError) is raised


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "position": ({"static_argnums": 7}, ValueError, r"static_argnums names an argument that add lacks(.|\n)*got: 7"),
    "negative position": (
        {"donate_argnums": (0, -3)},
        ValueError,
        r"donate_argnums names(.|\n)*of 2 that(.|\n)*got: -3",
    ),
    "name": ({"static_argnames": ("c", "bb")}, ValueError, r"static_argnames names(.|\n)*got: 'bb'(.|\n)*try: 'b'"),
    "static donated": (
        {"static_argnums": 1, "donate_argnums": (0, -1)},
        ValueError,
        r"argument b of add is both static and donated(.|\n)*try: leave b out",
    ),
    "static donated by name": ({"static_argnames": "a", "donate_argnums": 0}, ValueError, "argument a of add is both"),
    "donated name": ({"donate_argnames": "bb"}, ValueError, r"donate_argnames names(.|\n)*got: 'bb'(.|\n)*try: 'b'"),
    "donated by name static": ({"static_argnums": 0, "donate_argnames": "a"}, ValueError, "argument a of add is both"),
    "position as donated name": ({"donate_argnames": 1}, TypeError, "donate_argnames of ipu.jit cannot be 1"),
    "float": ({"static_argnums": 1.5}, TypeError, r"static_argnums of ipu.jit cannot be 1.5(.|\n)*whole number"),
    "bool": ({"donate_argnums": True}, TypeError, r"donate_argnums of ipu.jit cannot be True(.|\n)*positions"),
    "name as position": ({"donate_argnums": "a"}, TypeError, "donate_argnums of ipu.jit cannot be 'a'"),
    "names as positions": ({"static_argnums": ["a"]}, TypeError, r"static_argnums of ipu.jit cannot be \['a'\]"),
    "position as name": ({"static_argnames": 1}, TypeError, r"static_argnames of ipu.jit cannot be 1(.|\n)*string"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_name_no_argument(name: str) -> None:
    settings, kind, text = REFUSED[name]
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    error = error_of(lambda: ipu.jit(add, device=DEVICE, **settings), ipu.ArgumentError)
    assert isinstance(error, kind) and error.where == f"test_errors.py:{line} (<lambda>)"
    with pytest.raises(ipu.ArgumentError, match=text):
        raise error
    if name not in ("bool", "static donated"):  # JAX takes True for 1, and does not count from the end here
        error_of(lambda: jax.jit(add, **settings), kind)


@pytest.mark.parametrize("value", [None, (), [1], {1}, np.int64(1), (np.int32(-1),)], ids=repr)
def test_settings_are_given_as_to_jax(value: Any) -> None:
    jitted = ipu.jit(lambda x, n: x * n, device=DEVICE, static_argnums=value, donate_argnums=None)
    np.testing.assert_array_equal(jitted(X, 3), X * 3)


def test_any_position_of_variadic_functions() -> None:
    jitted = ipu.jit(lambda *xs, **ks: xs[0] * xs[2] + ks["k"], device=DEVICE, static_argnums=2, static_argnames="k")
    np.testing.assert_array_equal(jitted(X, X, 3, k=2), X * 3 + 2)
    with pytest.raises(ipu.ArgumentError, match=r"argument xs\[1\] of <lambda>"):
        jitted(X, "no", 3, k=2)


def test_values_that_are_not_arrays() -> None:
    """Tokens at the ends, and a dtype of somebody's own inside."""
    token = lax.create_token(X)
    for fun, args, text in (
        (lambda x: (x, lax.create_token(x)), (X,), "a result of <lambda> must be an array"),
        (lambda x, t: x * 2, (X, token), "argument t of <lambda> must be an array"),
    ):
        with pytest.raises(ipu.ArgumentError, match=rf"{text}(.|\n)*AbstractToken(.|\n)*leave the token out"):
            ipu.jit(fun, device=DEVICE)(*args)
    inside = ipu.jit(lambda x: (lax.after_all(lax.create_token(x)), x)[1], device=DEVICE)
    np.testing.assert_array_equal(inside(X), X)


def test_types_of_ones_own() -> None:
    jaxpr = jax.make_jaxpr(jnp.sin)(X)
    (eqn,) = jaxpr.jaxpr.eqns
    own = jaxpr.jaxpr.replace(eqns=[eqn.replace(outvars=[Var(jax.typeof(lax.create_token(X)))])])
    check_values(ClosedJaxpr(own, ()), "fun", ["x"])  # a token may be made
    own = jaxpr.jaxpr.replace(eqns=[eqn.replace(outvars=[Var(OwnType())])])
    with pytest.raises(ipu.GraphError, match=r"result of sin must be an array that a tile(.|\n)*got: a type of"):
        check_values(ClosedJaxpr(own, ()), "fun", ["x"])


class OwnType(AbstractValue):
    """A result of a user's primitive."""

    def __str__(self) -> str:
        return "a type of one's own"


def test_no_branch_for_this_platform() -> None:
    def fun(x: Any) -> Any:
        return lax.platform_dependent(x, tpu=jnp.sin, cuda=jnp.cos)

    line = inspect.getsourcelines(fun)[1] + 1
    error = error_of(lambda: ipu.jit(fun, device=DEVICE).lower(X), ipu.GraphError)
    assert error.where == f"test_errors.py:{line} (fun)" and (error.got, error.hint) == ("tpu, cuda", "default=...")
    error_of(lambda: jax.jit(fun)(X), NotImplementedError)


def test_debug_nans_finds_the_operation() -> None:
    fun = ipu.jit(lambda x, n: jnp.log(x) * n, device=DEVICE, static_argnums=1)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="in log"):
        fun(-X - 1, 2)
    assert np.isnan(fun(-X - 1, 2)).all()


# --- the user's own errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ValueError, KeyError, TypeError, RuntimeError, ZeroDivisionError])
def test_users_errors_are_untouched(kind: type[Exception]) -> None:
    raised = kind("mine")

    def fun(x: Any) -> Any:
        raise raised

    jitted = ipu.jit(fun, device=DEVICE)
    assert error_of(lambda: jitted(X), kind) is raised
    assert error_of(lambda: jitted.lower(X), kind) is raised


@pytest.mark.parametrize(
    ("fun", "kind"),
    [
        (lambda x: 1 if x.sum() > 0 else 2, jax.errors.TracerBoolConversionError),
        (lambda x: np.asarray(x), jax.errors.TracerArrayConversionError),
        (lambda x: jnp.zeros(x.sum().astype(int)), TypeError),
        (lambda x: float(x[0, 0]), jax.errors.ConcretizationTypeError),
        (lambda x: x.at[0].set(x) @ x, Exception),
    ],
)
def test_errors_of_jax_are_untouched(fun: Callable[..., Any], kind: type[Exception]) -> None:
    expected = error_of(lambda: jax.jit(fun)(X), kind)
    actual = error_of(lambda: ipu.jit(fun, device=DEVICE)(X), kind)
    assert type(actual) is type(expected) and str(actual) == str(expected)


def test_leaked_tracer() -> None:
    leaked = []
    ipu.jit(lambda x: (leaked.append(x), x)[1], device=DEVICE)(X)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        _ = leaked[0] + 1


def leaves_a_branch(x: Any, n: int = 1) -> Any:
    left = []
    lax.cond(x > 0, lambda: left.append(jnp.sin(x)) or 0, lambda: 0)
    return left[-1] + n


@pytest.mark.parametrize(
    "run",
    [
        lambda: ipu.jit(leaves_a_branch, device=DEVICE)(1.0),
        lambda: ipu.jit(leaves_a_branch, device=DEVICE).lower(1.0),
        lambda: ipu.jit(leaves_a_branch, device=DEVICE, static_argnums=1).lower(jnp.float32(1), 2),
        lambda: ipu.jit(leaves_a_branch, device=DEVICE, static_argnames="n").lower(x=1.0, n=2),
        lambda: ipu.jit(leaves_a_branch, device=DEVICE).lower(jax.ShapeDtypeStruct((), jnp.float32)),
        lambda: ipu.jit(leaves_a_branch, device=DEVICE).eval_shape(1.0),
        lambda: ipu.advise(ipu.jit(leaves_a_branch, device=DEVICE), 1.0, show=False),
        lambda: ipu.jit(leaves_a_branch, device=ipu.IPUModel(num_ipus=2), replicas=2).lower(1.0),
    ],
)
def test_a_tracer_that_left_its_branch(run: Callable[[], Any]) -> None:
    """JAX's own error, which names line and branch: there is no transformation that the function could leave."""
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"traced(.|\n)*test_errors.py"):
        run()


LEAKS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "jit": lambda fun: jax.jit(fun)(X),
    "ipu.jit": lambda fun: ipu.jit(fun, device=DEVICE)(X),
    "grad": lambda fun: jax.grad(fun)(X),
    "vmap": lambda fun: jax.vmap(fun)(X[None]),
    "a branch": lambda fun: lax.cond(True, fun, jnp.sum, X),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_tracer_given_once_its_transformation_is_over(name: str) -> None:
    """The words are those of a call, also where only the shape is asked."""
    left = []
    LEAKS[name](lambda x: (left.append(x), x.sum())[1])
    fun = ipu.jit(lambda x, y: x["a"] * y, device=DEVICE)
    expected = error_of(lambda: fun({"a": left[0]}, y=X), jax.errors.UnexpectedTracerError)
    compiled = fun.lower({"a": X}, y=X).compile()
    for run in (fun.lower, fun.trace, fun.eval_shape, compiled, compiled.profile_call):
        actual = error_of(lambda run=run: run({"a": left[0]}, y=X), jax.errors.UnexpectedTracerError)
        assert str(actual).partition("The leaked")[0] == str(expected).partition("The leaked")[0]


def test_a_tracer_whose_transformation_runs_is_given() -> None:
    fun = ipu.jit(lambda x: x * 2, device=DEVICE)
    assert jax.grad(lambda x: (fun.lower(x), fun.eval_shape(x), x.sum())[2])(X).shape == X.shape
    assert jax.jit(lambda x: (fun.trace(x), x)[1])(X).shape == X.shape


def test_a_tracer_that_is_traced() -> None:
    errors = []

    def outer(y: Any) -> Any:
        inner = ipu.jit(lambda x: x + y, device=DEVICE)
        for run in (lambda: inner.lower(1.0), lambda: ipu.advise(inner, 1.0, show=False)):
            errors.append(error_of(run, ipu.ArgumentError))
        return inner(1.0), inner.eval_shape(1.0).shape == ()

    assert jax.jit(outer)(2.0) == (3, True)
    assert all("uses values or axes of a transformation of JAX around it" in error.what for error in errors)


# --- nothing half done ------------------------------------------------------------------------------------------------


def test_other_shapes_work_after_an_error() -> None:
    def fun(x: Any) -> Any:
        if x.shape == (2,):
            raise ValueError("not two")
        return x * 2

    jitted = ipu.jit(fun, device=DEVICE)
    for _ in range(2):
        with pytest.raises(ValueError, match="not two"):
            jitted(jnp.ones(2))
        np.testing.assert_array_equal(jitted(jnp.ones(3)), 2 * np.ones(3))


def test_an_error_that_goes_away() -> None:
    trouble = [ValueError("first time")]

    def fun(x: Any) -> Any:
        if trouble:
            raise trouble.pop()
        return x * 2

    jitted = ipu.jit(fun, device=DEVICE)
    with pytest.raises(ValueError, match="first time"):
        jitted(X)
    np.testing.assert_array_equal(jitted(X), X * 2)


def test_after_an_error_devices_are_as_before() -> None:
    def fun(x: Any) -> Any:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        ipu.jit(fun, device=DEVICE)(X)
    other = ipu.IPUModel(tiles_per_ipu=6)
    assert ipu.jit(add, device=other).lower(X).graph.target == other.target
    np.testing.assert_array_equal(ipu.jit(add, device=other)(X), X)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_arguments_survive_an_error() -> None:
    def broken(x: Any) -> Any:
        raise ValueError("mine")

    x = jnp.ones(3)
    w = jnp.ones((1000, 1200))
    with pytest.raises(ValueError, match="mine"):
        ipu.jit(broken, device=DEVICE, donate_argnums=0)(x)
    with pytest.raises(ipu.TileMemoryError):
        ipu.jit(too_large, device=DEVICE, donate_argnums=0)(w, jnp.ones((8, 1000)))
    assert not x.is_deleted() and not w.is_deleted()


GIVEN_TWICE: dict[str, tuple[Any, Any, str]] = {
    "donated and kept": (0, lambda a: (a, a), r"as p \(donated\) and as x$"),
    "kept and donated": ("x", lambda a: (a, a), r"as p and as x \(donated\)$"),
    "donated twice": ((0, 1), lambda a: (a, a), r"as p \(donated\) and as x \(donated\)$"),
    "in a tree": (
        0,
        lambda a: ({"w": [1.0, a], "b": a}, 1.0),
        r"as p\['b'\] \(donated\) and as p\['w'\]\[1\] \(donated\)$",
    ),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("device", [DEVICE, ipu.CPU()], ids=repr)
@pytest.mark.parametrize("name", GIVEN_TWICE)
def test_a_donated_array_given_twice(name: str, device: Any) -> None:
    donated, make, text = GIVEN_TWICE[name]
    setting = {"donate_argnames" if isinstance(donated, str) else "donate_argnums": donated}
    a = jnp.arange(3.0)
    fun = ipu.jit(lambda p, x, how="+": jax.tree.map(lambda v: v + x, p), device=device, static_argnums=2, **setting)
    calls = [lambda: fun(*make(a), "-"), lambda: fun(*make(a))]
    if device == DEVICE:
        compiled = fun.lower(*make(a)).compile()
        calls.append(lambda: compiled(*make(a)))
        compiled.profile_call(*make(a))  # which donates nothing
    for call in calls:
        error = error_of(call, ipu.ArgumentError)
        assert isinstance(error, RuntimeError)  # as JAX says it
        assert re.search(text, error.what) and error.got == "float32[3]" and "jnp.copy" in error.hint
    assert not a.is_deleted()
    jax.tree.map(np.testing.assert_array_equal, fun(*make(1.0)), jax.tree.map(lambda v: 2.0, make(1.0)[0]))


@pytest.mark.parametrize("device", [DEVICE, ipu.CPU()], ids=repr)
def test_other_donated_arrays_survive_one_that_is_given_twice(device: Any) -> None:
    fun = ipu.jit(lambda p, q, x: (p + 1, q * x), device=device, donate_argnums=(0, 1))
    p = jnp.ones(5)
    a = jnp.arange(3.0)
    fun(jnp.ones(5), jnp.arange(3.0), a)
    assert "as q (donated) and as x" in error_of(lambda: fun(p, a, a), ipu.ArgumentError).what
    np.testing.assert_array_equal(fun(p, a, jnp.ones(3))[1], np.arange(3.0))
    assert p.is_deleted() and a.is_deleted()


def test_a_donated_array_given_twice_and_not_used() -> None:
    a = jnp.arange(3.0)
    np.testing.assert_array_equal(ipu.jit(lambda p, x: x + 1, device=DEVICE, donate_argnums=0)(a, a), a + 1)


# --- a program that does not fit --------------------------------------------------------------------------------------


def too_large(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w).sum()


@pytest.mark.parametrize("device", [DEVICE, ipu.CPU()], ids=repr)
def test_a_second_use_of_a_donated_argument_names_it(device: Any) -> None:
    fun = ipu.jit(lambda p, x: {"w": p["w"] + x}, device=device, donate_argnums=0)
    inputs = {"w": jnp.ones(3)}
    fun(inputs, 1.0)
    calls = [lambda: fun(inputs, 1.0), lambda: fun(inputs, X[0]), lambda: fun(p=inputs, x=1.0)]
    if device is DEVICE:
        compiled = fun.lower(inputs, 1.0).compile()
        calls += [lambda: compiled(inputs, 1.0), lambda: compiled.profile_call(inputs, 1.0)]
    for call in calls:
        error = error_of(call, ipu.ArgumentError)
        assert isinstance(error, RuntimeError | ValueError) and str(error.where).startswith("test_errors.py")
        assert error.what.startswith("argument p['w'] of <lambda> has been deleted")
        assert "float32[3]" in str(error.got) and "donate_argnums" in str(error.hint)


def test_out_of_memory() -> None:
    args = jnp.ones((1000, 1200)), jnp.ones((8, 1000))
    fun = ipu.jit(too_large, device=DEVICE, options=ipu.Options(byte_cost=0.5))
    line = inspect.getsourcelines(too_large)[1] + 1
    for call in (lambda: fun(*args), lambda: fun.lower(*args).compile(), lambda: fun(*args)):
        error = error_of(call, ipu.TileMemoryError)
        profile = ipu.jit(too_large, device=DEVICE, options=ipu.Options(allow_out_of_memory=True)).lower(*args)
        memory = profile.compile().profile.memory
        have = DEVICE.target.bytes_per_tile
        assert error.where.line == f"test_errors.py:{line} (too_large)"
        for text in (
            rf"on 4 of 4 tiles, worst on tile {memory.worst_tile}, by {memory.max_tile_bytes - have:,} bytes",
            r"largest on that tile:\n +1,\d\d\d,\d\d\d B +Variable\(w: float32\[75, 1000, 16\]\)",
            rf"expected: at most {have:,} bytes a tile",
            rf"got: {memory.max_tile_bytes:,} bytes",
            r"try: num_ipus=2 or more(.|\n)*allow_out_of_memory=True",
        ):
            with pytest.raises(ipu.TileMemoryError, match=text):
                raise error


def test_out_of_memory_allowed() -> None:
    args = jnp.ones((1000, 1200)) / 1000, jnp.ones((8, 1000)) / 3
    fun = ipu.jit(too_large, device=DEVICE, options=ipu.Options(allow_out_of_memory=True))
    np.testing.assert_allclose(fun(*args), jax.jit(too_large)(*args), rtol=1e-5)
    profile = fun.lower(*args).compile().profile
    assert profile.memory.max_tile_bytes > DEVICE.target.bytes_per_tile
    assert "Out of memory:  4 tiles" in profile.summary()


# --- devices and options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "what", "text"),
    [
        (lambda: ipu.IPUModel(arch="mk9"), ipu.TargetError, r"'mk9'(.|\n)*one of mk1, mk2, bow(.|\n)*try: 'mk2'"),
        (lambda: ipu.IPUModel(num_ipus=0), ipu.TargetError, r"num_ipus cannot be 0(.|\n)*expected: a whole number"),
        (lambda: ipu.IPUModel(num_ipus=1.5), ipu.TargetError, r"num_ipus cannot be 1.5(.|\n)*got: 1.5 \(float\)"),
        (lambda: ipu.IPUModel("mk2"), ipu.TargetError, r"number of IPUs first(.|\n)*try: arch='mk2'"),
        (
            lambda: ipu.IPUModel(3),
            ipu.TargetError,
            r"no system has 3 IPUs(.|\n)*power of two(.|\n)*num_ipus=4; 1 of them",
        ),
        (lambda: ipu.IPUModel(100, "bow"), ipu.TargetError, r"no system has 100 IPUs(.|\n)*num_ipus=128; 28 of them"),
        (lambda: ipu.IPUModel(10**9), ipu.TargetError, r"num_ipus cannot be 1000000000(.|\n)*at most 65,536 \[IPUs\]"),
        (lambda: ipu.IPUModel(tiles_per_ipu=10**9), ipu.TargetError, r"too many tiles(.|\n)*1,000,000,000 tiles"),
        (lambda: ipu.IPUModel(512, tiles_per_ipu=2**19), ipu.TargetError, r"268,435,456 tiles: 512 × 524,288"),
        (lambda: ipu.IPUModel(tiles=3, arch="bow"), ipu.TargetError, r"no constant 'tiles'"),
        (lambda: DEVICE.target.replace(speed=3), ipu.TargetError, r"no constant 'speed'(.|\n)*fields\(ipu.Target\)"),
        (lambda: DEVICE.target.replace(tiles_per_ipu=0), ipu.TargetError, r"tiles_per_ipu cannot be 0"),
        (lambda: DEVICE.target.replace(exchange_bytes_per_cycle=-4), ipu.TargetError, r"cannot be -4(.|\n)*above 0"),
        (lambda: ipu.IPUModel(bytes_per_tle=3), ipu.TargetError, r"no constant 'bytes_per_tle'(.|\n)*'bytes_per_tile'"),
        (
            lambda: ipu.jit(add, device="mk2"),
            ipu.ArgumentError,
            r"device of ipu.jit must be a device(.|\n)*got: 'mk2'(.|\n)*try: ipu.IPUModel\(arch=\"mk2\"\)",
        ),
        (lambda: ipu.jit(add, device="Bow"), ipu.ArgumentError, r"try: ipu.IPUModel\(arch=\"bow\"\)"),
        (lambda: ipu.jit(add, device="cpu"), ipu.ArgumentError, r"try: ipu.CPU\(\)"),
        (lambda: ipu.jit(add, device=4), ipu.ArgumentError, r"try: ipu.IPUModel\(num_ipus=4\)"),
        (lambda: ipu.jit(add, donate_argnum=0), TypeError, r"'donate_argnum'(.|\n)*try: 'donate_argnums', the nearest"),
        (lambda: ipu.jit(replica=2)(add), TypeError, r"'replica'(.|\n)*try: 'replicas'"),
        (
            lambda: ipu.pipeline(add, micro_batch=2),
            TypeError,
            r"ipu.pipeline cannot be .* unexpected keyword argument 'micro_batch'(.|\n)*try: 'micro_batches'",
        ),
        (
            lambda: ipu.Options(exact_split=True),
            ipu.ArgumentError,
            r"ipu.Options cannot be called like this(.|\n)*'exact_split'(.|\n)*try: 'exact_splits'",
        ),
        (
            lambda: ipu.Options(*[None] * 20),
            TypeError,
            r"too many(.|\n)*expected: ipu.Options\(exact_splits=…",
        ),
        (lambda: poplar.IPUModel(tiles_per_ip=3), ipu.IpuError, r"poplar.IPUModel cannot(.|\n)*try: 'tiles_per_ipu'"),
        (lambda: ipu.pipeline(add), TypeError, r"missing a required argument: 'micro_batches'"),
        (lambda: ipu.pipeline(add, micro_batches=2, schedule="1b1f"), ipu.ArgumentError, r"'1b1f'(.|\n)*try: '1f1b'"),
        (lambda: ipu.pipeline(add, micro_batches=2, reduce="avg"), ValueError, r"got: 'avg'(.|\n)*try: 'mean'"),
        (lambda: ipu.pipeline(add, micro_batches=2, reduce="average"), ValueError, r"'average'(.|\n)*try: 'mean'"),
        *(
            (lambda inputs=inputs: ipu.pipeline(add, micro_batches=2, reduce=inputs), ValueError, "must be a reduction")
            for inputs in (np.array(["a", "b"]), np.array("mean"), ("sum", np.array([1, 2])), jnp.ones(2))
        ),
        *(
            (
                lambda setting=setting, inputs=inputs: ipu.pipeline(add, **{"micro_batches": 2, setting: inputs}),
                ipu.ArgumentError,
                rf"{setting} (of|for) ipu.pipeline(.|\n)*expected: (a|the) (.|\n)*got: ",
            )
            for setting in ("micro_batches", "stages", "batch_argnums", "rng_argnums", "device_mapping")
            for inputs in (np.array([1, 2]), jnp.array([1, 2]), np.array(["auto", "auto"]), int)
        ),
        (
            lambda: ipu.jit(add, donate_argnums=np.array([0, 1])),
            TypeError,
            r"donate_argnums of ipu.jit(.|\n)*got: ndarray",
        ),
        (lambda: ipu.jit(add, replicas=np.array([1, 2])), ValueError, r"replicas of ipu.jit(.|\n)*got: array"),
        (
            lambda: ipu.jit(add, in_specs=(P(), {"b": P("replica")})),
            ipu.ArgumentError,
            r"in_specs of ipu.jit split over replicas, and replicas= is not given(.|\n)*'replica'(.|\n)*replicas=2",
        ),
        (lambda: ipu.jit(add, out_specs=P(None, "replica")), ipu.ArgumentError, r"out_specs of ipu.jit split over"),
        (
            lambda: ipu.jit(device=DEVICE.target)(add),
            ipu.ArgumentError,
            r"must be a device(.|\n)*expected: ipu.IPUModel",
        ),
        (
            lambda: ipu.default_device("mk2").__enter__(),
            ipu.ArgumentError,
            r"device of ipu.default_device must be a device(.|\n)*'mk2'",
        ),
        (
            lambda: ipu.jit(add, options={"exact_splits": True}),
            ipu.ArgumentError,
            r"options of ipu.jit must be ipu.Options(.|\n)*ipu.Options",
        ),
        (lambda: ipu.jit(add, options={}), ipu.ArgumentError, r"options of ipu.jit must be ipu.Options(.|\n)*got: {}"),
        (lambda: ipu.Options(exact_splits=1), ipu.ArgumentError, r"exact_splits must be a bool(.|\n)*got: 1"),
        (
            lambda: ipu.Options(partials="int8"),
            ipu.ArgumentError,
            r"Options.partials must be a dtype of partials(.|\n)*'float32', 'float16' or None(.|\n)*got: 'int8'",
        ),
        *(
            (lambda inputs=inputs: ipu.Options(partials=inputs), ipu.ArgumentError, "must be a dtype of partials")
            for inputs in (np.float16, jnp.float16, np.dtype("float16"), np.array("float16"), np.array(["a", "b"]), [])
        ),
        *(
            (lambda cost=cost: ipu.Options(byte_cost=cost), ipu.ArgumentError, rf"byte_cost(.|\n)*got: {cost!r}")
            for cost in (-0.5, float("nan"), float("inf"), 10**400, True, "1")
        ),
        *(
            (
                lambda share=share: ipu.Options(available_memory_proportion=share),
                ipu.ArgumentError,
                rf"available_memory_proportion must be a proportion(.|\n)*from 0 to 1(.|\n)*got: {share!r}",
            )
            for share in (-0.1, 1.01, float("nan"), True, "1")
        ),
        (lambda: ipu.Options(trip_counts={"w": -1}), ipu.ArgumentError, r"trip_counts\['w'\](.|\n)*at least 0"),
        *(
            (
                lambda key=key: ipu.Options(trip_counts={"1": 2, key: 3}),
                ipu.ArgumentError,
                rf"keys of Options.trip_counts must be loops(.|\n)*'while\[0\]'(.|\n)*got: {key!r}",
            )
            for key in (1, None)
        ),
        (
            lambda: ipu.jit(add, DEVICE),
            ipu.ArgumentError,
            r"takes one function by position(.|\n)*try: device=IPUModel\(1 × mk2",
        ),
        (lambda: ipu.jit(add, 0, 1), ipu.ArgumentError, r"takes one function by position(.|\n)*got: .*, 0, 1\)"),
        (lambda: ipu.jit(DEVICE), ipu.ArgumentError, r"needs a function(.|\n)*try: @ipu.jit\(device=IPUModel"),
        (
            lambda: ipu.jit(staticmethod(add)),
            TypeError,
            r"given a staticmethod(.|\n)*try: @staticmethod above @ipu.jit",
        ),
        (lambda: ipu.jit(classmethod(add)), TypeError, r"given a classmethod(.|\n)*try: @classmethod above @ipu.jit"),
        (
            lambda: ipu.jit(yielding),
            TypeError,
            r"yielding is a generator(.|\n)*try: return a list of the values",
        ),
        (lambda: ipu.jit(3), ipu.ArgumentError, r"ipu.jit needs a function(.|\n)*expected: a callable(.|\n)*got: 3"),
    ],
)
def test_bad_settings(make: Callable[[], Any], what: type[Exception], text: str) -> None:
    error = error_of(make, what)
    with pytest.raises(what, match=text):
        raise error
    line = inspect.getsourcelines(make)[1]
    assert str(error.where).startswith(f"test_errors.py:{line} ")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'fast'"):
        ipu.Options(fast=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'fast'"):
        ipu.jit(add, fast=True)  # type: ignore[call-overload]


def test_inner_function_on_another_device() -> None:
    for other in (ipu.IPUModel(tiles_per_ipu=6), ipu.CPU()):
        inner = ipu.jit(add, device=other)
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        outer = ipu.jit(lambda x, f=inner: f(x) * 2, device=DEVICE)
        for call in (lambda o=outer: o(X), lambda o=outer: o.lower(X)):
            error = error_of(call, ipu.ArgumentError)
            assert (error.expected, error.got, error.where) == (DEVICE, other, f"test_errors.py:{line} (<lambda>)")
            with pytest.raises(ipu.ArgumentError, match=r"add is called inside a function compiled for another device"):
                raise error


THROUGH: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "jit": jax.jit,
    "derivative": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "vmap in a loop": lambda f: jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: jax.vmap(f)(y), x)),
    "checkpoint": lambda f: jax.jit(jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(f(x)))(x).sum())),
}


@pytest.mark.parametrize("traced_before", [False, True])
@pytest.mark.parametrize("how", THROUGH)
def test_inner_function_on_another_device_inside_one_of_jax(how: str, traced_before: bool) -> None:
    """JAX traces the function between them once: it is refused each time."""
    other = ipu.IPUModel(tiles_per_ipu=6)
    inner = ipu.jit(lambda x: x * x, device=other)
    between = THROUGH[how](lambda x: inner(x) * 3.0)
    outer = ipu.jit(lambda x: between(x) + 1, device=DEVICE)
    if traced_before:
        between(X)
    for call in (outer, outer.lower, outer):
        error = error_of(lambda call=call: call(X), ipu.ArgumentError)
        assert (error.expected, error.got) == (DEVICE, other) and "test_errors.py" in str(error.where)
    np.testing.assert_allclose(ipu.jit(lambda x: between(x) + 1, device=other)(X), between(X) + 1, rtol=1e-6)


def test_inner_function_of_other_replicas_inside_one_of_jax() -> None:
    inner = ipu.jit(lambda x: x * 2, replicas=2, in_specs=P("replica"), out_specs=P("replica"))
    between = jax.jit(lambda x: inner(x) + 1)
    outer = ipu.jit(lambda x: between(x), device=DEVICE)
    x = np.ones(4, np.float32)
    for _ in range(2):
        error = error_of(lambda: outer(x), ipu.ArgumentError)
        assert (error.expected, error.got) == (1, 2)
        between(x)


def test_inner_device_is_checked_anew_for_each_outer_device() -> None:
    inner = ipu.jit(add, device=DEVICE)
    outer = ipu.jit(lambda x: inner(x) * 2)
    with ipu.default_device(DEVICE):
        outer(X)
    with ipu.default_device(ipu.IPUModel(tiles_per_ipu=6)), pytest.raises(ipu.ArgumentError, match="another device"):
        outer(X)
    with ipu.default_device(ipu.CPU()):
        np.testing.assert_array_equal(outer(X), X * 2)


@pytest.mark.parametrize("perm", [[(0, 1), (1, 1)], [(0, 1), (0, 0)], [(0, 5)]])
def test_refuses_a_non_permutation_of_replicas(perm: list[tuple[int, int]]) -> None:
    def fun(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "replica", perm)

    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=4)
    sent = ipu.jit(fun, device=device, replicas=2, in_specs=P("replica"), out_specs=P("replica"))
    error = error_of(lambda: sent(jnp.arange(4.0)))
    assert "each at most once as a source and as a destination" in str(error) and f"got: perm={perm}" in str(error)
    assert "test_errors.py" in str(error.where)


def test_a_pipeline_under_vmap() -> None:
    def loss(w: jax.Array, batch: jax.Array) -> jax.Array:
        with ipu.stage(0):
            hidden = jnp.tanh(batch @ w)
        with ipu.stage(1):
            return (hidden @ w).sum()

    many = jax.vmap(ipu.pipeline(loss, micro_batches=2), (None, 0))
    fun = ipu.jit(many, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=4))
    error = error_of(lambda: fun(jnp.ones((4, 4)), jnp.ones((3, 4, 4))))
    assert "an ipu.pipeline with stages is under a jax.vmap" in str(error) and "test_errors.py" in str(error.where)


def test_dataclass_that_is_no_pytree_names_the_way_to_make_it_one() -> None:
    @dataclasses.dataclass
    class Weights:
        matrix: Any

    error = error_of(lambda: ipu.jit(lambda w: w.matrix, device=DEVICE)(Weights(jnp.eye(9))), ipu.IpuError)
    assert "jax.tree_util.register_dataclass(Weights)" in str(error.hint)
    assert "\n" not in str(error.got)
