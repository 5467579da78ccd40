"""`jax.debug_nans` and `jax.debug_infs` name the primitive of JAX and the user's line, whatever runs the program."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec as P, SingleDeviceSharding

import ipujax as ipu

DEVICE = ipu.IPUModel(tiles_per_ipu=8)
TWO = ipu.IPUModel(num_ipus=2, tiles_per_ipu=8)
X = jnp.arange(4.0)
ON_HOST = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
SPLIT: dict[str, Any] = {"device": TWO, "replicas": 2, "in_specs": P("replica"), "out_specs": P("replica")}


def plain(x: Any) -> Any:
    return jnp.log(x - 2) * 2


def inside_of_a_call(x: Any) -> Any:
    return jax.jit(lambda y: jnp.log(y - 2))(x) + 1


def in_a_loop(x: Any) -> Any:
    return lax.scan(lambda c, y: (c + jnp.log(y - 2), y), 0.0, x)


def of_python(x: Any) -> Any:
    return jax.pure_callback(lambda v: np.full(4, np.nan, np.float32), jax.ShapeDtypeStruct((4,), jnp.float32), x)


def without_arguments() -> Any:
    return jnp.log(X - 2)


def of_host_memory(x: Any) -> Any:
    return jax.device_put(jnp.log(jax.device_put(x, jax.memory.Space.Device) - 2), ON_HOST)


def after_a_variance(x: Any) -> Any:
    return jnp.log(x.var() - 20)


def over_a_mesh(x: Any) -> Any:
    mesh = AbstractMesh((2,), ("a",))
    return jax.shard_map(lambda x: jnp.log(lax.psum(x, "a") - 20), mesh=mesh, in_specs=P("a"), out_specs=P())(x)


def summed(x: Any) -> Any:
    return jnp.log(lax.psum(x, "replica") - 20)


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "plain": (plain, {"device": DEVICE}, "log"),
    "exact splits": (plain, {"device": DEVICE, "options": ipu.Options(exact_splits=True)}, "log"),
    "a call": (inside_of_a_call, {"device": DEVICE}, "log"),
    "a loop": (in_a_loop, {"device": DEVICE}, "scan"),
    "a Python function": (of_python, {"device": DEVICE}, "pure_callback"),
    "a variance": (after_a_variance, {"device": DEVICE}, "log"),
    "no arguments": (without_arguments, {"device": DEVICE}, "log"),
    "host memory": (of_host_memory, {"device": DEVICE}, "log"),
    "a mesh": (over_a_mesh, {"device": TWO}, "log"),
    "replicas": (plain, SPLIT, "log"),
    "replicas that communicate": (summed, SPLIT, "log"),
}


@pytest.fixture(autouse=True)
def debugging() -> Iterator[None]:
    with jax.debug_nans(True):
        yield


def call(run: Any, args: tuple[Any, ...]) -> Any:
    return run(*args)


def compiled_call(run: Any, args: tuple[Any, ...]) -> Any:
    return run.lower(*args).compile()(*args)


def profiled_call(run: Any, args: tuple[Any, ...]) -> Any:
    return run.lower(*args).compile().profile_call(*args)


def arguments(fun: Callable[..., Any]) -> tuple[Any, ...]:
    if fun is of_host_memory:
        return (jax.device_put(X, ON_HOST),)
    return () if fun is without_arguments else (X,)


def assert_names(error: BaseException, fun: Callable[..., Any], primitive: str) -> None:
    """The primitive is in the text, a line of the function in the traceback or the note."""
    assert str(error) == f"invalid value (nan) encountered in {primitive}"
    lines, start = inspect.getsourcelines(fun)
    frames = {f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)}
    texts = " ".join([*frames, *getattr(error, "__notes__", ())])
    assert any(f"{Path(__file__).name}:{start + n}" in texts for n in range(len(lines))), texts


@pytest.mark.parametrize("do", [call, compiled_call, profiled_call])
@pytest.mark.parametrize("name", CASES)
def test_names_primitive_and_line(name: str, do: Callable[..., Any]) -> None:
    fun, settings, primitive = CASES[name]
    with pytest.raises(FloatingPointError) as caught:
        do(ipu.jit(fun, **settings), arguments(fun))
    assert_names(caught.value, fun, primitive)


def test_names_it_for_a_program_of_the_cache(tmp_path: Path) -> None:
    options = ipu.Options(cache_dir=tmp_path)
    for do in (call, call, compiled_call):
        with pytest.raises(FloatingPointError) as caught:
            do(ipu.jit(plain, device=DEVICE, options=options), (X,))
        assert_names(caught.value, plain, "log")


def test_names_infinities() -> None:
    for do in (call, compiled_call):
        with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"invalid value \(inf\) encountered in div"):
            do(ipu.jit(lambda x: 1 / x, device=DEVICE), (X,))


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.where(x > 0, jnp.log(x), 0.0),
        lambda x: lax.cond(x[0] > 5, lambda x: x * jnp.nan, lambda x: x + 1, x),
        lambda x: jnp.nansum(jnp.log(x - 1)),
        lambda x: (jnp.var(x), jnp.max(x), jnp.argmin(x)),
        lambda x: jnp.isnan(0.0 / x),
    ],
    ids=["where", "branch", "nansum", "reductions", "isnan"],
)
def test_intermediate_nans_are_nobodys_fault(fun: Callable[..., Any]) -> None:
    for do in (call, compiled_call):
        got = do(ipu.jit(fun, device=DEVICE), (X,))
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(fun)(X)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)
