"""`ipu.check`: reports of right programs, and of programs with an error planted in a rule, a codelet or a pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.lowering.popops.maps import rows
from ipujax.lowering.rules.table import RULES
from tests.lowering.random_programs import Program, Step

SMALL = ipu.IPUModel(tiles_per_ipu=8)
CHECKED = ipu.Options(check=True)
X = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)


def wrong(name: str, rule: Callable[..., Any]) -> Any:
    """Context in which a primitive has another rule; it gets the right one."""
    right = RULES[name]
    ipu.clear_caches()
    return mock.patch.dict(RULES, {name: lambda *args, **params: rule(right, *args, **params)})


def without_negation(right: Any, ctx: Any, x: Any, **params: Any) -> Any:
    return x


def scaled(x: Any) -> Any:
    y = jnp.sort(x, 1)
    return lax.neg(y)


def test_says_how_much_of_a_difference_is_rounding() -> None:
    report = ipu.check(ipu.jit(lambda x: (jnp.tanh(x @ x).sum(), x > 0), device=SMALL), X)
    assert report.agrees and report.on_tiles and report.equations >= 3
    assert [row.name for row in report.results] == ["result[0]", "result[1]"]
    assert report.largest_difference < 1e-4
    assert "agrees with plain JAX" in str(report)


def test_names_the_equation_of_a_wrong_rule_with_its_line() -> None:
    with wrong("neg", without_negation):
        report = ipu.check(ipu.jit(scaled, device=SMALL), X)
    assert report.mismatch is not None and report.mismatch.primitive == "neg"
    line = scaled.__code__.co_firstlineno + 2
    assert report.mismatch.line == f"{Path(__file__).name}:{line} (scaled)"
    assert report.mismatch.found_in == "the lowered program"
    assert report.results[0].is_error and report.results[0].program > 1
    with pytest.raises(
        ipu.ResultMismatchError, match=r"scaled: neg is computed wrongly by the lowered program\n  at: "
    ):
        report.raise_mismatch()


def test_the_interpreter_tells_what_xla_computes_whole() -> None:
    make = rows._sort_codelet.__wrapped__  # type: ignore[attr-defined]

    def reversed_in_blocks(*args: Any) -> Any:
        codelet = make(*args)
        right = codelet.compute
        object.__setattr__(codelet, "compute", lambda x: right(x) if len(x) == len(X) else (right(x)[0][:, ::-1],))
        return codelet

    ipu.clear_caches()
    with mock.patch.object(rows, "_sort_codelet", reversed_in_blocks):
        report = ipu.check(ipu.jit(lambda x: jnp.sort(x, 1), device=SMALL), X)
    ipu.clear_caches()
    assert report.mismatch is not None
    assert (report.mismatch.primitive, report.mismatch.found_in) == ("sort", "the tile interpreter")
    assert report.results[0].program == 0 and report.results[0].tiles


def test_options_check_the_first_call_of_each_signature_and_donate_afterwards() -> None:
    step = ipu.jit(lambda x: -x, device=SMALL, options=CHECKED, donate_argnums=0)
    x = jnp.asarray(X)
    with wrong("neg", without_negation), pytest.raises(ipu.ResultMismatchError, match="neg"):
        step(x)
    assert not x.is_deleted()
    ipu.clear_caches()
    step.clear_cache()
    with mock.patch(
        "ipujax.checking.check_compiled", wraps=__import__("ipujax.checking").checking.check_compiled
    ) as run:
        np.testing.assert_array_equal(step(x), -X)
        step(jnp.asarray(X))
        assert run.call_count == 1
        step(jnp.asarray(X[0]))
        assert run.call_count == 2
    assert x.is_deleted()


def test_options_have_nothing_to_check_without_a_machine_or_under_transformations() -> None:
    assert ipu.jit(lambda x: x + 1, device=ipu.CPU(), options=CHECKED)(X).shape == X.shape
    assert jax.grad(lambda x: ipu.jit(jnp.sum, device=SMALL, options=CHECKED)(x))(X).shape == X.shape
    # Arguments are known, and the function reads a value and an axis of the transformation.
    assert jax.grad(lambda w: ipu.jit(lambda x: (x * w).sum(), device=SMALL, options=CHECKED)(X))(X).shape == X.shape
    numbered = ipu.jit(lambda x: x + lax.axis_index("rows"), device=SMALL, options=CHECKED)
    np.testing.assert_array_equal(jax.vmap(lambda _: numbered(1), axis_name="rows")(X), 1 + np.arange(6))


def test_a_ref_is_not_written() -> None:
    ref = jax.new_ref(jnp.asarray(X))

    def add(ref: Any, x: Any) -> Any:
        ref[...] = ref[...] + x
        return ref[...].sum()

    report = ipu.check(ipu.jit(add, device=SMALL), ref, X)
    assert report.agrees and report.results[1].name == "Ref 0"
    np.testing.assert_array_equal(ref[...], X)


def test_replicas_and_static_arguments() -> None:
    def step(x: Any, power: int, *, offset: Any) -> Any:
        return lax.psum(x**power, "replica") + offset

    fun = ipu.jit(
        step,
        device=ipu.IPUModel(2, tiles_per_ipu=4),
        replicas=2,
        in_specs=P("replica"),
        out_specs=P(),
        static_argnums=1,
    )
    assert ipu.check(fun, X, 3, offset=np.float32(2)).agrees


def test_values_that_are_no_plain_floats() -> None:
    def fun(key: Any, n: Any, x: Any) -> Any:
        gradient = jax.grad(lambda n, x: (n * x).sum(), (0, 1), allow_int=True)(n, x)
        return jax.random.split(key), n // 2, x > 0, jnp.log(x), jnp.zeros((0, 3)), gradient

    assert ipu.check(ipu.jit(fun, device=SMALL), jax.random.key(1), np.arange(6), X[0]).agrees


def test_a_chaotic_loop_is_no_error_and_a_dropped_carry_is() -> None:
    def chaotic(x: Any) -> Any:
        return lax.scan(lambda c, _: (3.9 * c * (1 - c), None), x, length=100)[0]

    def initial(right: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
        right(ctx, *operands, **params)
        return operands[:1]

    x = np.float32([0.3, 0.4])
    device = ipu.IPUModel(tiles_per_ipu=2)
    assert ipu.check(ipu.jit(chaotic, device=device), x).agrees

    def sums(x: Any) -> Any:
        return lax.scan(lambda c, row: (c + row, None), x[0], x)[0]

    with wrong("scan", initial):
        report = ipu.check(ipu.jit(sums, device=device), X)
    assert report.mismatch is not None and report.mismatch.primitive == "scan"


def deleted_array() -> jax.Array:
    array = jnp.ones(2)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: ipu.check(ipu.jit(jnp.sin, device=ipu.CPU()), X), "there is nothing to check"),
        (lambda: ipu.check(jnp.sin, jax.ShapeDtypeStruct((2,), np.float32)), "is checked on arrays"),
        (lambda: ipu.check(jnp.sin, deleted_array()), "has been deleted"),
        (lambda: jax.jit(lambda x: ipu.check(jnp.sin, x))(X), "a check compares numbers"),
        (
            lambda: ipu.check(ipu.jit(lambda x: (jax.debug.print("{}", x), x)[1], device=SMALL), X),
            "cannot be checked: it calls Python functions",
        ),
        (
            lambda: ipu.jit(lambda x: (jax.debug.print("{}", x), x)[1], device=SMALL, options=CHECKED)(X),
            "cannot be checked: it calls Python functions",
        ),
        (lambda: ipu.Options(check=1), "Options.check must be a bool"),
    ],
)
def test_refusals(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(ipu.ArgumentError, match=match):
        call()


def test_replicas_that_leave_a_loop_at_different_times() -> None:
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=8)

    def grown(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: c.sum() < 50, lambda c: c * 2 + 1, x)

    fun = ipu.jit(grown, device=device, replicas=2, in_specs=P("replica"), out_specs=P("replica"))
    assert ipu.check(fun, jnp.arange(8.0)).agrees


# A gather from a value that XLA computed again, once rounded, for its reader; its probe had been rounded twice.
COMPUTED_AGAIN = Program(
    (8, 2),
    (
        Step("neg", (440, 348, 691, 225, 240), ()),
        Step("extreme", (534, 338, 998, 200, 124), ()),
        Step("pad", (706, 519, 914, 267, 454), ()),
        Step("bent", (155, 119, 271, 97, 347), ()),
        Step("float0", (24, 446, 249, 24, 743), ()),
        Step("logistic", (999, 104, 578, 180, 375), ()),
        Step(
            "call",
            (309, 382, 660, 465, 514),
            (
                (
                    Step("float0", (503, 528, 519, 56, 550), ()),
                    Step("dot", (176, 868, 687, 30, 201), ()),
                ),
            ),
        ),
    ),
    differentiable=True,
    seed=77,
)


def test_compares_values_that_their_readers_got() -> None:
    def fun(*args: Any) -> Any:
        return COMPUTED_AGAIN(*args), COMPUTED_AGAIN.gradient(*args)

    device = ipu.IPUModel(tiles_per_ipu=72)
    checked = ipu.jit(fun, device=device, options=ipu.Options(exact_splits=True))
    assert checked.check(*COMPUTED_AGAIN.arguments()).agrees


def test_checks_floats_of_eight_bits_and_ragged_products() -> None:
    def step(x: Any, experts: Any, sizes: Any) -> tuple[jax.Array, jax.Array]:
        y = lax.ragged_dot(x, experts, sizes)
        return y, lax.scan(lambda s, row: (s + row, s.astype(jnp.float8_e4m3fn)), y[0], y)[1]

    fun = ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=72))  # not interpreted
    assert ipu.check(fun, X, np.stack([X, X.T]), jnp.array([4, 1], jnp.int32)).agrees


@pytest.mark.parametrize("replicas", [1, 2])
def test_checks_reductions_from_start_values(replicas: int) -> None:
    """JAX has no batches of them."""

    def step(x: Any) -> list[jax.Array]:
        windows = lax.reduce_window(x, jnp.float16(2), lax.add, (3, 2), (1, 3), [(0, 1), (-1, 1)], base_dilation=(2, 1))
        return [
            windows,
            *lax.reduce((x, x), (jnp.float16(1), jnp.float16(0)), lambda a, b: (a[0] * b[0], a[1] + b[1]), (0,)),
        ]

    device = ipu.IPUModel(replicas, tiles_per_ipu=8)
    specs = {"replicas": replicas, "in_specs": P("replica"), "out_specs": P("replica")} if replicas > 1 else {}
    x = np.random.default_rng(0).normal(size=(16, 7)).astype(np.float16)
    assert ipu.check(ipu.jit(step, device=device, **specs), x).agrees
