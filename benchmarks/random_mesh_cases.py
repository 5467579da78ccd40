"""Random programs over meshes for `benchmarks/random_mesh_programs.py`: steps, and what they compute.

A program changes two values: `x`, another block on each IPU, and `u`, equal along some axes of the mesh. In an
*automatic* program they are whole arrays, and steps state shardings; in a *manual* one they are the blocks of
`jax.shard_map`, and steps are collectives. Loops and branches decide by a number that is equal along some axes of the
mesh; the collectives inside are over these alone, so that every IPU that takes part in one reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

ROWS = 8  # of a block of x; every size of an axis divides them
WIDTH = 4
_MOST_ITERATIONS = 4
_DEPTH = 2  # of control flow inside of control flow
_DECAY = 0.7  # of the values of an iteration, so that loops converge
Axes = tuple[str, ...]
State = tuple[jax.Array, jax.Array]  # x, u


@dataclass(frozen=True)
class Step:
    """One step of a program.

    Args:
        op: name of its operation.
        number: a number from 0 to 1 for its choices.
        axes: axes of its collective, or along which its decision is equal.
        reads_u: whether its decision is by u, which is equal along `axes` already.
        bodies: steps of a loop, or of each branch.
    """

    op: str
    number: float
    axes: Axes = ()
    reads_u: bool = False
    bodies: tuple[tuple[Step, ...], ...] = ()

    def walk(self) -> Iterator[Step]:
        """Yield the step, and those inside of it."""
        yield self
        for body in self.bodies:
            for step in body:
                yield from step.walk()


@dataclass(frozen=True)
class World:
    """Meshes and values that steps are computed on.

    Args:
        axes: axes of the mesh.
        mesh: the mesh of the shardings of automatic steps; None without shardings.
        is_manual: whether values are the blocks of `jax.shard_map`.
        has_gradient: whether no gradient may pass through a loop whose trip count is data.
    """

    axes: Axes
    mesh: AbstractMesh | None
    is_manual: bool
    has_gradient: bool


class Drawing:
    """Draws steps at random.

    Args:
        rng: the source of choices.
        axes: axes of the mesh.
        is_manual: whether steps are manual.
    """

    def __init__(self, rng: np.random.Generator, axes: Axes, is_manual: bool) -> None:
        self._rng = rng
        self._axes = axes
        self._is_manual = is_manual

    def steps(self, count: int, allowed: Axes, equal: Axes, depth: int = 0) -> tuple[tuple[Step, ...], Axes]:
        """Draw steps that all IPUs along `allowed` reach.

        Args:
            count: number of steps.
            allowed: axes over which collectives may be.
            equal: axes along which u is equal.
            depth: control flow around the steps.

        Returns:
            The steps, and the axes along which u is equal after them.
        """
        drawn: list[Step] = []
        for _ in range(count):
            step, equal = self._step(allowed, equal, depth)
            drawn.append(step)
        return tuple(drawn), equal

    def _step(self, allowed: Axes, equal: Axes, depth: int) -> tuple[Step, Axes]:
        number = float(self._rng.uniform())
        if depth < _DEPTH and self._rng.uniform() < (0.6 if depth == 0 else 0.3):
            return self._control(number, allowed, equal, depth)
        if self._is_manual:
            collectives = list(_COLLECTIVES) if allowed else []
            op = str(self._rng.choice([*_LOCAL, "index", *collectives]))
            return Step(op, number, self._some(allowed, 1) if op in collectives else self._some(self._axes, 1)), equal
        op = str(self._rng.choice([*_LOCAL, *_WHOLE]))
        return Step(op, number, self._some(self._axes, 0)), equal

    def _control(self, number: float, allowed: Axes, equal: Axes, depth: int) -> tuple[Step, Axes]:
        # In a body u stays as equal as it is at the start, so that the next iteration begins alike.
        stable = equal if depth else ()
        free = [axis for axis in self._axes if axis not in stable]
        op = str(self._rng.choice(sorted(_CONTROL if self._is_manual and free else _CONTROL - {"index_switch"})))
        reads_u = False
        if op in ("scan", "fori"):  # of constant length: all IPUs agree
            axes = tuple(self._axes)
        elif op == "index_switch":
            other = str(self._rng.choice(free))
            axes = tuple(axis for axis in self._axes if axis != other)
        else:
            reads_u = bool(self._rng.uniform() < 0.4)
            axes = equal if reads_u else tuple(dict.fromkeys((*self._some(allowed, 0), *stable)))
        inside = tuple(axis for axis in axes if axis in allowed)
        # What is written under a decision is equal along the axes along which the decision is.
        equal = tuple(axis for axis in equal if axis in axes)
        num_bodies = {"cond": 2, "switch": 3, "index_switch": 2}.get(op, 1)
        bodies = []
        for _ in range(num_bodies):
            body, _ = self.steps(int(self._rng.integers(1, 3)), inside, equal, depth + 1)
            bodies.append(body)
        return Step(op, number, axes, reads_u, tuple(bodies)), equal

    def _some(self, axes: Axes, fewest: int) -> Axes:
        """Some of the axes, in random order."""
        count = int(self._rng.integers(min(fewest, len(axes)), len(axes) + 1))
        return tuple(map(str, self._rng.permutation(axes)[:count])) if count else ()


def run(steps: tuple[Step, ...], state: State, world: World) -> State:
    """Compute steps."""
    for step in steps:
        compute = _CONTROL_FLOW.get(step.op)
        state = _compute(step, state, world) if compute is None else compute(step, state, world)
    return state


def _compute(step: Step, state: State, world: World) -> State:
    if step.op in _LOCAL:
        return _LOCAL[step.op](step, *state)
    return (_MANUAL if world.is_manual else _WHOLE)[step.op](step, *state, world)


# --- decisions ---


def _decider(step: Step, state: State, world: World) -> jax.Array:
    """The number that decides, equal along the axes of the step."""
    x, u = state
    if not world.is_manual or step.reads_u:
        number = jnp.abs(u).max() if step.reads_u else jnp.abs(x).max()
        return lax.stop_gradient(number)
    block_max = lax.stop_gradient(jnp.abs(x).max())
    if not step.axes:
        return block_max
    forms = (
        lambda: lax.pmax(block_max, step.axes),
        lambda: lax.pmin(block_max, step.axes),
        lambda: lax.pmean(block_max, step.axes),
        lambda: _gathered(block_max, step.axes).max(),
    )
    return forms[int(step.number * 97) % len(forms)]()


def _cases(step: Step, state: State, world: World, count: int) -> jax.Array:
    return (_decider(step, state, world) * 7.3).astype(jnp.int32) % count


def _while(step: Step, state: State, world: World) -> State:
    threshold = 0.2 + step.number

    def condition(carry: tuple[jax.Array, State]) -> jax.Array:
        return (carry[0] < _MOST_ITERATIONS) & (_decider(step, carry[1], world) > threshold)

    def body(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        return carry[0] + 1, _decayed(run(step.bodies[0], carry[1], world))

    return _ungraded(lambda s: lax.while_loop(condition, body, (jnp.int32(0), s))[1], state, world)


def _dynamic_fori(step: Step, state: State, world: World) -> State:
    last = _cases(step, state, world, 4)

    def body(_: Any, inner: State) -> State:
        return _decayed(run(step.bodies[0], inner, world))

    return _ungraded(lambda s: lax.fori_loop(0, last, body, s), state, world)


def _ungraded(fun: Callable[[State], State], state: State, world: World) -> State:
    """A function of the state; in programs with a gradient it is added as a constant."""
    if not world.has_gradient:
        return fun(state)
    x, u = fun(lax.stop_gradient(state))
    return state[0] + lax.stop_gradient(x), state[1] + lax.stop_gradient(u)


def _fori(step: Step, state: State, world: World) -> State:
    return lax.fori_loop(0, 2, lambda _, inner: _decayed(run(step.bodies[0], inner, world)), state)


def _scan(step: Step, state: State, world: World) -> State:
    def body(inner: State, factor: jax.Array) -> tuple[State, jax.Array]:
        x, u = run(step.bodies[0], inner, world)
        return _decayed((x * factor, u)), u.sum(0)

    (x, u), sums = lax.scan(body, state, jnp.asarray([1.0, -0.5, 0.8], jnp.float32))
    return x, u + 0.1 * sums.mean(0)


def _cond(step: Step, state: State, world: World) -> State:
    decision = _decider(step, state, world) > 0.4 + step.number
    return lax.cond(decision, *(lambda s, body=body: run(body, s, world) for body in step.bodies), state)


def _switch(step: Step, state: State, world: World) -> State:
    branches = [lambda s, body=body: run(body, s, world) for body in step.bodies]
    return lax.switch(_cases(step, state, world, len(branches)), branches, state)


def _index_switch(step: Step, state: State, world: World) -> State:
    (other,) = set(world.axes) - set(step.axes)
    branches = [lambda s, body=body: run(body, s, world) for body in step.bodies]
    return lax.switch((lax.axis_index(other) + int(step.number * 2)) % len(branches), branches, state)


def _decayed(state: State) -> State:
    return _DECAY * state[0], _DECAY * state[1]


# --- operations ---


def _whole_spec(step: Step, rank: int) -> P:
    """Spec that splits dimensions over the axes of a step."""
    dims: list[Axes] = [() for _ in range(rank)]
    for number, axis in enumerate(step.axes):
        dim = (int(step.number * 31) + number) % rank
        dims[dim] = (*dims[dim], axis)
    return P(*(dim or None for dim in dims))


def _constrained(value: jax.Array, step: Step, world: World) -> jax.Array:
    if world.mesh is None:
        return value
    return lax.with_sharding_constraint(value, NamedSharding(world.mesh, _whole_spec(step, value.ndim)))


def _ring(x: jax.Array, axis: str) -> jax.Array:
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(rank, (rank + 1) % size) for rank in range(size)])


def _gathered(x: jax.Array, axes: Axes) -> jax.Array:
    rows = x[None]
    for axis in axes:
        rows = lax.all_gather(rows, axis, tiled=True)
    return rows


def _mixed(x: jax.Array, other: jax.Array) -> jax.Array:
    return 0.6 * x + 0.4 * other


_MATRIX = np.random.default_rng(7).uniform(-0.5, 0.5, (WIDTH, WIDTH)).astype(np.float32)
# Of both forms; results of u depend on u alone.
_LOCAL: dict[str, Callable[..., State]] = {
    "wave": lambda step, x, u: (jnp.sin(2 * x + step.number), u),
    "wave of u": lambda step, x, u: (x, jnp.cos(1.5 * u + step.number)),
    "product": lambda step, x, u: (jnp.tanh(x @ _MATRIX) + 0.1, u),
    "add u": lambda step, x, u: (0.5 * x + u, u),
    "sort": lambda step, x, u: (jnp.sort(x, axis=int(step.number * 2)), u),
}
_WHOLE: dict[str, Callable[..., State]] = {
    "split x": lambda step, x, u, world: (_constrained(x, step, world), u),
    "split u": lambda step, x, u, world: (x, _constrained(u, step, world)),
    "center": lambda step, x, u, world: (x - x.mean(int(step.number * 2), keepdims=True), u),
    "roll": lambda step, x, u, world: (jnp.roll(x, 1, int(step.number * 2)), u),
    "rows": lambda step, x, u, world: (_mixed(x, jnp.cumsum(x, 0) / x.shape[0]), u),
}
_COLLECTIVES: dict[str, Callable[..., State]] = {
    "pmean": lambda step, x, u, world: (_mixed(x, lax.pmean(x, step.axes)), u),
    "pmax": lambda step, x, u, world: (_mixed(x, lax.stop_gradient(lax.pmax(lax.stop_gradient(x), step.axes))), u),
    "psum of u": lambda step, x, u, world: (x, 0.3 * lax.psum(u, step.axes)),
    "gather": lambda step, x, u, world: (_mixed(x, _gathered(x, step.axes).mean(0)), u),
    "permute": lambda step, x, u, world: (_mixed(x, _ring(x, step.axes[0])), u),
    "exchange": lambda step, x, u, world: (lax.all_to_all(x, step.axes[0], 0, 0, tiled=True), u),
    "scatter": lambda step, x, u, world: (
        _mixed(x, 0.3 * lax.all_gather(lax.psum_scatter(x, step.axes[0], tiled=True), step.axes[0], tiled=True)),
        u,
    ),
}
_MANUAL: dict[str, Callable[..., State]] = {
    **_COLLECTIVES,
    "index": lambda step, x, u, world: (x + 0.1 * lax.axis_index(step.axes).astype(x.dtype), u),
}
_CONTROL_FLOW: dict[str, Callable[[Step, State, World], State]] = {
    "while": _while,
    "fori": _fori,
    "dynamic fori": _dynamic_fori,
    "scan": _scan,
    "cond": _cond,
    "switch": _switch,
    "index_switch": _index_switch,
}
_CONTROL = set(_CONTROL_FLOW)
