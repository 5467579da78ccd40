"""Python functions called from a program: calls and numbers of plain JAX, in order, costed; errors are the user's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from tests.lowering.helpers import lowered, run_tiles, small_target

DEVICE = ipu.IPUModel(tiles_per_ipu=64)
X = np.arange(4, dtype=np.float32)
SAME = jax.ShapeDtypeStruct(X.shape, X.dtype)
NUMBER = jax.ShapeDtypeStruct((), np.uint32)
SEEN: list[Any] = []


def see(*values: Any) -> None:
    SEEN.append([np.asarray(value).tolist() for value in values])


def seen_and_doubled(x: Any) -> np.ndarray:
    see(x)
    return np.asarray(x) * 2


def watched(x: Any) -> Any:
    jax.debug.callback(see, x, x.sum())
    return x + 1


def in_a_scan(x: Any) -> Any:
    def body(c: Any, i: Any) -> Any:
        io_callback(see, None, c, i, ordered=True)
        return io_callback(seen_and_doubled, SAME, c, ordered=True), None

    return lax.scan(body, x, jnp.arange(3))[0]


def debugged_in_a_scan(x: Any) -> Any:
    def body(c: Any, i: Any) -> Any:
        jax.debug.callback(see, c, i, ordered=True)
        return c * 2, None

    return lax.scan(body, x, jnp.arange(3), reverse=True)[0]


def in_branches(x: Any) -> Any:
    def low(x: Any) -> Any:
        return io_callback(seen_and_doubled, SAME, x, ordered=True)

    return lax.cond(x[0] > 0, lambda x: x, low, x), lax.switch(x[1].astype(int), [lambda x: x, low], x)


def in_a_while(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() < 50, lambda c: io_callback(seen_and_doubled, SAME, c, ordered=True), x)


def in_a_condition(x: Any) -> Any:
    def goes_on(c: Any) -> Any:
        return io_callback(lambda v: np.bool_(see(v) or np.asarray(v)[0] < 3), jax.ShapeDtypeStruct((), bool), c)

    return lax.while_loop(goes_on, lambda c: c + 1, x)


def without_operands(x: Any) -> Any:
    return x + io_callback(lambda: np.float32(see() or 3), jax.ShapeDtypeStruct((), np.float32), ordered=True)


def with_several_results(x: Any) -> Any:
    shapes = {"a": SAME, "b": jax.ShapeDtypeStruct((), np.int32)}
    return jax.pure_callback(lambda v: {"a": np.sin(v), "b": np.int32(len(v))}, shapes, x)


def with_nothing(x: Any) -> Any:
    return io_callback(seen_and_doubled, jax.ShapeDtypeStruct((0,), np.float32), x[:0], ordered=True), x


def with_keys(x: Any) -> Any:
    """Functions are given the words of keys, by JAX as well."""
    keys = jax.random.split(jax.random.key(5), 3)
    jax.debug.callback(see, keys, x)
    words = io_callback(seen_and_doubled, jax.ShapeDtypeStruct((3, 2), np.uint32), keys, ordered=True)
    return words, jax.pure_callback(lambda k: np.asarray(k).sum(dtype=np.uint32), NUMBER, keys[1]), x


def in_vmap(x: Any) -> Any:
    element = jax.ShapeDtypeStruct((), np.float32)
    return jax.vmap(lambda v: jax.pure_callback(np.cos, element, v, vmap_method="sequential"))(x)


def in_a_gradient(x: Any) -> Any:
    def loss(x: Any) -> Any:
        jax.debug.callback(see, x)
        return (x**2).sum()

    return jax.grad(loss)(x)


FUNCTIONS: tuple[Callable[[Any], Any], ...] = (
    *(
        watched,
        in_a_scan,
        debugged_in_a_scan,
        in_branches,
        in_a_while,
        in_a_condition,
        without_operands,
        with_several_results,
    ),
    *(with_nothing, with_keys, in_vmap, in_a_gradient),
)


def outcome(run: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
    """Results of a run, and the calls of Python functions in it."""
    SEEN.clear()
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(run())]
    jax.effects_barrier()
    return leaves, list(SEEN)


@pytest.mark.parametrize("fun", FUNCTIONS)
def test_calls_and_numbers_are_those_of_plain_jax(fun: Callable[[Any], Any]) -> None:
    expected, expected_calls = outcome(lambda: jax.jit(fun)(X))
    compiled = ipu.jit(fun, device=DEVICE).lower(X).compile()
    program = lowered(fun, (X,), small_target(7))
    for run in (ipu.jit(fun, device=DEVICE), compiled, lambda x: compiled.profile_call(x)[0]):
        results, calls = outcome(lambda run=run: run(X))
        assert calls == expected_calls
        for a, b in zip(results, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    results, calls = outcome(lambda: run_tiles(program, (X,)))
    assert calls == expected_calls
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_prints(capsys: pytest.CaptureFixture[str]) -> None:
    @ipu.jit(device=DEVICE)
    def fun(x: Any) -> Any:
        jax.debug.print("first {}", x.sum())
        lax.fori_loop(0, 2, lambda i, c: jax.debug.print("turn {i}", i=i) or c, 0)
        jax.debug.print("no operand")
        return x

    fun(X)
    assert capsys.readouterr().out == "first 6.0\nturn 0\nturn 1\nno operand\n"


def test_a_call_is_a_host_exchange_of_its_operands_and_results() -> None:
    def fun(x: Any) -> Any:
        return jax.pure_callback(lambda v: v, SAME, x) + 1

    target = DEVICE.target
    profiles = [ipu.jit(f, device=DEVICE).lower(X).compile().profile for f in (fun, lambda x: x)]
    assert not profiles[0].fallbacks
    settings = profiles[0].phase_cycles["host_exchange"] - profiles[1].phase_cycles["host_exchange"]
    one_way = target.host_latency_seconds + X.nbytes / target.host_bytes_per_second
    assert settings == 2 * int(np.ceil(one_way * target.clock_hz))


class Refused(Exception):
    """An error of a user's function."""


def fails_at(turn: int) -> Callable[[Any], Any]:
    """A loop whose calls see the turn; one of them raises."""

    def look(i: Any) -> np.float32:
        see(i)
        if int(i) == turn:
            raise Refused(f"turn {turn}")
        return np.float32(1)

    def fun(x: Any) -> Any:
        def body(c: Any, i: Any) -> Any:
            return c + io_callback(look, jax.ShapeDtypeStruct((), np.float32), i, ordered=True), None

        return lax.scan(body, x, jnp.arange(5))[0]

    return fun


def test_the_users_exception_comes_back_and_later_calls_do_not_happen() -> None:
    fun = ipu.jit(fails_at(2), device=DEVICE)
    for _ in range(2):  # and the next run starts afresh
        SEEN.clear()
        with pytest.raises(Refused, match="turn 2"):
            fun(X)
        assert SEEN == [[0], [1], [2]]
    compiled = fun.lower(X).compile()
    for call in (compiled, compiled.profile_call):
        with pytest.raises(Refused, match="turn 2"):
            call(X)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_donated_arrays_survive_an_exception(is_compiled: bool) -> None:
    fails = [True]

    def check(value: Any) -> None:
        if fails[0]:
            raise LookupError("no such value")

    def step(state: Any, x: Any) -> Any:
        jax.debug.callback(check, x)
        return state + x

    function = ipu.jit(step, device=DEVICE, donate_argnums=0)
    state = jnp.ones(4)
    call = function.lower(state, X).compile() if is_compiled else function
    for _ in range(2):
        with pytest.raises(LookupError, match="no such value"):
            call(state, X)
    fails[0] = False
    np.testing.assert_array_equal(call(state, X), 1 + X)


@pytest.mark.parametrize("replicas", [None, 2])
def test_donated_arrays_survive_an_exception_where_plain_jax_computes(replicas: int | None) -> None:
    fails = [True]

    def check(value: Any) -> np.ndarray:
        if fails[0]:
            raise LookupError("no such value")
        return np.asarray(value)

    def step(state: Any, x: Any) -> Any:
        return state + io_callback(check, SAME, x, ordered=replicas is None)

    settings = {} if replicas is None else {"replicas": replicas, "out_specs": P()}
    call = ipu.jit(step, device=ipu.CPU(), donate_argnums=0, **settings)
    state = jnp.ones(4)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no such value"):
            jax.block_until_ready(call(state, X))
    fails[0] = False
    np.testing.assert_array_equal(call(state, X), 1 + X)


def test_arrays_are_donated_where_plain_jax_computes_and_calls_no_python() -> None:
    state = jnp.ones(4)
    ipu.jit(lambda state, x: state + x, device=ipu.CPU(), donate_argnums=0)(state, X)
    assert state.is_deleted()


def test_an_exception_ends_a_loop_that_waits_for_the_host() -> None:
    def fun(x: Any) -> Any:
        def body(c: Any) -> Any:
            return io_callback(lambda v: 1 // 0, jax.ShapeDtypeStruct((), np.float32), c)

        return lax.while_loop(lambda c: c < 3, body, x)

    with pytest.raises(ZeroDivisionError):
        ipu.jit(fun, device=DEVICE)(np.float32(0))


def test_jax_takes_no_keys_back() -> None:
    def fun(keys: Any) -> Any:
        return jax.random.key_data(jax.pure_callback(lambda k: k, jax.ShapeDtypeStruct((), keys.dtype), keys))

    for run in (jax.jit, ipu.jit):
        with pytest.raises(TypeError, match="key<fry>"):
            run(fun)(jax.random.key(0))


def test_results_of_another_shape_are_refused() -> None:
    def fun(x: Any) -> Any:
        return jax.pure_callback(lambda v: np.zeros(3, np.float32), SAME, x)

    with pytest.raises(RuntimeError, match=r"(?s)other shapes.*float32\[4\].*float32\[3\]"):
        ipu.jit(fun, device=DEVICE)(X)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        *(
            (np.float64(2.5), "float32"),
            (np.int64(3), "int32"),
            (np.uint64(3), "uint32"),
            (np.complex128(3j), "complex64"),
        ),
        *((2.5, "float32"), (3, "int32"), (3j, "complex64"), (2**40 + 3, "int32"), (True, "bool")),
        *((3, "float32"), (3, "uint32"), (2.5, "int32"), (2.5, "float16"), (np.float32(3), "float16"), (True, "int32")),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("call", [jax.pure_callback, partial(io_callback, ordered=True)])
def test_numbers_of_64_bits_are_narrowed_where_jax_does(call: Any, value: Any, dtype: str, wide: bool) -> None:
    def outcome(jit: Any) -> Any:
        try:
            return np.asarray(jit(lambda x: call(lambda v: value, jax.ShapeDtypeStruct((), dtype), x))(X))
        except (ipu.IpuError, jax.errors.JaxRuntimeError):
            return "refused"

    with jax.enable_x64(wide):
        plain = outcome(jax.jit)
        ours = outcome(partial(ipu.jit, device=DEVICE))
    assert getattr(ours, "dtype", None) == getattr(plain, "dtype", None)
    np.testing.assert_array_equal(ours, plain)


def test_jax_refuses_ordered_calls_in_vmap_in_its_own_words() -> None:
    def fun(x: Any) -> Any:
        return jax.vmap(lambda v: io_callback(np.cos, jax.ShapeDtypeStruct((), np.float32), v, ordered=True))(x)

    with pytest.raises(ValueError, match="Cannot `vmap` ordered IO callback"):
        ipu.jit(fun, device=DEVICE)(X)
