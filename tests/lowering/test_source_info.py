"""Lines and names of equations are the user's."""

from __future__ import annotations

import functools
import inspect
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from ipujax.lowering import source_info
from ipujax.lowering.source_info import jaxpr_file, name_stack, source_line, with_caller
from ipujax.runtime.errors import is_installed

X = jnp.ones(3)


def line_of(fun: Any, offset: int = 0) -> str:
    return f"test_source_info.py:{inspect.getsourcelines(fun)[1] + offset}"


class Layer:
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x)


def test_source_line_is_the_users() -> None:
    def inner(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    [eqn] = jax.make_jaxpr(inner)(X).eqns
    assert source_line(eqn) == f"{line_of(inner, 1)} (inner)"
    [eqn] = jax.make_jaxpr(Layer())(X).eqns
    assert source_line(eqn) == f"{line_of(Layer.__call__, 1)} (Layer.__call__)"
    [eqn] = jax.make_jaxpr(functools.partial(lambda s, x: x * s, 2.0))(X).eqns
    assert re.fullmatch(r"test_source_info\.py:\d+ \(<lambda>\)", source_line(eqn))


def test_source_line_of_a_library_is_that_of_its_call() -> None:
    def update(grads: jax.Array) -> Any:
        optimizer = optax.adam(1e-3)
        return optimizer.update(grads, optimizer.init(grads))

    lines = {source_line(eqn) for eqn in jax.make_jaxpr(update)(X).eqns}
    assert lines == {f"{line_of(update, 2)} (update)"}


def test_a_traced_library_has_no_line_of_the_user() -> None:
    for fun in (jnp.sin, jax.nn.softmax, optax.adam(0.1).init):
        assert {source_line(eqn) for eqn in jax.make_jaxpr(fun)(X).eqns} == {""}


@pytest.mark.parametrize(
    ("file", "installed"),
    [
        (__file__, False),
        (jax.__file__, True),
        (os.__file__, True),
        (source_info.__file__, True),
        ("/elsewhere/lib/site-packages/flax/nn.py", True),
        ("<string>", True),
        ("<stdin>", False),
        ("<ipython-input-3-ab>", False),
        ("<python-input-0>", False),
    ],
)
def test_is_installed(file: str, installed: bool) -> None:
    assert is_installed(file) == installed


def test_source_line_of_a_backward_equation_is_that_of_the_forward_one() -> None:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.sin(w).sum()

    eqns = jax.make_jaxpr(jax.grad(loss))(X).eqns
    backward = [eqn for eqn in eqns if "transpose(" in name_stack(eqn)]
    assert backward and {source_line(eqn) for eqn in eqns} == {f"{line_of(loss, 1)} (loss)"}


def test_name_stack_and_caller() -> None:
    def inner(x: jax.Array) -> jax.Array:
        with jax.named_scope("inner"):
            return jnp.sin(x)

    def outer(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jax.jit(inner)(x)

    [call] = jax.make_jaxpr(outer)(X).eqns
    [eqn] = call.params["jaxpr"].eqns
    assert name_stack(eqn) == "inner"
    for keep_line, line in ((True, line_of(inner, 2)), (False, line_of(outer, 2))):
        inlined = with_caller(eqn, call, keep_line=keep_line)
        assert name_stack(inlined) == "outer/inner" and source_line(inlined).startswith(f"{line} ")
    assert jaxpr_file(call.params["jaxpr"].jaxpr) == inspect.getsourcefile(inner)


def test_file_of_library_code() -> None:
    [call] = [eqn for eqn in jax.make_jaxpr(lambda x: jnp.where(x > 0, x, 0.0))(X).eqns if "jaxpr" in eqn.params]
    assert Path(jaxpr_file(call.params["jaxpr"].jaxpr)).is_relative_to(Path(jax.__file__).parent)
