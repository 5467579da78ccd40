"""Options without effect on a program are named in a warning; those with an effect are not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu

DEVICE = ipu.IPUModel(tiles_per_ipu=8)
X = jnp.ones((6, 4))
HALF = jnp.ones((4, 4), jnp.float16)


def double(x: Any) -> Any:
    return 2 * x


def summed_rows(x: Any) -> Any:
    return jax.lax.scan(lambda total, row: (total + row, row * 2), jnp.zeros(4), x)


def gradient(x: Any) -> Any:
    return jax.value_and_grad(lambda x: jnp.tanh(jnp.sin(x) @ x.T).sum())(x)


def product(x: Any) -> Any:
    return x @ x


# Option → a value, a function without use for it, the reason, and a function that uses it with its argument.
ROWS: dict[str, tuple[Any, Callable[..., Any], str, Callable[..., Any], Any]] = {
    "recompute": ("all", double, "no gradient", gradient, X),
    "stream_loops": (True, double, "no loop reads rows", summed_rows, X),
    "prefetch_depth": (3, double, "without io_tiles", double, X),
    "partials": ("float16", product, "no product of half precision", product, HALF),
}


def warnings_of(caplog: pytest.LogCaptureFixture, run: Callable[[], Any]) -> list[str]:
    with caplog.at_level(logging.WARNING, "ipujax"):
        caplog.clear()
        run()
    return [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]


@pytest.mark.parametrize("name", ROWS)
def test_an_option_without_effect_is_named_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    value, function, reason, _, _ = ROWS[name]
    jitted = ipu.jit(function, device=DEVICE, options=ipu.Options(**{name: value}))
    (line,) = warnings_of(caplog, lambda: jitted(X[:4]))
    assert line.startswith(f"{function.__name__}: Options({name}={value!r}) has no effect: ")
    assert reason in line
    assert not warnings_of(caplog, lambda: jitted(X[:4, :4].astype(jnp.float32) + 1))
    assert not warnings_of(caplog, lambda: jitted(jnp.ones((2, 2))))


@pytest.mark.parametrize("name", ["recompute", "stream_loops", "partials"])
def test_an_option_with_effect_is_not_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    value, _, _, function, argument = ROWS[name]
    jitted = ipu.jit(function, device=DEVICE, options=ipu.Options(**{name: value}))
    assert not warnings_of(caplog, lambda: jitted(argument))


def test_rows_that_no_compilation_pads_are_named(caplog: pytest.LogCaptureFixture) -> None:
    jitted = ipu.jit(lambda x: x * x[:, ::-1], device=DEVICE, options=ipu.Options(pad_rows=True))
    odd = jax.ShapeDtypeStruct((255, 255), jnp.float16)
    assert not warnings_of(caplog, lambda: jitted.profile(odd))
    (line,) = warnings_of(caplog, lambda: jitted.profile(jax.ShapeDtypeStruct((64, 64), jnp.float16)))
    assert line == "Options(pad_rows=True) has no effect: no row is cheaper padded"


def test_recomputation_of_nothing_leaves_equations_in_their_order() -> None:
    """Of few layers "standard" repeats none: all are behind the last cut before the loss."""

    def step(weights: Any, x: Any) -> Any:
        def deep_loss(weights: Any) -> Any:
            h = x
            for w in weights:
                h = jnp.tanh(h @ w)
            return (h**2).mean()

        value, gradients = jax.value_and_grad(deep_loss)(weights)
        return value, jax.tree.map(lambda w, g: w - g, weights, gradients)

    arguments = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 4, jax.ShapeDtypeStruct((8, 16), jnp.float32)
    plain, standard = (
        ipu.jit(step, device=DEVICE, options=ipu.Options(recompute=mode)) for mode in ("none", "standard")
    )
    assert standard.profile(*arguments).cycles == plain.profile(*arguments).cycles


def test_io_tiles_have_a_depth(caplog: pytest.LogCaptureFixture) -> None:
    jitted = ipu.jit(double, device=DEVICE, options=ipu.Options(io_tiles=2, prefetch_depth=3))
    assert not warnings_of(caplog, lambda: jitted(X))


@pytest.mark.parametrize("argument", [X, jnp.float32(2.0)])
def test_io_tiles_that_move_nothing_are_named(argument: Any, caplog: pytest.LogCaptureFixture) -> None:
    options = ipu.Options(io_tiles=2)
    donating = ipu.jit(double, device=DEVICE, options=options, donate_argnums=0)
    (line,) = warnings_of(caplog, lambda: donating.lower(argument))
    assert line.startswith("double: Options(io_tiles=2) has no effect: no argument or result is moved")
    assert not warnings_of(caplog, lambda: ipu.jit(double, device=DEVICE, options=options).lower(X))


def test_a_program_of_the_cache_names_it_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = ipu.Options(recompute="all", cache_dir=str(tmp_path))
    for _ in range(2):
        ipu.clear_caches()
        assert warnings_of(caplog, lambda: ipu.jit(double, device=DEVICE, options=options)(X))


def test_a_front_end_that_sets_options_of_all_functions_names_none(caplog: pytest.LogCaptureFixture) -> None:
    jitted = ipu.jit(double, device=DEVICE, options=ipu.Options(stream_loops=True))
    jitted.unused_settings.ignore_options()
    assert not warnings_of(caplog, lambda: jitted(X))


def loss(w: Any, x: Any) -> Any:
    with ipu.stage(0):
        h = x @ w
    with ipu.stage(1):
        return (h**2).mean()


@pytest.mark.parametrize("is_gradient", [False, True])
def test_recomputation_of_a_pipeline_needs_a_gradient(is_gradient: bool, caplog: pytest.LogCaptureFixture) -> None:
    fun = jax.value_and_grad(loss) if is_gradient else loss
    step = ipu.pipeline(fun, micro_batches=3, recompute="all")
    jitted = ipu.jit(step, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=8))
    lines = warnings_of(caplog, lambda: jitted.lower(jnp.ones((4, 4)), X))
    assert lines == [] if is_gradient else 'recompute="all" of ipu.pipeline has no effect' in lines[0]


@pytest.mark.parametrize(("fun", "argument"), [(lambda x, s: x * s, 2.0), (lambda x, s: x, X), (lambda x, s: x, ())])
def test_an_offloaded_argument_that_stays_on_the_chip_is_named(
    fun: Callable[..., Any], argument: Any, caplog: pytest.LogCaptureFixture
) -> None:
    jitted = ipu.jit(fun, device=DEVICE, offload_argnums=(0, 1))
    (line,) = warnings_of(caplog, lambda: jitted(X, argument))
    assert "offload_argnums has no effect on s:" in line


def test_recomputation_of_a_gradient_alone_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing but the gradient reads the forward part, which is computed once either way."""

    def fun(x: Any) -> Any:
        return gradient(x)[1]

    options = ipu.Options(recompute="all")
    jitted, plain = ipu.jit(fun, device=DEVICE, options=options), ipu.jit(fun, device=DEVICE)
    (line,) = warnings_of(caplog, lambda: jitted.lower(X))
    assert "fun: Options(recompute='all') has no effect" in line
    assert jitted.profile(X).cycles == plain.profile(X).cycles


def test_settings_of_a_function_inside_another_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """One program has the options of the outer function; those that are equal, or the default, say nothing."""
    options = ipu.Options(byte_cost=16, pad_rows=True, progress=False)
    inner = ipu.jit(product, options=options, offload_argnums=0, donate_argnums=0)
    outer = ipu.jit(lambda x: inner(inner(x)), device=DEVICE, options=ipu.Options(progress=False, byte_cost=16))
    lines = warnings_of(caplog, lambda: outer.lower(jnp.ones((4, 4))))
    assert lines == [
        "product: Options(pad_rows=True) has no effect: its caller is of ipu.jit, whose settings hold",
        "product: donate_argnums=(0,) has no effect: its caller is of ipu.jit, whose settings hold",
        "product: offload_argnums=(0,) has no effect: its caller is of ipu.jit, whose settings hold",
    ]


@pytest.mark.parametrize("name", ["in_shardings", "out_shardings"])
def test_a_memory_of_shardings_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """JAX moves such values; here `jax.device_put` does, and `out_shardings` of one device: `test_memory_kinds`."""
    spec = jax.P("x")
    sharding = jax.NamedSharding(ipu.make_mesh((2,), ("x",)), spec, memory_kind="pinned_host")
    jitted = ipu.jit(double, device=ipu.IPUModel(2, tiles_per_ipu=8), **{name: sharding})
    (line,) = warnings_of(caplog, lambda: jitted.lower(X))
    assert line.startswith(f"double: memory_kind='pinned_host' of {name} has no effect: jax.device_put")
