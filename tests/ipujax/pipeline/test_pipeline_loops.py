"""Pipelines as XLA compiles them: no iteration touches more than one slot of a stash.

The time of a step then does not depend on how many micro-batches are kept (`benchmarks/pipeline_depth.py` measures it).
"""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.runtime.graph.program import Call
from ipujax.runtime.graph.walks import distinct

ROWS = 3
WIDTH = 20
MICRO_BATCHES = 64
IN_PLACE = {"parameter", "dynamic-update-slice", "bitcast"}  # what a fusion that updates a buffer in place consists of
HANDS_ON = {"get-tuple-element", "tuple", "parameter", "while", "call"}  # what makes no array itself
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([\w-]+)\((.*)$", re.MULTILINE)


def loops(text: str, elements: int) -> tuple[Counter[str], Counter[str]]:
    """Operations on large arrays in the bodies of all loops of a compiled module and in the functions that they call.

    Returns:
        Counts of operations that update them in place, and of those that make a whole one anew.
    """
    computations = {match[1]: match[0] for match in re.finditer(r"^%(\S+) \(.*?^}", text, re.MULTILINE | re.DOTALL)}
    updates = Counter[str]()
    full = Counter[str]()
    recorded = set[str]()
    todo = re.findall(r"while\(.*body=%([\w.-]+)", text)
    while todo:
        name = todo.pop()
        if name in recorded:
            continue
        recorded.add(name)
        todo += re.findall(r" call\(.*to_apply=%([\w.-]+)", computations[name])
        for operation, rest in large(computations[name], elements):
            fused = re.search(r"calls=%([\w.-]+)", rest)
            parts = {name for name, _ in large(computations[fused[1]], elements)} if fused else {operation}
            if operation not in HANDS_ON:
                (updates if "dynamic-update-slice" in parts <= IN_PLACE else full)[operation] += 1
    return updates, full


def large(computation: str, elements: int) -> list[tuple[str, str]]:
    """The operations with large results, and the text behind their names."""
    actual = INSTRUCTION.findall(computation)
    return [(name, rest) for result, name, rest in actual if max(sizes(result), default=0) >= elements]


def sizes(result: str) -> list[int]:
    """Elements of the arrays of a result type."""
    return [prod(int(n) for n in shape.split(",") if n) for shape in re.findall(r"\w+\[([\d,]*)\]", result)]


def loss(params: Any, batch: Any) -> jax.Array:
    x = batch
    for number in range(2):
        with ipu.stage(number):
            x = jnp.tanh(x @ params[number])
    return jnp.mean(x**2)


@pytest.mark.parametrize(("schedule", "keeps_all"), [("gpipe", True), ("1f1b", False)])
def test_an_iteration_updates_one_slot_of_a_stash(schedule: str, keeps_all: bool) -> None:
    params = [np.ones((WIDTH, WIDTH), np.float32)] * 2
    batch = np.ones((ROWS * MICRO_BATCHES, WIDTH), np.float32)
    run = ipu.pipeline(jax.value_and_grad(loss), micro_batches=MICRO_BATCHES, schedule=schedule)
    lowered = ipu.jit(run, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=4)).lower(params, batch)
    text = jax.jit(lowered.evaluate).lower(*params, batch).compile().as_text()
    updates, full = loops(text, ROWS * WIDTH * MICRO_BATCHES)
    assert not full
    assert bool(updates) == keeps_all


def test_a_part_is_compiled_once() -> None:
    """The calls of ramp-up, steady state and ramp-down call the same functions in the module that XLA compiles."""
    params = [np.ones((WIDTH, WIDTH), np.float32)] * 2
    batch = np.ones((ROWS * MICRO_BATCHES, WIDTH), np.float32)
    run = ipu.pipeline(jax.value_and_grad(loss), micro_batches=MICRO_BATCHES)
    lowered = ipu.jit(run, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=4)).lower(params, batch)
    text = jax.jit(lowered.evaluate).lower(*params, batch).as_text()
    called = Counter(re.findall(r"call @(\w+)\(.*inlineable", text))
    children = (child for node in distinct(lowered.program) for child in node.children())
    calls = Counter(child.function for child in children if isinstance(child, Call))
    assert called.total() == sum(times for times in calls.values() if times > 1)
    assert len(called) < called.total() / 2  # not one for each: JAX drops what the last call of a part need not give


def test_loops_that_copy_are_found() -> None:
    """A buffer that passes through a branch is copied in each iteration, one that is written outside is not."""

    def through(buffer: jax.Array, i: jax.Array) -> jax.Array:
        return lax.cond(i % 3 == 0, lambda b: b.at[i].set(1), lambda b: b.at[0].set(2), buffer)

    def outside(buffer: jax.Array, i: jax.Array) -> jax.Array:
        return buffer.at[i].set(lax.cond(i % 3 == 0, lambda: jnp.sin(i * 1.0), lambda: 2.0))

    def anew(buffer: jax.Array, i: jax.Array) -> jax.Array:
        return buffer.at[i].set(1) * 0.5

    for step, copies in ((through, True), (outside, False), (anew, True)):
        loop = jax.jit(lambda b, step=step: lax.scan(lambda b, i: (step(b, i), None), b, jnp.arange(64))[0])
        updates, full = loops(loop.lower(jnp.zeros((64, 20))).compile().as_text(), 64 * 20)
        assert bool(full) == copies, step.__name__
        assert copies or updates
