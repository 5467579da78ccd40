"""The layer of every equation: scopes, functions of the call stack, numbers in Python's loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, jaxprs_in_params
from ipujax.lowering.layer_notes import origin_of
from ipujax.lowering.passes.inline import inline, inline_and_name
from ipujax.lowering.source_info import name_stack
from ipujax.runtime.tensor import MAX_CALLERS, Origin

X = jnp.ones((3, 4))
NOWHERE = Origin()


def params(count: int) -> list[dict[str, Any]]:
    return [{"w": jnp.ones((4, 4)), "b": jnp.ones(4), "heads": [jnp.ones((4, 4)), jnp.zeros((4, 4))]}] * count


def dense(p: dict[str, Any], x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w"] + p["b"])


def block(p: dict[str, Any], x: jax.Array) -> jax.Array:
    h = dense(p, x)
    return x + dense(p, h)


def head(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x @ w)


def heads(p: dict[str, Any], x: jax.Array) -> jax.Array:
    return x + sum([head(w, x) for w in p["heads"]])


def looped(layer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def loss(ps: list[dict[str, Any]], x: jax.Array) -> jax.Array:
        for p in ps:
            x = layer(p, x)
        return (x**2).mean()

    return loss


def origins(jaxpr: Jaxpr, outer: Origin = NOWHERE) -> Iterator[tuple[JaxprEqn, Origin]]:
    for eqn in jaxpr.eqns:
        origin = origin_of(eqn, outer)
        yield eqn, origin
        for inner in jaxprs_in_params(eqn.params):
            yield from origins(getattr(inner, "jaxpr", inner), origin)


def named(fun: Callable[..., Any], *args: Any) -> list[tuple[JaxprEqn, Origin]]:
    return list(origins(inline_and_name(jax.make_jaxpr(fun)(*args)).jaxpr))


def layers(fun: Callable[..., Any], *args: Any, part: str = "") -> set[str]:
    return {origin.layer for _, origin in named(fun, *args) if origin.part == part}


def numbered(name: str, count: int, inside: str = "") -> set[str]:
    return {f"loss/{name}[{n}]{inside}" for n in range(count)}


DENSE = numbered("block", 3, "/dense[0]") | numbered("block", 3, "/dense[1]")  # a block calls it at two places


@pytest.mark.parametrize("layer", [block, jax.jit(block), jax.vmap(block, (None, 0))], ids=["plain", "jit", "vmap"])
def test_layers_of_one_line_are_numbered_in_forward_and_backward(layer: Callable[..., jax.Array]) -> None:
    grad = jax.grad(looped(layer))
    forward = layers(grad, params(3), X, part="forward")
    assert forward == {"loss"} | numbered("block", 3) | DENSE
    assert layers(grad, params(3), X, part="backward") == {"loss"} | DENSE


def test_each_layer_of_a_loop_has_the_same_equations() -> None:
    counts: dict[tuple[str, str], int] = {}
    for _, origin in named(jax.grad(looped(block)), params(4), X):
        counts[origin.part, origin.layer] = counts.get((origin.part, origin.layer), 0) + 1
    assert len({counts["forward", f"loss/block[{n}]/dense[{k}]"] for n in range(4) for k in range(2)}) == 1
    assert len({counts["backward", f"loss/block[{n}]/dense[1]"] for n in range(4)}) == 1
    assert counts["backward", "loss/block[0]/dense[0]"] < counts["backward", "loss/block[1]/dense[0]"]  # of no input


def test_a_checkpoint_called_at_several_places_has_the_frames_of_each() -> None:
    def stage(ps: Any, x: jax.Array) -> jax.Array:
        for p in ps:
            x = jax.checkpoint(dense)(p, x)
        return x

    def loss(ps: Any, x: jax.Array) -> jax.Array:
        x = stage(ps[:2], x)
        return stage(ps[2:], x).sum()

    expected = {f"loss/stage[{n}]/dense[{k}]" for n in range(2) for k in range(2)}
    for part in ("forward", "recomputed", "backward"):
        assert layers(jax.grad(loss), params(4), X, part=part) - {"loss"} == expected, part


def test_a_jitted_function_in_a_checkpoint_has_the_frames_of_each_call() -> None:
    """JAX leaves out the line of a jitted call that a checkpoint evaluates in the forward pass."""

    def stage(ps: Any, x: jax.Array) -> jax.Array:
        each = jax.checkpoint(jax.jit(dense))
        for p in ps:
            x = each(p, x)
        return x

    grad = jax.grad(lambda ps, x: stage(ps, x).sum())
    for part in ("forward", "recomputed", "backward"):
        names = {layer for layer in layers(grad, params(3), X, part=part) if layer}
        assert names == {f"stage/dense[{n}]" for n in range(3)}, part


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable], ids=["nothing", "dots"])
def test_a_checkpoint_in_a_checkpoint_has_one_row_a_layer(policy: Any) -> None:
    def stage(ps: Any, x: jax.Array) -> jax.Array:
        for p in ps:
            x = jax.checkpoint(dense, policy=policy)(p, x)
        return x

    def loss(ps: Any, x: jax.Array) -> jax.Array:
        for n in range(2):
            x = jax.checkpoint(stage)(ps[2 * n : 2 * n + 2], x)
        return x.sum()

    expected = {f"loss/stage[{n}]/dense[{k}]" for n in range(2) for k in range(2)}
    for part in ("forward", "recomputed", "backward"):
        assert layers(jax.grad(loss), params(4), X, part=part) - {"loss"} == expected, part


def test_a_checkpoint_in_the_body_of_a_scan_has_one_row() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, p: Any) -> Any:
            x = jax.checkpoint(dense)(p, x)
            return jax.checkpoint(dense)(p, x), None

        return jax.lax.scan(body, x, p)[0].sum()

    stacked = {"w": jnp.ones((3, 4, 4)), "b": jnp.ones((3, 4))}
    expected = {"loss/body/dense[0]", "loss/body/dense[1]"}
    for part in ("forward", "recomputed", "backward"):
        assert layers(jax.grad(loss), stacked, X, part=part) - {"loss"} == expected, part


def test_functions_called_at_several_places_are_numbered_where_no_scope_tells() -> None:
    def towers(p: Any, x: jax.Array) -> jax.Array:
        return dense(p, x) * dense(p, x + 1)

    def named_towers(p: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("left"):
            left = dense(p, x)
        with jax.named_scope("right"):
            return left * dense(p, x + 1)

    assert {"towers/dense[0]", "towers/dense[1]"} <= layers(towers, params(1)[0], X)
    assert layers(named_towers, params(1)[0], X) == {"left/dense", "right", "right/dense"}


def test_recomputed_equations_have_the_forward_layers() -> None:
    grad = jax.grad(looped(jax.checkpoint(block)))
    assert layers(grad, params(3), X, part="forward") == {"loss"} | numbered("block", 3) | DENSE
    assert layers(grad, params(3), X, part="recomputed") == DENSE
    assert layers(grad, params(3), X, part="backward") == {"loss"} | DENSE


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_nested_loops_have_two_numbers(wrap: Callable[..., Any]) -> None:
    grad = jax.grad(looped(wrap(heads)))
    expected = {f"loss/heads[{n}]/head[{k}]" for n in range(2) for k in range(2)}
    assert expected <= layers(grad, params(2), X, part="forward")
    assert layers(grad, params(2), X, part="backward") - {"loss", "loss/heads[0]", "loss/heads[1]"} == expected


def test_layers_of_each_stage_are_numbered_from_zero() -> None:
    def chain(ps: Any, x: jax.Array) -> jax.Array:
        for p in ps:
            x = dense(p, x)
        return x

    def loss(ps: Any, x: jax.Array) -> jax.Array:
        for n, stage in enumerate(ps):
            with ipu.stage(n):
                x = chain(stage, x)
        return x.sum()

    def in_one_function(ps: Any, x: jax.Array) -> jax.Array:
        for n, stage in enumerate(ps):
            with ipu.stage(n):
                for p in stage:
                    x = dense(p, x)
        return x.sum()

    stages = [params(2), params(3)]
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    for part in ("forward", "backward"):
        names = {f"loss/chain[{n}]/dense[{k}]" for n, k in pairs}
        assert {x for x in layers(jax.grad(loss), stages, X, part=part) if "dense" in x} == names, part
        names = {f"in_one_function/dense[{n}][{k}]" for n, k in pairs}
        assert {x for x in layers(jax.grad(in_one_function), stages, X, part=part) if "dense" in x} == names, part


def test_without_a_function_the_loop_is_numbered() -> None:
    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = x @ w
        return x.sum()

    expected = {"loss/loop[0]", "loss/loop[1]", "loss/loop[2]"}
    grad = jax.grad(loss)
    assert layers(grad, [jnp.ones((4, 4))] * 3, X, part="forward") == {"loss"} | expected
    assert layers(grad, [jnp.ones((4, 4))] * 3, X, part="backward") == {"loss"} | expected


def test_a_layer_that_does_more_belongs_to_its_own_iteration() -> None:
    def extra(x: jax.Array) -> jax.Array:
        return jnp.sin(x) * 2

    def loss(ps: list[dict[str, Any]], x: jax.Array) -> jax.Array:
        for n, p in enumerate(ps):
            x = extra(x) if n == 2 else x
            x = dense(p, x)
        return x.sum()

    for part in ("forward", "backward"):
        assert layers(jax.grad(loss), params(4), X, part=part) == {"loss", "loss/extra[2]"} | numbered("dense", 4)


def test_shared_weights_do_not_mix_layers() -> None:
    def loss(p: dict[str, Any], x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = dense(p, x)
        return x.sum()

    assert layers(jax.grad(loss), params(1)[0], X, part="backward") == {"loss"} | numbered("dense", 3)


def test_an_unknown_number_is_left_out() -> None:
    """Adding a bias leaves nothing that tells the iterations of its gradient apart."""
    assert "loss/loop" in layers(jax.grad(looped(lambda p, x: x + p["b"])), params(3), X, part="backward")


def test_a_gradient_by_custom_vjp_belongs_to_the_function() -> None:
    @jax.custom_vjp
    def act(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    def forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(x), x

    def backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
        return ((1 - jnp.tanh(x) ** 2) * g,)

    act.defvjp(forward, backward)
    grad = jax.grad(looped(lambda p, x: act(x @ p["w"])))
    for part in ("forward", "backward"):
        assert numbered("forward", 2) <= layers(grad, params(2), X, part=part)


def test_a_gradient_by_custom_vjp_without_forward_equations_belongs_to_the_layer_before() -> None:
    @jax.custom_vjp
    def same(x: jax.Array) -> jax.Array:
        return x

    same.defvjp(lambda x: (x, x), lambda x, g: (jnp.sin(jnp.cos(g)) * x,))

    def layer(w: jax.Array, x: jax.Array, is_odd: bool) -> jax.Array:
        x = jnp.tanh(x @ w)
        return same(x) if is_odd else x

    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for n, w in enumerate(ws):
            x = layer(w, x, n == 1)
        return x.sum()

    equations = named(jax.grad(loss), [jnp.ones((4, 4))] * 4, X)
    assert {x.layer for eqn, x in equations if eqn.primitive.name in ("sin", "cos")} == {"loss/layer[1]"}


def test_scopes_that_tell_layers_apart_need_no_number() -> None:
    def loss(ps: list[dict[str, Any]], x: jax.Array) -> jax.Array:
        for n, p in enumerate(ps):
            with jax.named_scope(f"block_{n}"):
                x = dense(p, x)
        return x.sum()

    for part in ("forward", "backward"):
        assert layers(jax.grad(loss), params(2), X, part=part) == {"loss", "block_0/dense", "block_1/dense"}


def attention(p: dict[str, Any], x: jax.Array) -> jax.Array:
    with jax.named_scope("qkv"):
        h = x @ p["w"]
    return jax.nn.softmax(h @ h.T) @ x


def test_a_function_beside_others_keeps_the_scopes_that_it_opens() -> None:
    def block(p: dict[str, Any], x: jax.Array) -> jax.Array:
        h = attention(p, x)
        with jax.named_scope("up"):
            return x + dense(p, h)

    def loss(p: dict[str, Any], x: jax.Array) -> jax.Array:
        return block(p, x).sum()

    rows = {"loss/block/attention/qkv", "loss/block/attention", "up", "up/dense", "loss"}
    assert layers(loss, params(1)[0], X) == rows
    for part in ("forward", "backward"):  # the gradient of the sum is that of the addition
        assert layers(jax.grad(loss), params(1)[0], X, part=part) >= rows - {"loss", "up"}


@pytest.mark.parametrize("opened", ["loss", "step"])
def test_functions_around_all_scopes_are_left_out(opened: str) -> None:
    def loss(p: dict[str, Any], x: jax.Array) -> jax.Array:
        with jax.named_scope("head"):
            h = x @ p["w"]
        return (h**2).sum()

    def step(p: dict[str, Any], x: jax.Array) -> jax.Array:
        return 1 + loss(p, x)

    assert "head" in layers({"loss": loss, "step": step}[opened], params(1)[0], X)


def test_numbers_are_among_scopes_where_the_function_is_called() -> None:
    def scoped(p: dict[str, Any], x: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            x = dense(p, x)
        with jax.named_scope("mlp"):
            return dense(p, x)

    def loss(ps: list[dict[str, Any]], x: jax.Array) -> jax.Array:
        with jax.named_scope("encoder"):
            for p in ps:
                x = scoped(p, x)
        return x.sum()

    expected = {f"encoder/scoped[{n}]/{name}/dense" for n in range(2) for name in ("attention", "mlp")}
    for part in ("forward", "backward"):
        assert layers(jax.grad(loss), params(2), X, part=part) == {"loss"} | expected


def test_layers_of_a_scan_are_one_row() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, p: (block(p, x), None), x, p)[0].sum()

    stacked = {"w": jnp.ones((3, 4, 4)), "b": jnp.ones((3, 4))}
    grad = jax.grad(loss)
    dense_layers = {"loss/block/dense[0]", "loss/block/dense[1]"}
    assert layers(grad, stacked, X, part="forward") == {"loss", "loss/block"} | dense_layers
    assert layers(grad, stacked, X, part="backward") == {"loss"} | dense_layers


def test_a_program_without_gradient_has_no_parts() -> None:
    assert {origin.part for _, origin in named(looped(block), params(2), X)} == {""}


def test_the_update_is_a_part() -> None:
    def step(ps: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda a, b: a - b, ps, jax.grad(looped(block))(ps, x))

    (update,) = {origin.layer for eqn, origin in named(step, params(2), X) if origin.part == "update"}
    assert update == "step"


@pytest.mark.parametrize("layer", [block, jax.jit(block)], ids=["plain", "jit"])
def test_callers_are_the_lines_around(layer: Callable[..., jax.Array]) -> None:
    products = [origin for eqn, origin in named(looped(layer), params(1), X) if eqn.primitive.name == "dot_general"]
    for origin in products:
        assert "(dense)" in origin.line
        assert [caller.partition(" ")[2] for caller in origin.callers[:2]] == ["(block)", "(loss)"]
        assert len(origin.callers) <= MAX_CALLERS


def test_callers_are_few() -> None:
    def deep(x: jax.Array, n: int) -> jax.Array:
        return deep(x, n - 1) if n else jnp.sin(x)

    (origin,) = {origin.callers for _, origin in named(lambda x: deep(x, 20), X)}
    assert len(origin) == MAX_CALLERS


def test_name_stacks_are_as_without_layers() -> None:
    jaxpr = jax.make_jaxpr(jax.grad(looped(jax.checkpoint(block))))(params(2), X)
    plain = inline(jaxpr)
    with_layers = inline_and_name(jaxpr)
    assert [name_stack(eqn) for eqn in plain.eqns] == [name_stack(eqn) for eqn in with_layers.eqns]
    assert str(plain) == str(with_layers)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["", "jit"])
def test_a_python_loop_in_the_body_of_a_scan_is_numbered(wrap: Callable[..., Any], jit: Callable[..., Any]) -> None:
    def loss(ps: Any, xs: jax.Array) -> jax.Array:
        def cell(carry: Any, x: jax.Array) -> Any:
            states = []
            for p, state in zip(ps, carry, strict=True):
                x = wrap(dense)(p, x + state)
                states.append(x)
            return states, x

        return (
            jit(jax.lax.scan, static_argnums=0)(cell, [jnp.zeros(4)] * 3, xs)[1].sum()
            if jit is jax.jit
            else (jax.lax.scan(cell, [jnp.zeros(4)] * 3, xs)[1].sum())
        )

    expected = {f"loss/cell/dense[{n}]" for n in range(3)}
    for part in ("forward", "backward"):
        actual = {layer for layer in layers(jax.grad(loss), params(3), X, part=part) if "dense" in layer}
        assert actual == expected, part


def test_a_python_loop_in_a_branch_is_numbered() -> None:
    def loss(ps: Any, x: jax.Array) -> jax.Array:
        def deep(x: jax.Array) -> jax.Array:
            for p in ps:
                x = dense(p, x)
            return x

        return jax.lax.cond(x[0, 0] > 0, deep, lambda x: x, x).sum()

    expected = {f"loss/deep/dense[{n}]" for n in range(3)}
    for part in ("forward", "backward"):
        actual = {layer for layer in layers(jax.grad(loss), params(3), X, part=part) if "dense" in layer}
        assert actual == expected, part
