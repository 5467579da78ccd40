"""`ipu.jit` against `jax.jit`: the same numbers, types, trees and deleted buffers, whatever is passed and returned."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from tests.lowering.helpers import assert_rounded_alike

DEVICE = ipu.IPUModel(arch="mk2", tiles_per_ipu=8)
ipu_jit = functools.partial(ipu.jit, device=DEVICE)
X = np.arange(6, dtype=np.float32).reshape(2, 3)
TABLE = np.arange(3, dtype=np.float32)
ARRAY = jnp.ones(3) / 3


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def fresh(tree: Any) -> Any:
    """The tree with numpy arrays made JAX arrays, and keys cloned, so that they may be donated."""

    def own(x: Any) -> Any:
        if isinstance(x, jax.Array) and is_key(x):
            return jax.random.wrap_key_data(jnp.array(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        return jnp.array(x) if isinstance(x, np.ndarray) else x

    return jax.tree.map(own, tree)


def deleted(tree: Any) -> list[bool]:
    return [x.is_deleted() for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def assert_same(got: Any, expected: Any) -> None:
    """Equal trees of arrays of equal dtype, weakness, class, and of values but for roundings."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b)
        assert (a.aval, a.committed) == (b.aval, b.committed)  # shape, dtype and weakness
        a, b = (jax.random.key_data(v) if is_key(v) else v for v in (a, b))
        assert_rounded_alike(a, b)


def check(fun: Callable[..., Any], *args: Any, settings: dict[str, Any] | None = None, **kwargs: Any) -> None:
    """Asserts that two calls equal those of `jax.jit`, also in donated arguments."""
    settings = settings or {}
    reference = jax.jit(fun, **settings)
    ours = ipu_jit(fun, **settings)
    for _ in range(2):
        theirs = fresh((args, kwargs))
        mine = fresh((args, kwargs))
        expected = reference(*theirs[0], **theirs[1])
        got = ours(*mine[0], **mine[1])
        assert_same(got, expected)
        assert deleted(mine) == deleted(theirs)


# --- what is passed and returned --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Power:
    base: Any
    exponent: int = dataclasses.field(default=2, metadata={"static": True})


class Scale:
    """A callable object with attributes named like parts of `ipu.jit`'s own functions."""

    def __init__(self) -> None:
        self.lower = self._fun = self._static = self._runner = "mine"
        self.factor = 3.0

    def __call__(self, x: Any) -> Any:
        return x * self.factor

    def method(self, x: Any, power: int = 1) -> Any:
        return x * self.factor**power


PASSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "dict with None": (lambda d: {"a": d["a"] + 1, "b": d["b"], "c": [(), None]}, ({"a": X, "b": None},), {}),
    "namedtuple": (lambda p: Pair(p.second, p.first * 2), (Pair(X, X + 1),), {}),
    "dataclass with metadata": (lambda p: Power(p.base**p.exponent, p.exponent), (Power(X, 3),), {}),
    "keyword only": (lambda a, *, b, c=2.0: a * b + c, (X,), {"b": X}),
    "all by keyword": (lambda a, *, b, c=2.0: a * b + c, (), {"c": np.float32(3), "b": X, "a": 1}),
    "defaults": (lambda a, b=TABLE, c=None: (a + b, c), (X,), {}),
    "variadic": (lambda *a, **k: [*a, k["z"] * 2, k["y"]], (X, X), {"z": X, "y": {"p": 1}}),
    "no argument": (lambda: jnp.arange(3), (), {}),
    "no argument, a constant": (lambda: 1.0, (), {}),
    "no result": (lambda x: None, (X,), {}),
    "nothing": (lambda: {}, (), {}),
    "unused argument": (lambda a, b: b * 2, (X, X), {}),
    "constants": (lambda a: (a + TABLE, TABLE, ARRAY, ARRAY * 2), (X,), {}),
    "literals": (lambda a: (1.0, 2, True, 1j, np.float32(3), np.arange(3), a), (X,), {}),
    "duplicates": (lambda a: (lambda y: (y, a, y, a, y.T))(a + 1), (X,), {}),
    "views of arguments": (lambda a: (a.T, a[::-1], a[1], a.reshape(-1)), (X,), {}),
    "bound method": (Scale().method, (X,), {}),
    "partial": (functools.partial(lambda a, b, c: a + b * c, X, c=2.0), (X,), {}),
    "callable object": (Scale(), (X,), {}),
    "builtin": (jnp.maximum, (X, X.T.reshape(2, 3)), {}),
    "jitted": (jax.jit(jnp.sin), (X,), {}),
    "ipu.jit": (ipu_jit(jnp.sin), (X,), {}),
}


@pytest.mark.parametrize("name", PASSED)
def test_passed_and_returned(name: str) -> None:
    fun, args, kwargs = PASSED[name]
    check(fun, *args, **kwargs)


SCALARS = [2, 2.0, True, 1j, np.float32(2), np.float64(2), np.int8(3), np.bool_(True), np.float16(1), np.arange(3)]


@pytest.mark.parametrize("value", SCALARS, ids=lambda v: f"{type(v).__name__}-{v}")
def test_types_and_weak_types(value: Any) -> None:
    check(lambda a: (a, a * 2, a + 1.5, a * jnp.float16(2)), value)


def test_weak_types_through_loops() -> None:
    check(lambda a: lax.fori_loop(0, 3, lambda i, c: c * 2.0, a), 2.0)
    check(lambda a: lax.while_loop(lambda c: c < 30.0, lambda c: c * 2, a), 2)
    check(lambda a: lax.cond(a > 1, lambda: a, lambda: a + 1), 2.0)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float8_e4m3fn", "int4", "uint8", "int16", "bool", "complex64"]
)
def test_dtypes(dtype: str) -> None:
    check(lambda a: (a, a[::-1], jnp.where(a == a[0], a, a[1])), jnp.arange(6).astype(dtype))
    if dtype in ("bfloat16", "float16", "complex64"):
        check(lambda a: (a @ a.T, a * 1.5), jnp.asarray(X, dtype))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_arrays(shape: tuple[int, ...]) -> None:
    check(lambda a: (a + 1, a.sum(), a.sum(0), jnp.concatenate([a, a]), jnp.sort(a), a @ a.T), jnp.zeros(shape))
    check(lambda a: lax.scan(lambda c, x: (c + x.sum(), x * c), 1.0, a), jnp.zeros(shape))


def random_walk(key: jax.Array) -> jax.Array:
    return lax.while_loop(lambda k: jax.random.uniform(k) < 0.7, lambda k: jax.random.split(k)[0], key)


KEYS: dict[str, Callable[[jax.Array], Any]] = {
    "split": lambda k: (jax.random.split(k), k, jax.random.normal(k, (3,))),
    "while": random_walk,
    "stack": lambda k: lax.scan(lambda c, _: (jax.random.split(c)[0], c), k, None, 3),
    "cond": lambda k: lax.cond(jax.random.bernoulli(k), lambda: jax.random.fold_in(k, 1), lambda: k),
    "where": lambda k: jnp.where(jax.random.bernoulli(k), k, jax.random.key(3)),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys(name: str) -> None:
    check(KEYS[name], jax.random.key(7))
    check(KEYS[name], jax.random.key(7), settings={"donate_argnums": 0})


def test_old_style_keys_and_other_generators() -> None:
    check(KEYS["split"], jax.random.PRNGKey(0))
    check(KEYS["split"], jax.random.key(0, impl="rbg"))


def test_double_precision() -> None:
    """In and out of x64 mode one function is compiled anew, even if its arguments are the same."""
    fun = lambda a: (a, jnp.arange(3) * a, jnp.ones(2) * 2.5)  # noqa: E731
    ours = ipu_jit(fun)
    reference = jax.jit(fun)
    assert_same(ours(np.int32(2)), reference(np.int32(2)))
    with jax.enable_x64(True):
        assert_same(ours(np.int32(2)), reference(np.int32(2)))
        assert ours(np.int32(2))[1].dtype == jnp.int64
        check(lambda a, b: (a * b, a @ a, b + 1), np.arange(3.0), 2)
    assert_same(ours(np.int32(2)), reference(np.int32(2)))


def test_double_precision_of_a_part_of_a_function() -> None:
    def fun(a: Any, x: Any) -> Any:
        with jax.enable_x64(True):
            wide = x.astype(jnp.float64)
            return 2 + a, jnp.sin(wide) * 2.5 + wide @ wide, lax.fori_loop(0, 2, lambda _, c: c * 1.5, wide)

    check(fun, 1, jnp.linspace(0, 1, 3))
    check(lambda x: jax.jit(fun)(1, x)[1].astype(jnp.float32), jnp.linspace(0, 1, 3))


# --- static arguments -------------------------------------------------------------------------------------------------


def power(x: Any, n: int) -> Any:
    return x**n if n > 1 else x


STATIC: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "by number": ({"static_argnums": 1}, (X, 3), {}),
    "by negative number": ({"static_argnums": -1}, (X, 3), {}),
    "by number, passed by keyword": ({"static_argnums": 1}, (X,), {"n": 3}),
    "by name": ({"static_argnames": "n"}, (X,), {"n": 3}),
    "by name, passed by position": ({"static_argnames": ["n"]}, (X, 3), {}),
    "by both": ({"static_argnums": (1,), "static_argnames": ("n",)}, (X, 3), {}),
}


@pytest.mark.parametrize("name", STATIC)
def test_static(name: str) -> None:
    settings, args, kwargs = STATIC[name]
    check(power, *args, settings=settings, **kwargs)
    arrays = [leaf for leaf in args if leaf is X]
    compiled = ipu_jit(power, **settings).lower(*args, **kwargs).compile()
    np.testing.assert_array_equal(compiled(*arrays), X**3)


@pytest.mark.parametrize("which", ["ipu", "jax"])
def test_static_by_position_and_by_name_apart(which: str) -> None:
    make = {"ipu": ipu_jit, "jax": jax.jit}[which]
    by_number = make(lambda x, y: x + isinstance(y, jax.Array), static_argnums=1, static_argnames=())
    by_name = make(lambda x, y: x + isinstance(y, jax.Array), static_argnums=(), static_argnames="y")
    assert [float(by_number(0.0, 1)), float(by_number(0.0, y=1))] == [0.0, 1.0]
    assert [float(by_name(0.0, 1)), float(by_name(0.0, y=1))] == [1.0, 0.0]


def test_static_values_compile_apart() -> None:
    fun = ipu_jit(lambda x, how: x + 1 if how == "up" else x - 1, static_argnums=1)
    assert [float(fun(1.0, how)) for how in ("up", "down", "up")] == [2.0, 0.0, 2.0]


def test_static_between_arrays() -> None:
    settings = {"static_argnums": 1, "static_argnames": "flip", "donate_argnums": 2}
    check(lambda a, n, b, *, flip: (a * n, -b if flip else b), X, 2, X, settings=settings, flip=True)


# --- donation ---------------------------------------------------------------------------------------------------------

DONATED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "swapped": (lambda a, b: (b, a), (X, X + 1), (0, 1)),
    "rotated": (lambda a, b, c: (b, c, a), (X, X + 1, X + 2), (0, 1, 2)),
    "returned unchanged": (lambda a, b: (a, b + 1), (X, X), 0),
    "returned twice": (lambda a: (a, a, a + 1), (X,), 0),
    "same result twice": (lambda a, b: (a + b, a + b), (X, X), (0, 1)),
    "transposed": (lambda a: a.T, (np.arange(9.0).reshape(3, 3),), 0),
    "read after it is replaced": (lambda a, b: (b * 2, a - b[::-1]), (X, X), (0, 1)),
    "tree": (lambda p, b: {"w": p["w"] - b, "k": p["k"]}, ({"w": X, "k": X * 2}, X), 0),
    "negative": (lambda a, b: (a, b + 1), (X, X), -1),
    "loop": (lambda a: lax.fori_loop(0, 4, lambda i, c: c * 0.5 + i, a), (X,), 0),
}


@pytest.mark.parametrize("name", DONATED)
def test_donated(name: str) -> None:
    fun, args, donated = DONATED[name]
    check(fun, *args, settings={"donate_argnums": donated})


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_in_vain() -> None:
    settings = {"donate_argnums": 0}
    check(lambda a: a.astype(jnp.int16), X, settings=settings)
    check(lambda a: a.astype(jnp.int32), X, settings=settings)
    check(lambda a: a.sum(), X, settings=settings)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        ipu_jit(lambda a: a.sum(), donate_argnums=0)(jnp.ones(3))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_unused() -> None:
    check(lambda a, b: b + 1, X, X, settings={"donate_argnums": 0})
    check(lambda a, b: b + 1, TABLE, X, settings={"donate_argnums": 0})


@jax.tree_util.register_pytree_node_class
class Named:
    """An array whose axes have names: a tree of arrays that takes nothing else."""

    def __init__(self, names: tuple[str, ...], data: Any) -> None:
        assert len(names) == data.ndim
        self.names = names
        self.data = data

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        return (self.data,), self.names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], leaves: tuple[Any, ...]) -> Named:
        return cls(names, *leaves)


@pytest.mark.parametrize("donated", [{"donate_argnums": 1}, {"donate_argnames": "a"}, {}], ids=str)
def test_donated_trees_that_take_arrays_only(donated: Any) -> None:
    fun = ipu_jit(lambda k, a, b: Named(a.names, a.data * k + b.data), static_argnames="k", **donated)
    inputs = [Named(("i", "j"), jnp.ones((2, 3))) for _ in range(6)]
    compiled = fun.lower(3, *inputs[:2]).compile()
    for call, (a, b) in ((compiled, inputs[2:4]), (functools.partial(fun, 3), inputs[4:])):
        np.testing.assert_array_equal(call(a, b).data, np.full((2, 3), 4.0))
        assert (a.data.is_deleted(), b.data.is_deleted()) == (bool(donated), False)


def test_donated_by_keyword() -> None:
    check(lambda a: a + 1, settings={"donate_argnums": 0}, a=X)


# --- under and around other transformations ---------------------------------------------------------------------------


def energy(x: jax.Array) -> jax.Array:
    return (jnp.sin(x) ** 2).sum()


TRANSFORMED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": jax.grad,
    "vmap": jax.vmap,
    "jit": jax.jit,
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
    "scan": lambda f: lambda x: lax.scan(lambda c, a: (c + f(a), f(c * a)), 0.0, x),
    "closed over, under grad": lambda f: jax.grad(lambda w: f_of_two(f)(w, X)),
    "closed over, under vmap": lambda f: jax.vmap(lambda w: f_of_two(f)(w, X)),
    "closed over, under jit": lambda f: jax.jit(lambda w: f_of_two(f)(w, X)),
}


def f_of_two(f: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function of the same kind as `f` that has no tracer among its arguments, but uses one."""
    make = ipu_jit if repr(f).startswith("ipu.jit") else jax.jit
    return lambda w, x: make(lambda y: (w.sum() * y).sum())(x)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed(name: str) -> None:
    transform = TRANSFORMED[name]
    expected = transform(jax.jit(energy))(jnp.asarray(X))
    got = transform(ipu_jit(energy))(jnp.asarray(X))
    assert_same(got, expected)
    check(transform(ipu_jit(energy)), X)


def test_make_jaxpr_and_eval_shape() -> None:
    assert jax.eval_shape(ipu_jit(energy), X).shape == ()
    assert str(jax.make_jaxpr(ipu_jit(energy))(X)) == str(jax.make_jaxpr(jax.jit(energy))(X))


def test_disable_jit_runs_the_function_itself() -> None:
    recorded = []
    fun = ipu_jit(lambda x: (recorded.append(float(x)), x + 1)[1])
    with jax.disable_jit():
        assert float(fun(jnp.float32(3))) == 4 and recorded == [3.0]


def test_under_a_transformation_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ipujax"):
        jitted = ipu_jit(energy)
        for transformed in (jax.grad(jitted), jax.jit(jitted), jax.vmap(jitted)):  # it says so once
            transformed(X)
        jax.grad(lambda w: f_of_two(ipu_jit(energy))(w, X))(X)
    assert [r.message for r in caplog.records if "took" not in r.message] == [
        f"{name} is called under a JAX transformation: it runs as jax.jit, without a profile"
        for name in ("energy", "<lambda>")
    ]


class Model:
    @functools.partial(ipu.jit, device=DEVICE, static_argnums=0)
    def predict(self, x: Any, scale: float = 1.0) -> Any:
        """Doubles."""
        return x * 2 * scale


def test_decorators() -> None:
    @ipu.jit
    def bare(x: Any) -> Any:
        """Docs."""
        return x + 1

    @ipu.jit(device=DEVICE)
    def called(x: Any) -> Any:
        return x + 2

    assert (bare.__name__, bare.__doc__, bare.__wrapped__(1)) == ("bare", "Docs.", 2)
    assert (float(called(1.0)), float(ipu.jit(lambda x: x * 3, device=DEVICE)(2.0))) == (3.0, 6.0)
    np.testing.assert_array_equal(Model().predict(X, scale=3.0), X * 6)


# --- side effects -----------------------------------------------------------------------------------------------------


@contextmanager
def printed(capsys: pytest.CaptureFixture[str]) -> Iterator[list[str]]:
    lines: list[str] = []
    capsys.readouterr()
    yield lines
    jax.effects_barrier()
    lines += capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("ordered", [False, True])
def test_debug_print_once_a_call(ordered: bool, capsys: pytest.CaptureFixture[str]) -> None:
    @ipu_jit
    def fun(x: jax.Array) -> jax.Array:
        jax.debug.print("x {}", x, ordered=ordered)
        return x + 1

    for value in (1.0, 2.0, 1.0):
        with printed(capsys) as lines:
            assert float(fun(value)) == value + 1
        assert lines == [f"x {value}"]
    with printed(capsys) as lines:
        fun.lower(1.0).compile()
    assert lines == []
    with printed(capsys) as lines:
        fun.lower(1.0).compile().profile_call(5.0)
    assert lines == ["x 5.0"]


def test_effects_in_control_flow(capsys: pytest.CaptureFixture[str]) -> None:
    def fun(x: jax.Array) -> jax.Array:
        def body(c: jax.Array, _: Any) -> tuple[jax.Array, None]:
            jax.debug.print("turn {}", c, ordered=True)
            lax.cond(c > 1, lambda: jax.debug.print("big", ordered=True), lambda: None)
            return c + 1, None

        return lax.scan(body, x, None, 3)[0]

    with printed(capsys) as lines:
        assert float(ipu_jit(fun)(0.0)) == 3
    assert lines == ["turn 0.0", "turn 1.0", "turn 2.0", "big"]


def test_pure_callback() -> None:
    def twice(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    check(twice, X)


# --- compiling once ---------------------------------------------------------------------------------------------------


@pytest.fixture
def lowerings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Input types of every jaxpr that is lowered."""
    module = sys.modules["ipujax.lowering_plan.planned_program"]
    recorded = []
    original = module.lower

    def counting(jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
        recorded.append(tuple(jaxpr.in_avals))
        return original(jaxpr, *args, **kwargs)

    monkeypatch.setattr(module, "lower", counting)
    return recorded


def test_lowers_once_for_each_signature(lowerings: list[Any]) -> None:
    fun = ipu_jit(lambda x: x * 2)
    for value in (X, X + 1, jnp.asarray(X)):
        fun(value)
    fun.lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).compile()
    assert len(lowerings) == 1
    for value in (X[0], X.astype(np.float16), 2.0, 3.0, X[:1]):
        fun(value)
    assert len(lowerings) == 5
    assert fun.lower(X) is fun.lower(X) and fun.lower(X).compile() is fun.lower(X).compile()


def test_functions_are_traced_again_after_jax_clears_its_caches() -> None:
    """Also where only JAX refers to the traced values, as beside float0."""
    scale = [0.0]
    fun = ipu_jit(lambda x, i: jax.grad(lambda x, i: (x * scale[0]).sum(), (0, 1), allow_int=True)(x, i))
    earlier: weakref.ref[Any] | None = None
    for n in range(3):
        scale[0] = n
        jax.clear_caches()
        gc.collect()
        assert earlier is None or earlier() is None
        np.testing.assert_array_equal(fun(X, 3)[0], np.full_like(X, n))
        earlier = weakref.ref(fun.lower(X, 3))
        assert earlier() is fun.lower(X, 3)


def test_lowered_programs_are_freed_with_their_function() -> None:
    fun = ipu_jit(lambda x: x * 2)
    fun(X)
    lowered = weakref.ref(fun.lower(X))
    function = weakref.ref(fun)
    del fun
    gc.collect()
    assert (function(), lowered()) == (None, None)


def test_structures_are_never_mistaken(lowerings: list[Any]) -> None:
    fun = ipu_jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))
    for tree in ({"a": X, "b": X}, {"a": X, "c": X}, (X, X), [X, X], {"b": X, "a": X}):
        assert_same(fun(tree), jax.tree.map(lambda x: jnp.asarray(x + 1), tree))
    assert len(lowerings) == 4  # the last is the first


def test_one_lowering_a_device(lowerings: list[Any]) -> None:
    fun = ipu.jit(lambda x: x * 2)
    for tiles in (4, 8, 4):
        with ipu.default_device(ipu.IPUModel(tiles_per_ipu=tiles)):
            fun(X)
    with ipu.default_device(ipu.CPU()):
        fun(X)
    assert len(lowerings) == 2


def test_two_threads_call_for_the_first_time() -> None:
    """Both trace at once, and each must know its own device while it does."""
    barrier = threading.Barrier(2)
    results = {}

    def slow(x: jax.Array) -> jax.Array:
        time.sleep(0.05)
        return ipu.jit(jnp.sin)(x) * 2

    shared = ipu.jit(slow)

    def call(tiles: int) -> None:
        with ipu.default_device(ipu.IPUModel(tiles_per_ipu=tiles)):
            barrier.wait(timeout=10)
            results[tiles] = [shared(X), shared.lower(X).graph.target.tiles_per_ipu]

    threads = [threading.Thread(target=call, args=(tiles,)) for tiles in (4, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tiles in (4, 6):
        assert_rounded_alike(results[tiles][0], jax.jit(lambda x: jnp.sin(x) * 2)(X))
        assert results[tiles][1] == tiles


def test_two_threads_on_one_device() -> None:
    fun = ipu_jit(lambda x: (time.sleep(0.02), x * 2)[1])
    barrier = threading.Barrier(4)
    results: list[Any] = []

    def call() -> None:
        barrier.wait(timeout=10)
        results.append((fun(X), fun.lower(X)))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and len({id(lowered) for _, lowered in results}) == 1
    for out, _ in results:
        np.testing.assert_array_equal(out, X * 2)


# --- a warm call ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"donate_argnums": 0}, {"static_argnums": 1}], ids=str)
def test_a_warm_call_flattens_its_arguments_as_often_as_jax_does(settings: dict[str, Any]) -> None:
    flattened = []

    class Counted:
        def __init__(self, x: Any) -> None:
            self.x = x

    jax.tree_util.register_pytree_node(
        Counted, lambda node: (flattened.append(node), ((node.x,), None))[1], lambda _, children: Counted(*children)
    )
    counts = []
    for fun in (jax.jit(lambda c, n: c.x + n, **settings), ipu.jit(lambda c, n: c.x + n, device=DEVICE, **settings)):
        for _ in range(2):
            fun(Counted(jnp.ones(3)), 1)
        inputs = Counted(jnp.ones(3))
        flattened.clear()
        fun(inputs, 1)
        counts.append(sum(node is inputs for node in flattened))
    assert counts == [1, 1]


def test_a_call_with_values_that_are_known_while_jax_traces() -> None:
    fun = ipu.jit(lambda x: 2 * x, device=DEVICE)
    x = jnp.ones(3)

    def outer(y: jax.Array) -> jax.Array:
        with jax.ensure_compile_time_eval():
            known = fun(x)
        assert not isinstance(known, jax.core.Tracer)
        return y * known + fun(x) + fun(y)

    np.testing.assert_array_equal(jax.jit(outer)(x), jnp.full(3, 6.0))
    np.testing.assert_array_equal(jax.grad(lambda y: outer(y).sum())(x), jnp.full(3, 4.0))


class Doubled:
    """A callable that refuses negative numbers, which a traced function cannot see."""

    def __call__(self, x):
        return 2 * x

    def __check_arguments__(self, x):
        if np.min(x) < 0:
            raise ValueError("negative")


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: f.__call__, functools.partial])
def test_callables_check_their_own_arguments(wrap):
    double = ipu.jit(wrap(Doubled()), device=ipu.CPU())
    assert double(np.float32(2)) == 4
    with pytest.raises(ValueError, match="negative"):
        double(np.float32(-2))


def test_memory_that_a_compilation_freed_is_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    monkeypatch.setattr("ipujax.functions.function_calls.release_freed_memory", lambda: released.append("after a call"))
    f = ipu_jit(lambda x: x + 1)
    for _ in range(3):
        f(jnp.ones(3))
    assert len(released) == 1
    for _ in range(3):  # a new shape is compiled inside of JAX's dispatch: the call after it returns the memory
        f(jnp.ones(4))
    assert len(released) == 2
