"""Programs are found by function and settings, as by `jax.jit`: functions that are jitted anew compile once."""

from __future__ import annotations

import dataclasses
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ipujax as ipu
import ipujax.lowering.rules.table as rule_table
from ipujax.functions.function_calls import MOST_SETTINGS, SHARED_CALLS

DEVICE = ipu.IPUModel(tiles_per_ipu=4)
POD = ipu.IPUModel(2, tiles_per_ipu=4)
ipu_jit = functools.partial(ipu.jit, device=DEVICE)
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def traces() -> list[Any]:
    """Receives the argument of each trace of the functions of this module."""
    _TRACED.clear()
    return _TRACED


_TRACED: list[Any] = []


def add_one(x: Any, n: int = 1) -> Any:
    _TRACED.append(x)
    return x + n


class Model:
    scale = 2.0

    def apply(self, x: Any) -> Any:
        return add_one(x) * self.scale

    def __call__(self, x: Any) -> Any:
        return add_one(x) * self.scale


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A callable that equals others of the same factor."""

    factor: float

    def __call__(self, x: Any) -> Any:
        return add_one(x) * self.factor


class Unhashable(Model):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class WithoutWeakReferences:
    __slots__ = ()

    def __call__(self, x: Any) -> Any:
        return add_one(x)


MODEL = Model()
PARTIAL = functools.partial(add_one, n=2)
SLOTTED = WithoutWeakReferences()
UNHASHABLE = Unhashable()

# What is jitted in each iteration, and whether the functions of `jit` before it stay alive.
MADE_ANEW: dict[str, tuple[Callable[[], Any], bool]] = {
    "function": (lambda: add_one, False),
    "partial": (lambda: PARTIAL, False),
    "callable object": (lambda: MODEL, False),
    "bound method": (lambda: MODEL.apply, False),
    "bound method, kept": (lambda: MODEL.apply, True),
    "equal callables": (lambda: Scaled(3.0), False),
    "equal callables, kept": (lambda: Scaled(3.0), True),
    "partials made anew": (lambda: functools.partial(add_one, n=2), True),
    "lambdas made anew": (lambda: lambda x: add_one(x), True),
}


def count_traces(jit: Callable[..., Any], make: Callable[[], Any], keep: bool) -> int:
    _TRACED.clear()
    kept = []
    for _ in range(3):
        function = jit(make())
        np.testing.assert_array_equal(function(X), make()(X))
        kept += [function] if keep else []
        _TRACED.pop()  # the plain call
    return len(_TRACED)


@pytest.mark.parametrize("name", MADE_ANEW)
def test_functions_made_anew_are_those_of_jax(name: str) -> None:
    make, keep = MADE_ANEW[name]
    assert count_traces(ipu_jit, make, keep) == count_traces(jax.jit, make, keep)


@pytest.mark.parametrize("fun", [UNHASHABLE, SLOTTED], ids=lambda fun: type(fun).__name__)
def test_functions_without_a_hash_share_nothing(fun: Any) -> None:
    assert count_traces(ipu_jit, lambda: fun, keep=False) == 3


SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "donated": {"donate_argnums": 0},
    "static by number": {"static_argnums": 1},
    "static by name": {"static_argnames": ("n",)},
    "options": {"options": ipu.Options(recompute="all")},
    "label": {"options": ipu.Options(label="other")},
    "device": {"device": ipu.IPUModel(tiles_per_ipu=8)},
    "CPU": {"device": ipu.CPU()},
    "replicas": {"device": POD, "replicas": 2, "in_specs": P("replica"), "out_specs": P("replica")},
    "shardings of None": {"in_shardings": (None,), "out_shardings": None},
    "keep_unused": {"keep_unused": True},
    "inline": {"inline": True},
    "compiler_options": {"compiler_options": {"xla_cpu_enable_fast_math": False}},
}


def number_of_rows(x: Any, n: int = 0) -> Any:
    _TRACED.append(x)
    return x * 0 + (x.shape[0] + n)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_settings_never_mix(traces: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipujax.functions.function_calls.MOST_SETTINGS", len(SETTINGS))
    results = {}
    deleted = set()
    for _ in range(2):
        for name, settings in SETTINGS.items():
            argument = jnp.asarray(X)
            results[name] = float(ipu_jit(number_of_rows, **settings)(argument)[0, 0])
            deleted |= {name} if argument.is_deleted() else set()
    # Each compiles once.
    assert len(traces) == len(SETTINGS)
    assert deleted == {"donated"}
    assert results == {name: 1.0 if name == "replicas" else 2.0 for name in SETTINGS}


def test_default_devices_are_looked_up_at_each_call() -> None:
    for tiles in (4, 8, 4):
        with ipu.default_device(ipu.IPUModel(tiles_per_ipu=tiles)):
            assert ipu.jit(add_one).lower(X).graph.target.tiles_per_ipu == tiles


def test_programs_die_with_their_function() -> None:
    table = np.ones(3, np.float32)
    values = weakref.ref(table)

    def closure(x: Any, table: Any = table) -> Any:
        return x + table

    function = weakref.ref(closure)
    del table
    ipu_jit(closure)(X)
    lowered = weakref.ref(ipu_jit(closure).lower(X))
    gc.collect()
    assert lowered() is not None  # of the function, not of a function of `ipu.jit`
    del closure
    gc.collect()
    assert (function(), lowered(), values()) == (None, None, None)


def test_a_recursive_closure_dies() -> None:
    def make() -> weakref.ref[Any]:
        def power(x: Any, n: int) -> Any:
            return x if n == 0 else x * power(x, n - 1)

        np.testing.assert_array_equal(ipu_jit(power, static_argnums=1)(X, 2), X**3)
        return weakref.ref(power)

    power = make()
    gc.collect()
    assert power() is None


def test_a_function_of_an_equal_one_outlives_it() -> None:
    """The equal function that was compiled first is kept by those that use its compiler."""
    first = ipu_jit(Scaled(2.0))
    second = ipu_jit(Scaled(2.0))
    first(X)
    second(X)
    del first
    gc.collect()
    np.testing.assert_array_equal(second(X[:1]), (X[:1] + 1) * 2)
    assert second.lower(X[0]).compile() is not None


def test_stages_outlive_function_and_wrapper() -> None:
    traced = ipu_jit(lambda x: x * 2).trace(X)
    gc.collect()
    np.testing.assert_array_equal(traced.lower().compile()(X), X * 2)


def test_no_more_settings_of_one_function_are_kept_than_the_bound(traces: list[Any]) -> None:
    programs = [
        weakref.ref(ipu.jit(add_one, device=ipu.IPUModel(tiles_per_ipu=4 + n)).lower(X))
        for n in range(MOST_SETTINGS + 3)
    ]
    gc.collect()
    assert [program() is not None for program in programs] == [n >= 3 for n in range(MOST_SETTINGS + 3)]
    ipu_jit(add_one).lower(X)
    assert len(traces) == MOST_SETTINGS + 4


def test_clear_cache_of_one_function_is_that_of_all_with_its_settings(traces: list[Any]) -> None:
    first = ipu_jit(add_one)
    first(X)
    ipu_jit(add_one)(X)
    assert len(traces) == 1
    ipu_jit(add_one).clear_cache()
    first(X)
    ipu_jit(add_one)(X)
    assert len(traces) == 2


def test_clear_caches_keeps_living_functions_compiled(traces: list[Any]) -> None:
    living = ipu_jit(add_one)
    living(X)
    ipu.clear_caches()
    living(X)
    assert len(traces) == 1
    ipu_jit(add_one)(X)
    assert len(traces) == 2


def test_unpickled_functions_have_the_programs_of_their_function(traces: list[Any]) -> None:
    function = ipu_jit(add_one)
    function(X)
    duplicate = pickle.loads(pickle.dumps(function))
    np.testing.assert_array_equal(duplicate(X), X + 1)
    assert len(traces) == 1


def test_threads_compile_once(traces: list[Any]) -> None:
    results = []
    gate = threading.Barrier(4)

    def call() -> None:
        gate.wait()
        results.append(ipu_jit(add_one)(X))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        np.testing.assert_array_equal(result, X + 1)
    assert len(results) == 4
    assert len({id(SHARED_CALLS.find(add_one, ipu_jit(add_one)._settings)[0]) for _ in range(2)}) == 1


def test_a_replaced_rule_compiles_anew(traces: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = np.asarray(ipu_jit(add_one)(X))
    rule = rule_table.RULES["add"]
    calls: list[Any] = []

    def recorded(*args: Any, **params: Any) -> Any:
        calls.append(args)
        return rule(*args, **params)

    with monkeypatch.context() as patch:
        patch.setitem(rule_table.RULES, "add", recorded)
        np.testing.assert_array_equal(ipu_jit(add_one)(X), right)
        assert calls
    number = len(calls)
    np.testing.assert_array_equal(ipu_jit(add_one)(X), right)
    assert len(calls) == number and len(traces) == 3


def test_environment_of_a_compilation_counts(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ipu_jit(add_one).lower(X).compile()
    monkeypatch.setenv("IPUJAX_DUMP", "tiles")
    monkeypatch.setenv("IPUJAX_DUMP_DIR", str(tmp_path))
    ipu_jit(add_one).lower(X).compile()
    assert [path.name for path in tmp_path.iterdir()] == ["add_one.tiles.json"]


def test_jitted_in_loops_with_static_and_donated_arguments(traces: list[Any]) -> None:
    state = jnp.asarray(X)
    for step in range(6):
        earlier = state
        state = ipu_jit(add_one, static_argnums=1, donate_argnums=0)(state, step % 2)
        assert earlier.is_deleted()
    np.testing.assert_array_equal(state, X + 3)
    assert len(traces) == 2


def test_inside_of_other_functions() -> None:
    def outer(x: Any) -> Any:
        return ipu.jit(add_one)(x) + jax.grad(lambda y: ipu.jit(add_one)(y).sum())(x)

    np.testing.assert_array_equal(ipu_jit(outer)(X), X + 2)
    np.testing.assert_array_equal(jax.jit(outer)(X), X + 2)
