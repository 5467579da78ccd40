"""CPU time of calls of `ipu.jit` over that of `jax.jit` of one function, where little but the call takes time.

    python benchmarks/call_time.py
    python benchmarks/call_time.py --only nnx --rounds 41

Rows, each of medians of rounds that alternate within this process:
- a warm call, in microseconds more than `jax.jit` takes, of one array and of a tree of 100;
- `jit(f)(x)`, with `f` jitted anew each time, of one operation and of a chain of products;
- a call with `in_shardings=` and `out_shardings=` of None, over a call without them;
- the train step of a `flax.nnx.jit` model, with `jax.jit` replaced by `ipu.jit` when it is jitted, at three sizes;
- a call that shardings partition over a mesh without devices, over a call on one IPU: only shown.
Exits with 1 when a bar is missed. The call that CPU seconds are of includes what XLA's threads compute.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu

Call = Callable[[], Any]
DEVICE = ipu.IPUModel(num_ipus=4, tiles_per_ipu=64)
WARM_BAR_US = 1.0
ANEW_BAR = 2.0
UNSET_BAR = 1.1
NNX_BAR = 1.05


class Row(NamedTuple):
    """One comparison.

    Args:
        base: the call that the other is compared with.
        other: the other.
        bar: most of `other / base`, or of microseconds more than `base` if `is_difference`; None shows it only.
        is_difference: whether the bar is of a difference.
    """

    base: Call
    other: Call
    bar: float | None
    is_difference: bool = False


def chain(x: jax.Array) -> jax.Array:
    for _ in range(8):
        x = jnp.tanh(x @ x)
    return x


def warm(name: str) -> Row:
    """Calls of one array, or of a tree."""
    x: Any = jnp.ones(8) if name == "array" else {f"w{n}": jnp.ones(8) for n in range(100)}
    fun = lambda tree: jax.tree.map(lambda x: x + 1, tree)  # noqa: E731
    plain = jax.jit(fun)
    ours = ipu.jit(fun)
    return Row(lambda: plain(x), lambda: ours(x), WARM_BAR_US, is_difference=True)


def anew(name: str) -> Row:
    """Functions that are jitted at each call."""
    fun = jnp.tanh if name == "one operation" else chain
    x = jnp.eye(64)
    return Row(lambda: jax.jit(fun)(x), lambda: ipu.jit(fun)(x), ANEW_BAR)


def unset(name: str) -> Row:
    """Shardings of None, as `flax.nnx.jit` passes them."""
    del name
    p = {f"w{n}": jnp.zeros(8) for n in range(20)}
    x = jnp.ones(8)
    fun = lambda p, x: ({k: v + x for k, v in p.items()}, x)  # noqa: E731
    base = ipu.jit(fun)
    other = ipu.jit(fun, in_shardings=(None, None), out_shardings=(None, None))
    return Row(lambda: base(p, x), lambda: other(p, x), UNSET_BAR)


@contextmanager
def jit_replaced(jit: Any) -> Iterator[None]:
    """Put a function in the place of `jax.jit`."""
    original = jax.jit
    jax.jit = jit
    try:
        yield
    finally:
        jax.jit = original


def train_step(jit: Any, layers: int, width: int, batch: int) -> Call:
    """A train step of a network of `flax.nnx`."""
    rngs = nnx.Rngs(0)
    sizes = [width] * layers + [10]
    model = nnx.Sequential(*(nnx.Linear(*pair, rngs=rngs) for pair in itertools.pairwise(sizes)))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (batch, width))
    labels = jnp.zeros(batch, jnp.int32)

    def step(model: nnx.Sequential, optimizer: nnx.Optimizer, x: jax.Array, labels: jax.Array) -> jax.Array:
        def loss(model: nnx.Sequential) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(model(x)), labels).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    with jit_replaced(jit):
        jitted = nnx.jit(step)
    return lambda: jitted(model, optimizer, x, labels)


def nnx_step(name: str) -> Row:
    """Train steps of `flax.nnx.jit`."""
    sizes = {"small": (2, 32, 16), "middle": (4, 128, 64), "large": (4, 512, 128)}[name]
    return Row(train_step(jax.jit, *sizes), train_step(ipu.jit, *sizes), NNX_BAR)


def partitioned(name: str) -> Row:
    """A call that shardings partition."""
    del name
    mesh = ipu.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    w = {f"w{n}": jnp.ones((8, 8)) for n in range(4)}
    x = jnp.ones((16, 8))
    fun = lambda w, x: jax.tree.map(lambda v: v - 0.1 * (x @ v).mean(), w)  # noqa: E731
    base = ipu.jit(fun, device=ipu.IPUModel(tiles_per_ipu=64))
    other = ipu.jit(fun, device=DEVICE, in_shardings=shardings)
    return Row(lambda: base(w, x), lambda: other(w, x), None)


ROWS: Mapping[str, Callable[[], Row]] = {
    **{f"warm call, {name}": partial(warm, name) for name in ("array", "tree of 100")},
    **{f"jitted anew, {name}": partial(anew, name) for name in ("one operation", "chain")},
    "shardings of None": partial(unset, ""),
    **{f"nnx step, {name}": partial(nnx_step, name) for name in ("small", "middle", "large")},
    "partitioned call": partial(partitioned, ""),
}


def call_seconds(call: Call, count: int) -> float:
    """CPU seconds of a call, of several in a row."""
    start = time.process_time()
    for _ in range(count):
        results = call()
    jax.block_until_ready(results)
    return (time.process_time() - start) / count


def median_seconds(row: Row, rounds: int, round_seconds: float) -> tuple[float, float]:
    """Medians of both calls, in rounds in which each is first equally often."""
    calls = (row.base, row.other)
    for call in calls:
        call_seconds(call, 3)
    count = max(1, round(round_seconds / min(call_seconds(row.base, 3) for _ in range(3))))
    samples: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            samples[which].append(call_seconds(calls[which], count))
    return statistics.median(samples[0]), statistics.median(samples[1])


def main() -> int:
    """Print a row a comparison; return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", metavar="WORD", help="rows with this word; several times for several"
    )
    parser.add_argument("--rounds", type=int, default=21, help="of each row")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a round")
    chosen = parser.parse_args()
    are_met = []
    print(f"{'CPU of a call':<28}{'base µs':>10}{'other µs':>10}{'ratio':>8}{'more µs':>9}{'bar':>8}")
    for name, make in ROWS.items():
        if chosen.only and not any(word in name for word in chosen.only):
            continue
        row = make()
        base, other = median_seconds(row, chosen.rounds, chosen.seconds)
        more_us = 1e6 * (other - base)
        figure = more_us if row.is_difference else other / base
        are_met.append(row.bar is None or figure <= row.bar)
        bar = "" if row.bar is None else f"{row.bar:g}{' µs' if row.is_difference else ''}"
        verdict = "" if row.bar is None else "  ok" if are_met[-1] else "  MISSED"
        cells = f"{1e6 * base:>10.1f}{1e6 * other:>10.1f}{other / base:>8.2f}{more_us:>9.1f}{bar:>8}"
        print(f"{name:<28}{cells}{verdict}", flush=True)
    return int(not all(are_met))


if __name__ == "__main__":
    sys.exit(main())
