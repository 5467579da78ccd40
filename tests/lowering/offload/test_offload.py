"""Pass `offload`: the numbers stay, only loads and stores touch streaming memory, and nothing is read too late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, seed, settings
from jax import lax

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var, check_jaxpr, eval_equation, eval_jaxpr
from ipujax.lowering.jaxpr import variables_read
from ipujax.lowering.lower import donated_aliases
from ipujax.lowering.offload import BATCH_BYTES, Offloading, offload, remote_rows_p, remote_update_p
from ipujax.lowering.offload.depth_first import depth_first
from ipujax.lowering.passes import run_passes
from ipujax.lowering.passes.channel_groups import grouped_inputs
from ipujax.lowering.replicas import unwrapped
from ipujax.lowering.source_info import source_line
from tests.lowering.offload.offloaded_functions import ALL, CASES, OPTIMIZERS, A, B, Case, training
from tests.lowering.random_programs import Program, programs
from tests.lowering.test_random_programs import EVERY
from tests.marks import slow_but

MOVES = {"remote_load": "l", "remote_rows": "r", "remote_store": "s", "remote_update": "u"}
WHERE = {"state": (1,), "all": ALL}


class Passed:
    """A function before and behind the pass.

    Args:
        fun: the function.
        args: its arguments.
        offloaded: numbers of the arguments that lie in streaming memory; scalars of them do not.
        donated: numbers of those that are donated.
        batch_bytes: of a batch of loads, or of stores.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        offloaded: Sequence[int],
        donated: Sequence[int],
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        leaves = [(number, x) for number, arg in enumerate(args) for x in jax.tree.leaves(arg)]
        traced = jax.make_jaxpr(fun)(*args)
        self.leaves = [x for _, x in leaves]
        self.before = list(run_passes(traced).values())[-1]
        aliases = donated_aliases(unwrapped(traced), [number in donated for number, _ in leaves])
        inputs = tuple(number in offloaded and x.size > 1 for number, x in leaves)
        self.places = Offloading(inputs, aliases, batch_bytes=batch_bytes)
        self.after = offload(self.before, self.places, grouped_inputs)

    @staticmethod
    def of(case: Case) -> Passed:
        return Passed(case.fun, case.args, case.offloaded, case.donated)

    @property
    def moves(self) -> list[str]:
        """What moves of which input, in order: "l0" loads the first."""
        inputs = {var: number for number, var in enumerate(self.after.jaxpr.invars)}
        found = list[str]()
        for eqn in self.after.jaxpr.eqns:
            if eqn.primitive.name in MOVES:
                found.append(f"{MOVES[eqn.primitive.name]}{inputs[eqn.invars[0]]}")
                inputs.update(dict.fromkeys(eqn.outvars, inputs[eqn.invars[0]]))
            found += [f"x{inputs[x]}" for x in streamed(eqn) if x in self.remote]
        return found

    @property
    def remote(self) -> dict[Var, int]:
        """The inputs that lie in streaming memory, with their numbers."""
        inputs = zip(self.after.jaxpr.invars, self.places.inputs, strict=True)
        return {var: number for number, (var, is_there) in enumerate(inputs) if is_there}

    def check(self) -> None:
        """Asserts that the results have the same bits, and that buffers are read and written as they may be."""
        check_jaxpr(self.after.jaxpr)
        for got, want in zip(run(self.after, self.leaves), run(self.before, self.leaves), strict=True):
            assert got.dtype == want.dtype and got.tobytes() == want.tobytes()
        self._check_buffers()

    def _check_buffers(self) -> None:
        """What lies in streaming memory is read by loads and written by stores alone, and read as it was written last.

        Loops load the rows that they go along.
        """
        held, body = self.remote, self.after.jaxpr
        latest = {number: var for var, number in held.items()}
        for eqn in body.eqns:
            read = [held[x] for x in variables_read(eqn) if x in held]
            assert all(latest[held[x]] is x for x in variables_read(eqn) if x in held), eqn
            if read:
                own = eqn.invars[:1] if eqn.primitive.name in MOVES else streamed(eqn)
                assert read == [held[x] for x in own if x in held], eqn
            if eqn.primitive.name in ("remote_store", "remote_update"):
                held[eqn.outvars[0]] = read[0]
                latest[read[0]] = eqn.outvars[0]
        for result, alias in zip(body.outvars, self.places.aliases, strict=True):
            is_there = alias is not None and self.places.inputs[alias]
            assert held.get(result) == (alias if is_there else None)
            assert alias is None or not is_there or latest[alias] is result


def streamed(eqn: JaxprEqn) -> list[Atom]:
    """What a loop goes along, row by row."""
    return eqn.invars[eqn.params["num_consts"] + eqn.params["num_carry"] :] if eqn.primitive.name == "scan" else []


def run(jaxpr: ClosedJaxpr, leaves: Sequence[Any]) -> list[np.ndarray]:
    """The results, one equation after the other."""

    def equation(eqn: Any, operands: list[Any]) -> list[Any]:
        return list(eval_equation(eqn, *operands))

    with jax.disable_jit():
        return [np.asarray(x) for x in eval_jaxpr(jaxpr, list(leaves), equation, jax.numpy.asarray)]


# --- numbers and buffers ----------------------------------------------------------------------------------------------


# Dtypes of which there is another.
LIKE_OTHERS = {"look up, half", "look up, integers", "look up, unsigned", "update, integers", "look up, booleans"}


@pytest.mark.parametrize("name", slow_but(CASES.keys() - LIKE_OTHERS, CASES))
def test_small_functions(name: str) -> None:
    passed = Passed.of(CASES[name])
    passed.check()
    assert " ".join(passed.moves) == CASES[name].moves


LONG = {("momentum", "state"), ("lamb", "state"), ("if finite", "state")}


@pytest.mark.parametrize(("name", "where"), slow_but({*product(OPTIMIZERS, WHERE)} - LONG, product(OPTIMIZERS, WHERE)))
def test_optimizer_steps(name: str, where: str) -> None:
    """What is donated is replaced; all is loaded at least once."""
    fun, args = training(name)
    for donated in (ALL, ()):
        passed = Passed(fun, args, WHERE[where], donated)
        passed.check()
        there = {n for n, is_there in enumerate(passed.places.inputs) if is_there}
        assert {move for move in passed.moves if move[0] == "l"} == {f"l{n}" for n in there}
        stored = [move for move in passed.moves if move[0] != "l"]
        assert sorted(stored) == sorted(f"s{n}" for n in there if donated)


@seed(1)
@settings(EVERY, max_examples=2)
@given(programs(3, 6))
def test_random_programs(program: Program) -> None:
    """Arguments come back changed, for one another, and as they are."""
    args = [jax.numpy.asarray(x) for x in program.arguments()]

    def fun(*args: Any) -> Any:
        made = program(*args)
        grads = program.gradient(*args) if program.differentiable else args
        changed = [x - g if g.dtype == x.dtype else -x for x, g in zip(args, grads, strict=True)]
        return changed[program.seed % 2 :], made, args

    Passed(fun, args, range(0, len(args), 1 + program.seed % 3), range(len(args))).check()


def test_without_offloaded_arguments_nothing_changes() -> None:
    fun, args = training("adam")
    passed = Passed(fun, args, (), ALL)
    assert passed.after is passed.before


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool"])
def test_rows_beyond_a_buffer_are_zeros_and_are_lost(dtype: str) -> None:
    table, rows = A.astype(dtype), np.array([2, -1, 7, 6], np.int32)
    (found,) = remote_rows_p.bind(table, rows)
    zeros = np.zeros(3, dtype)
    np.testing.assert_array_equal(found, [table[2], zeros, zeros, table[6]])
    (updated,) = remote_update_p.bind(table, rows, np.ones((4, 3), dtype))
    np.testing.assert_array_equal(updated, table.at[jnp.array([2, 6])].set(np.ones(3, dtype)))


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["momentum", "adam", "clipped adamw", "lamb"])
def test_one_parameter_is_updated_after_the_other(name: str) -> None:
    """Where the state of one fills a batch, that of the next is loaded when the update has ended."""
    fun, args = training(name)
    state = [n for n, x in enumerate(jax.tree.leaves(args)) if x.size > 1][len(args[0]) : -1]
    of_each = [state[n :: len(args[0])] for n in range(len(args[0]))]
    passed = Passed(fun, args, (1,), ALL, len(of_each[0]) * args[0][0].nbytes)
    passed.check()
    assert passed.moves == [f"{way}{n}" for own in of_each for way in "ls" for n in own]


def test_sums_over_replicas_do_not_keep_the_order_of_updates() -> None:
    def step(ws: list[jax.Array], ms: list[jax.Array], x: jax.Array) -> Any:
        grads = jax.grad(lambda ws: jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]).sum())(ws)
        ms = [0.9 * m + g for m, g in zip(ms, lax.psum(grads, "replica"), strict=True)]
        return [w - m for w, m in zip(ws, ms, strict=True)], ms

    square = jnp.ones((3, 3))
    traced = jax.make_jaxpr(step, axis_env=[("replica", 2)])([square] * 2, [square] * 2, square).jaxpr
    traced_order, own_order = (
        [
            next(n for n, eqn in enumerate(eqns) if traced.outvars[0] in eqn.outvars),
            next(n for n, eqn in enumerate(eqns) if traced.invars[3] in eqn.invars),
        ]
        for eqns in (traced.eqns, depth_first(traced.eqns, traced.outvars))
    )
    assert traced_order[0] > traced_order[1] and own_order[0] < own_order[1]


@pytest.mark.parametrize(("most_bytes", "together"), [(1, [1] * 4), (84, [1] * 4), (168, [2] * 2), (1 << 20, [4])])
def test_batches_are_bounded(most_bytes: int, together: list[int]) -> None:
    """Four arguments of 84 bytes, each doubled."""
    every = tuple(range(4))
    passed = Passed(lambda *args: [x * 2 for x in args], [A] * 4, every, every, most_bytes)
    passed.check()
    runs = [(way, len(list(run))) for way, run in groupby(passed.moves, key=lambda move: move[0])]
    assert runs == [(way, count) for count in together for way in "ls"]


@pytest.mark.parametrize(("between", "loads"), [(0, 1), (3, 1), (4, 2), (6, 2)])
def test_what_was_used_long_ago_is_loaded_anew(between: int, loads: int) -> None:
    """An argument that is used, then others one by one, then the first again."""

    def fun(first: jax.Array, *others: jax.Array) -> jax.Array:
        total = lax.cumsum(first)
        for other in others:
            total = lax.cumsum(total * other)
        return lax.cumsum(total * first)

    passed = Passed(fun, [A] * (1 + between), range(1 + between), ())
    passed.check()
    assert passed.moves.count("l0") == loads and len(passed.moves) == loads + between


def test_what_is_printed_keeps_its_order(capfd: pytest.CaptureFixture[str]) -> None:
    def fun(weights: Any, state: Any, x: jax.Array) -> Any:
        new, state, value = step(weights, state, x)
        for n, w in enumerate(new):
            jax.debug.print("w{} {}", n, w[0, 0])
        jax.debug.print("loss {}", value)
        return new, state, value

    step, args = training("adam")
    passed = Passed(fun, args, ALL, ALL)
    printed = []
    for jaxpr in (passed.before, passed.after):
        run(jaxpr, passed.leaves)
        jax.effects_barrier()
        printed.append(capfd.readouterr().out)
    assert printed[0] == printed[1] and [line[:2] for line in printed[0].split("\n")] == ["w0", "w1", "w2", "lo", ""]


# --- loads ------------------------------------------------------------------------------------------------------------


def test_loads_and_stores_belong_to_the_line_that_needs_them() -> None:
    def fun(a: jax.Array, b: jax.Array) -> Any:
        c = jnp.sin(a)
        d = a.T @ b
        return c, d

    passed = Passed(fun, (A, B), ALL, ALL)
    lines = [source_line(eqn) for eqn in passed.after.jaxpr.eqns]
    start = fun.__code__.co_firstlineno
    names = [eqn.primitive.name for eqn in passed.after.jaxpr.eqns]
    of = {name: [line for line, own in zip(lines, names, strict=True) if own == name] for name in names}
    assert [f":{start + n} " in line for n, line in zip((1, 2), of["remote_load"], strict=True)] == [True, True]
    assert f":{start + 1} " in of["remote_store"][0]


def test_loads_are_laid_out_as_arguments_on_chip_are() -> None:
    """Operands of products, and what is combined with them, in groups of columns."""
    fun, args = training("adam")
    passed = Passed(fun, args, (0, 1, 2), ())
    on_chip = dict(zip(passed.before.jaxpr.invars, grouped_inputs(passed.before.jaxpr), strict=True))
    loads = [eqn for eqn in passed.after.jaxpr.eqns if eqn.primitive.name == "remote_load"]
    assert all(eqn.params["in_groups"] == on_chip[eqn.invars[0]] for eqn in loads)
    assert [eqn.params["in_groups"] for eqn in loads] == [True] * len(loads)
    (load,) = (e for e in Passed.of(CASES["replaced"]).after.jaxpr.eqns if e.primitive.name == "remote_load")
    assert not load.params["in_groups"]
