"""Functions from the text of their StableHLO: numbers of `jax.jit`, and errors for other texts, never a crash."""

from __future__ import annotations

import dataclasses
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipujax.lowering.stored_modules import ModuleError, StoredModule, stored_module

X = jnp.arange(12.0).reshape(3, 4)


def function(x: jax.Array, n: jax.Array, unused: jax.Array) -> list[jax.Array]:
    y = jax.lax.fori_loop(0, n, lambda _, y: jnp.sin(y) + x[:1], x)
    return [y @ y.T, x.astype(jnp.bfloat16), y.sum() > 0, jax.random.uniform(jax.random.key(1), (2,))]


ARGS = (X, jnp.int32(3), jnp.ones(5))


@pytest.fixture(scope="module")
def module():
    return stored_module(function, "function", ARGS)


def test_numbers_are_those_of_jit(module):
    module.check()
    got, expected = (jax.jit(each)(*ARGS) for each in (module, function))
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in expected]
    assert all(map(np.array_equal, got, expected))
    inside = jax.jit(lambda x: module(x, *ARGS[1:])[0] + module(2 * x, *ARGS[1:])[0])(X)
    np.testing.assert_allclose(inside, function(X, *ARGS[1:])[0] + function(2 * X, *ARGS[1:])[0], rtol=1e-5)


@pytest.mark.parametrize("place", ["in_avals", "out_avals"])
def test_other_arguments_or_results_are_refused(module, place):
    avals = getattr(module, place)
    for other in (avals[1:], (*avals, avals[0]), (jax.ShapeDtypeStruct((9,), jnp.float32), *avals[1:])):
        with pytest.raises(ModuleError, match=r"its (arguments|results) are tensor"):
            dataclasses.replace(module, **{place: other}).check()


def test_brackets_in_texts_do_not_count(module):
    note = 'module attributes {jax.note = "' + "<" * 10_000 + '\\""} {'
    text = re.sub(r"module @\w+ (attributes \{[^\n]*\} )?\{", lambda _: note, module.text, count=1)
    dataclasses.replace(module, text=text).check()
    for opening in ("<" * 10_000, ">= " * 10_000 + "<" * 9_900):
        with pytest.raises(ModuleError, match="more than 500 brackets"):
            dataclasses.replace(module, text=module.text + opening).check()


MAIN = "func.func public @main(%a: tensor<2xf32>) -> tensor<2xf32> {{ {body} }} {rest}"


@pytest.mark.parametrize(
    ("body", "rest", "problem"),
    [
        ("return %a : tensor<2xf32>", "", ""),
        ("%b = func.call @main(%a) : (tensor<2xf32>) -> tensor<2xf32>\nreturn %b : tensor<2xf32>", "", "calls itself"),
        ("return %a : tensor<2xf32>", "func.func private @f(tensor<2xf32>) -> tensor<2xf32>", "f has no body"),
        ("return %a : tensor<2xf32>", "!t0 = tuple<f32, f32>", "names !t0"),
        ("return %a : tensor<2xf32>", '// "\n#x = ' + "[" * 9_000 + "1" + "]" * 9_000 + '\n// "', "brackets|names #x"),
        (
            '%b = "stablehlo.custom_call"(%a) {call_target_name = "xla_python_cpu_callback"} : (tensor<2xf32>) ->'
            " tensor<2xf32>\nreturn %b : tensor<2xf32>",
            "",
            "calls xla_python_cpu_callback",
        ),
        ('"scf.yield"() : () -> ()\nreturn %a : tensor<2xf32>', "", "scf"),
    ],
)
def test_modules_that_jax_does_not_write_are_refused(body, rest, problem):
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    module = StoredModule(MAIN.format(body=body, rest=rest), "f", (shape,), (shape,))
    if not problem:
        module.check()
    else:
        with pytest.raises(ModuleError, match=problem):
            module.check()


def test_random_changes_are_modules_or_errors(module):
    chance = random.Random(0)
    words = list(re.finditer(r"[\w.%@]+", module.text))
    refused = 0
    for _ in range(80):
        first, second = chance.choice(words), chance.choice(words)
        text = module.text[: first.start()] + second.group() + module.text[first.end() :]
        try:
            dataclasses.replace(module, text=text).check()
        except ModuleError:
            refused += 1
    assert refused > 50
