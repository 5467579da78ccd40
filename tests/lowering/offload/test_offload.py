"""Pass `offload`: preserves results, moves values by loads and stores only, and reads none too late."""

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
from ipujax.lowering.offload import BATCH_BYTES, Offloading, offload
from ipujax.lowering.offload.offload import depth_first
from ipujax.lowering.offload.primitives import remote_rows_p, remote_update_p
from ipujax.lowering.passes import run_passes
from ipujax.lowering.passes.channel_groups import grouped_inputs
from ipujax.lowering.program_inputs import donated_aliases
from ipujax.lowering.replicas import unwrapped
from ipujax.lowering.source_info import source_line
from tests.lowering.offload.offloaded_functions import ALL, CASES, OPTIMIZERS, A, B, Case, training
from tests.lowering.random_programs import Program, programs
from tests.lowering.test_random_programs import EVERY

MOVES = {"remote_load": "l", "remote_rows": "r", "remote_store": "s", "remote_update": "u"}
OFFLOADED = {"state": (1,), "all": ALL}


class OffloadedProgram:
    """A function before and after the pass.

    Args:
        fun: the function.
        args: its arguments.
        offloaded: indices of the arguments in streaming memory; scalars of them are not.
        donated: indices of those that are donated.
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
        self.original = list(run_passes(traced).values())[-1]
        aliases = donated_aliases(unwrapped(traced), [number in donated for number, _ in leaves])
        inputs = tuple(number in offloaded and x.size > 1 for number, x in leaves)
        self.offloading = Offloading(inputs, aliases, batch_bytes=batch_bytes)
        self.offloaded = offload(self.original, self.offloading, grouped_inputs)

    @staticmethod
    def of(case: Case) -> OffloadedProgram:
        return OffloadedProgram(case.fun, case.args, case.offloaded, case.donated)

    @property
    def moves(self) -> list[str]:
        """Moves in order, with the index of the input: "l0" loads the first."""
        inputs = {var: number for number, var in enumerate(self.offloaded.jaxpr.invars)}
        moves = list[str]()
        for eqn in self.offloaded.jaxpr.eqns:
            if eqn.primitive.name in MOVES:
                moves.append(f"{MOVES[eqn.primitive.name]}{inputs[eqn.invars[0]]}")
                inputs.update(dict.fromkeys(eqn.outvars, inputs[eqn.invars[0]]))
            moves += [f"x{inputs[x]}" for x in streamed(eqn) if x in self.remote]
        return moves

    @property
    def remote(self) -> dict[Var, int]:
        """The inputs in streaming memory, with their indices."""
        inputs = zip(self.offloaded.jaxpr.invars, self.offloading.inputs, strict=True)
        return {var: number for number, (var, is_remote) in enumerate(inputs) if is_remote}

    def check(self) -> None:
        """Asserts that the results have the same bits, and that buffers are read and written correctly."""
        check_jaxpr(self.offloaded.jaxpr)
        for got, expected in zip(run(self.offloaded, self.leaves), run(self.original, self.leaves), strict=True):
            assert got.dtype == expected.dtype and got.tobytes() == expected.tobytes()
        self._check_buffers()

    def _check_buffers(self) -> None:
        """Asserts that loads alone read buffers, stores alone write them, and reads get the last write.

        Loops load rows of their stacks.
        """
        buffer_of = self.remote
        body = self.offloaded.jaxpr
        latest = {number: var for var, number in buffer_of.items()}
        for eqn in body.eqns:
            buffers_read = [buffer_of[x] for x in variables_read(eqn) if x in buffer_of]
            assert all(latest[buffer_of[x]] is x for x in variables_read(eqn) if x in buffer_of), eqn
            if buffers_read:
                remote_operands = eqn.invars[:1] if eqn.primitive.name in MOVES else streamed(eqn)
                assert buffers_read == [buffer_of[x] for x in remote_operands if x in buffer_of], eqn
            if eqn.primitive.name in ("remote_store", "remote_update"):
                buffer_of[eqn.outvars[0]] = buffers_read[0]
                latest[buffers_read[0]] = eqn.outvars[0]
        for result, alias in zip(body.outvars, self.offloading.aliases, strict=True):
            is_remote = alias is not None and self.offloading.inputs[alias]
            assert buffer_of.get(result) == (alias if is_remote else None)
            assert alias is None or not is_remote or latest[alias] is result


def streamed(eqn: JaxprEqn) -> list[Atom]:
    """Stacks that a loop reads row by row."""
    return eqn.invars[eqn.params["num_consts"] + eqn.params["num_carry"] :] if eqn.primitive.name == "scan" else []


def run(jaxpr: ClosedJaxpr, leaves: Sequence[Any]) -> list[np.ndarray]:
    """The results, evaluated equation by equation."""

    def equation(eqn: Any, operands: list[Any]) -> list[Any]:
        return list(eval_equation(eqn, *operands))

    with jax.disable_jit():
        return [np.asarray(x) for x in eval_jaxpr(jaxpr, list(leaves), equation, jax.numpy.asarray)]


@pytest.mark.parametrize("name", CASES)
def test_small_functions(name: str) -> None:
    program = OffloadedProgram.of(CASES[name])
    program.check()
    assert " ".join(program.moves) == CASES[name].moves


@pytest.mark.parametrize(("name", "kind"), [*product(OPTIMIZERS, OFFLOADED)])
def test_optimizer_steps(name: str, kind: str) -> None:
    """Donated arguments are replaced; all are loaded at least once."""
    fun, args = training(name)
    for donated in (ALL, ()):
        program = OffloadedProgram(fun, args, OFFLOADED[kind], donated)
        program.check()
        remote = {n for n, is_remote in enumerate(program.offloading.inputs) if is_remote}
        assert {move for move in program.moves if move[0] == "l"} == {f"l{n}" for n in remote}
        stored = [move for move in program.moves if move[0] != "l"]
        assert sorted(stored) == sorted(f"s{n}" for n in remote if donated)


@seed(1)
@settings(EVERY, max_examples=2)
@given(programs(3, 6))
def test_random_programs(program: Program) -> None:
    """Arguments come back updated, exchanged for one another, and unchanged."""
    args = [jax.numpy.asarray(x) for x in program.arguments()]

    def fun(*args: Any) -> Any:
        results = program(*args)
        grads = program.gradient(*args) if program.differentiable else args
        changed = [x - g if g.dtype == x.dtype else -x for x, g in zip(args, grads, strict=True)]
        return changed[program.seed % 2 :], results, args

    OffloadedProgram(fun, args, range(0, len(args), 1 + program.seed % 3), range(len(args))).check()


def test_preserves_programs_without_offloaded_arguments() -> None:
    fun, args = training("adam")
    program = OffloadedProgram(fun, args, (), ALL)
    assert program.offloaded is program.original


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool"])
def test_rows_beyond_a_buffer_read_zeros_and_drop_writes(dtype: str) -> None:
    table = jnp.asarray(A.astype(dtype))
    rows = np.array([2, -1, 7, 6], np.int32)
    (loaded,) = remote_rows_p.bind(table, rows)
    zeros = np.zeros(3, dtype)
    np.testing.assert_array_equal(loaded, [table[2], zeros, zeros, table[6]])
    (updated,) = remote_update_p.bind(table, rows, np.ones((4, 3), dtype))
    np.testing.assert_array_equal(updated, table.at[jnp.array([2, 6])].set(np.ones(3, dtype)))


@pytest.mark.parametrize("name", ["momentum", "adam", "clipped adamw", "lamb"])
def test_updates_one_parameter_after_the_other(name: str) -> None:
    """If the state of one fills a batch, that of the next is loaded after its update."""
    fun, args = training(name)
    state = [n for n, x in enumerate(jax.tree.leaves(args)) if x.size > 1][len(args[0]) : -1]
    states_of_parameters = [state[n :: len(args[0])] for n in range(len(args[0]))]
    program = OffloadedProgram(fun, args, (1,), ALL, len(states_of_parameters[0]) * args[0][0].nbytes)
    program.check()
    assert program.moves == [f"{direction}{n}" for states in states_of_parameters for direction in "ls" for n in states]


def test_reorders_updates_with_sums_over_replicas() -> None:
    def step(ws: list[jax.Array], ms: list[jax.Array], x: jax.Array) -> Any:
        grads = jax.grad(lambda ws: jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]).sum())(ws)
        ms = [0.9 * m + g for m, g in zip(ms, lax.psum(grads, "replica"), strict=True)]
        return [w - m for w, m in zip(ws, ms, strict=True)], ms

    square = jnp.ones((3, 3))
    traced = jax.make_jaxpr(step, axis_env=[("replica", 2)])([square] * 2, [square] * 2, square).jaxpr
    traced_order, new_order = (
        [
            next(n for n, eqn in enumerate(eqns) if traced.outvars[0] in eqn.outvars),
            next(n for n, eqn in enumerate(eqns) if traced.invars[3] in eqn.invars),
        ]
        for eqns in (traced.eqns, depth_first(traced.eqns, traced.outvars))
    )
    assert traced_order[0] > traced_order[1] and new_order[0] < new_order[1]


@pytest.mark.parametrize(("max_bytes", "batch_sizes"), [(1, [1] * 4), (84, [1] * 4), (168, [2] * 2), (1 << 20, [4])])
def test_bounds_batches(max_bytes: int, batch_sizes: list[int]) -> None:
    """Four arguments of 84 bytes, each doubled."""
    all_arguments = tuple(range(4))
    program = OffloadedProgram(lambda *args: [x * 2 for x in args], [A] * 4, all_arguments, all_arguments, max_bytes)
    program.check()
    runs = [(direction, len(list(run))) for direction, run in groupby(program.moves, key=lambda move: move[0])]
    assert runs == [(direction, count) for count in batch_sizes for direction in "ls"]


@pytest.mark.parametrize(("between", "loads"), [(0, 1), (3, 1), (4, 2), (6, 2)])
def test_reloads_values_not_used_recently(between: int, loads: int) -> None:
    """An argument is used, then others one by one, then the first again."""

    def fun(first: jax.Array, *others: jax.Array) -> jax.Array:
        total = lax.cumsum(first)
        for other in others:
            total = lax.cumsum(total * other)
        return lax.cumsum(total * first)

    program = OffloadedProgram(fun, [A] * (1 + between), range(1 + between), ())
    program.check()
    assert program.moves.count("l0") == loads and len(program.moves) == loads + between


def test_preserves_the_order_of_prints(capfd: pytest.CaptureFixture[str]) -> None:
    def fun(weights: Any, state: Any, x: jax.Array) -> Any:
        new_weights, state, value = step(weights, state, x)
        for n, w in enumerate(new_weights):
            jax.debug.print("w{} {}", n, w[0, 0])
        jax.debug.print("loss {}", value)
        return new_weights, state, value

    step, args = training("adam")
    program = OffloadedProgram(fun, args, ALL, ALL)
    printed = []
    for jaxpr in (program.original, program.offloaded):
        run(jaxpr, program.leaves)
        jax.effects_barrier()
        printed.append(capfd.readouterr().out)
    assert printed[0] == printed[1] and [line[:2] for line in printed[0].split("\n")] == ["w0", "w1", "w2", "lo", ""]


def test_gives_loads_and_stores_the_line_of_their_user() -> None:
    def fun(a: jax.Array, b: jax.Array) -> Any:
        c = jnp.sin(a)
        d = a.T @ b
        return c, d

    program = OffloadedProgram(fun, (A, B), ALL, ALL)
    lines = [source_line(eqn) for eqn in program.offloaded.jaxpr.eqns]
    start = fun.__code__.co_firstlineno
    names = [eqn.primitive.name for eqn in program.offloaded.jaxpr.eqns]
    lines_of = {name: [line for line, other in zip(lines, names, strict=True) if other == name] for name in names}
    assert [f":{start + n} " in line for n, line in zip((1, 2), lines_of["remote_load"], strict=True)] == [True, True]
    assert f":{start + 1} " in lines_of["remote_store"][0]


def test_loads_have_the_layout_of_arguments_on_chip() -> None:
    """Operands of products, and values combined with them, in groups of columns."""
    fun, args = training("adam")
    program = OffloadedProgram(fun, args, (0, 1, 2), ())
    on_chip = dict(zip(program.original.jaxpr.invars, grouped_inputs(program.original.jaxpr), strict=True))
    loads = [eqn for eqn in program.offloaded.jaxpr.eqns if eqn.primitive.name == "remote_load"]
    assert all(eqn.params["in_groups"] == on_chip[eqn.invars[0]] for eqn in loads)
    assert [eqn.params["in_groups"] for eqn in loads] == [True] * len(loads)
    (load,) = (
        e for e in OffloadedProgram.of(CASES["replaced"]).offloaded.jaxpr.eqns if e.primitive.name == "remote_load"
    )
    assert not load.params["in_groups"]
