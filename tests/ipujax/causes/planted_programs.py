"""Programs with a planted cause of cycles, each beside the same work without it, and programs without one.

`python -m tests.ipujax.causes.planted_programs [name…]` prints what the first sentence names, and the gain that the
cause promises beside the gain of the compiled remedy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ipujax as ipu
from ipujax.runtime.views import verdict

TILES = 64
MACHINE = partial(ipu.IPUModel, arch="mk2", tiles_per_ipu=TILES)
Cycles = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Planted:
    """A program with a planted cause.

    Args:
        cause: name of the cause, or its beginning.
        profile: makes its profile.
        remedied_cycles: cycles of the same work without the cause; None where no program does the same work.
    """

    cause: str
    profile: Callable[[], ipu.Profile]
    remedied_cycles: Cycles | None = None


def array(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def profile(fun: Callable[..., Any], *args: Any, num_ipus: int = 1, **settings: Any) -> ipu.Profile:
    return ipu.jit(fun, device=MACHINE(num_ipus), **settings).profile(*args)


def cycles(fun: Callable[..., Any], *args: Any, calls: float = 1, **settings: Any) -> Cycles:
    """Return a function that compiles the remedied program: `calls` of it do the same work."""
    return lambda: calls * profile(fun, *args, **settings).cycles


def planted(cause: str, fun: Callable[..., Any], *args: Any, remedy: Cycles | None = None, **settings: Any) -> Planted:
    return Planted(cause, partial(profile, fun, *args, **settings), remedy)


# --- state that is not donated, transfers of the host -----------------------------------------------------------------


def layers(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def activations(ws: Any, x: Any) -> Any:
    results = [x]
    for w in ws:
        results.append(layers([w], results[-1]))
    return ws, results


def last_activation(ws: Any, x: Any) -> Any:
    return ws, x, layers(ws, x).mean()


def sgd(ws: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(lambda ws: (layers(ws, x) ** 2).mean())(ws)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value


def momentum(state: Any, x: Any) -> Any:
    ws, moments = state
    grads = jax.grad(lambda ws: (layers(ws, x) ** 2).mean())(ws)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda w, m: w - 0.1 * m, ws, moments), moments


def decode(caches: Any, token: Any, place: Any) -> Any:
    caches = lax.dynamic_update_slice(caches, token[None], (place, 0))
    return caches, jax.nn.softmax(caches @ token)


def many_steps(ws: Any, xs: Any) -> Any:
    return lax.scan(lambda ws, x: (sgd(ws, x)[0], None), ws, xs)[0]


WIDE = [array(256, 256)] * 3
SMALL_BATCH = array(4, 256)
STATE = "state that is not donated"
HOST = "other transfers of the host"

# --- single tiles, dtypes, fallbacks, rows ----------------------------------------------------------------------------


def schedule(x: Any, step: Any) -> Any:
    rate = step
    for _ in range(30):
        rate = lax.optimization_barrier(jnp.sin(rate) * 1.5)
    return x * rate, step + 1


def inverses_in_turn(xs: Any) -> Any:
    return lax.map(jnp.linalg.inv, xs)


def normalised(x: Any, w: Any) -> Any:
    for _ in range(3):
        x = jax.nn.softmax(x * w, axis=-1) * w
    return x


def wave(x: Any) -> Any:
    return jnp.sin(x) * x + jnp.cos(x)


# --- supersteps, exchange, tiles --------------------------------------------------------------------------------------


def by_row(x: Any) -> Any:
    return lax.map(jnp.tanh, x)


def chain(x: Any) -> Any:
    for _ in range(100):
        x = lax.optimization_barrier(x * 1.1)
    return x


def fused_chain(x: Any) -> Any:
    for _ in range(100):
        x = x * 1.1
    return x


def recurrent(w: Any, xs: Any) -> Any:
    return lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros_like(xs[0]), xs)[0]


def turned(x: Any) -> Any:
    for _ in range(8):
        x = lax.optimization_barrier(x.T + x)
    return x


# --- several IPUs -----------------------------------------------------------------------------------------------------


def two_stages(first: int, ws: Any, x: Any) -> Any:
    with ipu.stage(0):
        x = layers(ws[:first], x)
    with ipu.stage(1):
        return (layers(ws[first:], x) ** 2).mean()


def pipelined(first: int, micro_batches: int, ws: Any, x: Any) -> Any:
    fun = ipu.pipeline(jax.value_and_grad(partial(two_stages, first)), micro_batches=micro_batches)
    value, grads = fun(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value


def in_turn(ws: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(partial(two_stages, 3))(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value


def handed_on(times: int, x: Any) -> Any:
    for n in range(times):
        with ipu.stage(n):
            x = lax.optimization_barrier(x * 1.5)
    return x


def sums_of_each(ws: Any, xs: Any) -> Any:
    def step(ws: Any, x: Any) -> Any:
        grads = lax.pmean(jax.grad(lambda ws: (layers(ws, x) ** 2).mean())(ws), "replica")
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), None

    return lax.scan(step, ws, xs)[0]


def one_sum(ws: Any, xs: Any) -> Any:
    def step(sums: Any, x: Any) -> Any:
        grads = jax.grad(lambda ws: (layers(ws, x) ** 2).mean())(ws)
        return jax.tree.map(jnp.add, sums, grads), None

    sums = lax.scan(step, jax.tree.map(jnp.zeros_like, ws), xs)[0]
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, lax.pmean(sums, "replica"))


@cache
def mesh() -> jax.sharding.Mesh:
    return ipu.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))


def sharded(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh(), PartitionSpec(*spec)))


def on_mesh() -> ipu.Profile:
    ws = [sharded((256, 256), "model", None)] * 6
    return profile(lambda ws, x: (layers(ws, x), ws), ws, sharded((8, 256)), num_ipus=4, donate_argnums=(0, 1))


def poplar_profile(num_tiles: int, size: int = 1 << 12) -> ipu.Profile:
    """Return the profile of a Poplar program that squares a vector on some tiles."""
    from ipujax import poplar, popops

    graph = poplar.Graph(MACHINE(1).target)
    program = poplar.program.Sequence()
    x = graph.add_variable(poplar.FLOAT, [size], "x")
    elements = size // num_tiles
    for tile in range(num_tiles):
        graph.set_tile_mapping(x[tile * elements : (tile + 1) * elements], tile)
    for _ in range(4):
        popops.mul_in_place(graph, x, x, program, "square")
    return poplar.Engine(graph, program).profile


TWO_IPUS: dict[str, Any] = {"num_ipus": 2, "donate_argnums": 0}
MANY = array(32 * 1024, 256)
SIX = [array(256, 256)] * 6
BATCH = array(2048, 256)

PLANTED: Mapping[str, Planted] = {
    "training step": planted(
        STATE, sgd, WIDE, array(32, 256), remedy=cycles(sgd, WIDE, array(32, 256), donate_argnums=0)
    ),
    "optimiser": planted(
        STATE,
        momentum,
        (WIDE, WIDE),
        array(32, 256),
        remedy=cycles(momentum, (WIDE, WIDE), array(32, 256), donate_argnums=0),
    ),
    "cache of keys": planted(
        STATE,
        decode,
        *(array(512, 256), array(256), array(dtype=np.int32)),
        remedy=cycles(decode, array(512, 256), array(256), array(dtype=np.int32), donate_argnums=0),
    ),
    "small batch": planted(
        HOST, layers, WIDE, SMALL_BATCH, remedy=cycles(layers, WIDE, array(256, 256), calls=4 / 256)
    ),
    "one step a call": planted(
        HOST,
        *(sgd, [array(32, 32)] * 2, array(8, 32)),
        donate_argnums=0,
        remedy=cycles(many_steps, [array(32, 32)] * 2, array(64, 8, 32), calls=1 / 64, donate_argnums=0),
    ),
    "all activations returned": planted(
        HOST,
        *(activations, WIDE, array(512, 256)),
        donate_argnums=(0, 1),
        remedy=cycles(last_activation, WIDE, array(512, 256), donate_argnums=(0, 1)),
    ),
    "weights in streaming memory": planted(
        "streaming memory",
        *(sgd, [array(512, 512)] * 2, array(8, 512)),
        donate_argnums=0,
        offload_argnums=0,
        remedy=cycles(sgd, [array(512, 512)] * 2, array(8, 512), donate_argnums=0),
    ),
    "decomposition": planted("operations without a parallel rule", jnp.linalg.svd, array(24, 24)),
    "inverses in turn": planted(
        "operations without a parallel rule",
        *(inverses_in_turn, array(32, 32, 32)),
        donate_argnums=0,
        remedy=cycles(jnp.linalg.inv, array(32, 32, 32), donate_argnums=0),
    ),
    "learning rate": planted(
        "steps on a single tile",
        *(schedule, array(1 << 12), array()),
        donate_argnums=(0, 1),
        remedy=cycles(lambda x, rate: (x * rate, rate + 1), array(1 << 12), array(), donate_argnums=(0, 1)),
    ),
    "Poplar on tile 0": Planted(
        "steps on a single tile", lambda: poplar_profile(1), lambda: poplar_profile(TILES).cycles
    ),
    "Poplar on four tiles": Planted(
        "unequal work of tiles", lambda: poplar_profile(4), lambda: poplar_profile(TILES).cycles
    ),
    "brain floats": planted(
        "emulated dtypes",
        *(wave, array(1 << 15, dtype=jnp.bfloat16)),
        donate_argnums=0,
        remedy=cycles(wave, array(1 << 15, dtype=np.float16), donate_argnums=0),
    ),
    "odd rows": planted(
        "slow paths of odd rows",
        *(normalised, array(256, 197), array(197)),
        donate_argnums=(0, 1),
        remedy=cycles(normalised, array(256, 200), array(200), donate_argnums=(0, 1)),
    ),
    "chain of small steps": planted(
        "sync", chain, array(64), donate_argnums=0, remedy=cycles(fused_chain, array(64), donate_argnums=0)
    ),
    "row by row": planted(
        "sync", by_row, array(128, 64), donate_argnums=0, remedy=cycles(jnp.tanh, array(128, 64), donate_argnums=0)
    ),
    # Its exchange is shorter than its computing: named, without a promise, as that of neighbours is.
    "transposes": planted("exchange", turned, array(512, 512), donate_argnums=0),
    "unequal stages": planted(
        "unequal work of IPUs",
        *(partial(pipelined, 1, 16), SIX, BATCH),
        num_ipus=2,
        donate_argnums=0,
        remedy=cycles(partial(pipelined, 3, 16), SIX, BATCH, num_ipus=2, donate_argnums=0),
    ),
    "few micro-batches": planted(
        "IPUs that wait",
        *(partial(pipelined, 3, 2), SIX, BATCH),
        num_ipus=2,
        donate_argnums=0,
        remedy=cycles(
            partial(pipelined, 3, 32), SIX, array(32 * 1024, 256), calls=1 / 16, num_ipus=2, donate_argnums=0
        ),
    ),
    "stages in turn": planted(
        "IPUs that wait",
        *(in_turn, SIX, array(1024, 256)),
        num_ipus=2,
        donate_argnums=0,
        remedy=cycles(partial(pipelined, 3, 32), SIX, MANY, calls=1 / 32, **TWO_IPUS),
    ),
    "much handed on": planted(
        "exchange between IPUs", partial(handed_on, 4), array(1 << 18), num_ipus=4, donate_argnums=0
    ),
    "sum of each batch": planted(
        "collectives",
        *(sums_of_each, [array(128, 128)] * 2, array(8, 4, 128)),
        num_ipus=4,
        replicas=4,
        donate_argnums=0,
        remedy=cycles(one_sum, [array(128, 128)] * 2, array(8, 4, 128), num_ipus=4, replicas=4, donate_argnums=0),
    ),
    "mesh of small shards": Planted("collectives", on_mesh),
}


def normalised_rows(x: Any) -> Any:
    return (x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-5)


def convolved(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")), w


def multiplied(a: Any, b: Any) -> Any:
    return a @ b, b


def trained_on_kept_batch(ws: Any, x: Any) -> Any:
    return sgd(ws, x)[0], x


def with_noise(key: Any, x: Any) -> Any:
    return key, x + jax.random.normal(key, x.shape)


def looked_up(table: Any, indices: Any, _: Any) -> Any:
    return table, indices, table[indices].sum(1)


def repeated(x: Any) -> Any:
    return lax.fori_loop(0, 20, lambda _, x: jnp.sin(x) * 0.5 + x, x)


def resident(fun: Callable[..., Any], *args: Any, **settings: Any) -> Callable[[], ipu.Profile]:
    """Return a function that makes the profile of a program whose arguments all stay on the device."""
    return lambda: profile(fun, *args, donate_argnums=tuple(range(len(args))), **settings)


ROWS = array(2048, 512)
# Without a planted cause.
PLAIN: Mapping[str, Callable[[], ipu.Profile]] = {
    "product": resident(multiplied, array(512, 512), array(512, 512)),
    "elementwise": resident(jax.nn.gelu, array(1 << 18)),
    "softmax": resident(jax.nn.softmax, ROWS),
    "normalisation": resident(normalised_rows, ROWS),
    "convolution": resident(convolved, array(16, 32, 32, 64), array(3, 3, 64, 64)),
    "training": resident(trained_on_kept_batch, [array(512, 512)] * 2, array(1024, 512)),
    "half precision": resident(jax.nn.gelu, array(1 << 19, dtype=np.float16)),
    "sums of rows": resident(lambda x: x * x.sum(1, keepdims=True), array(4096, 512)),
    "Poplar on all tiles": lambda: poplar_profile(TILES, 1 << 20),
    "random numbers": lambda: resident(with_noise, jax.random.key(0), array(1 << 18))(),
    "whole numbers": resident(lambda x: (x * 3 + 7) ^ (x >> 3), array(1 << 18, dtype=np.int32)),
    "look-ups": resident(looked_up, array(4096, 128), array(1024, 16, dtype=np.int32), array(1024, 128)),
    "loop of updates": resident(repeated, array(1 << 18)),
}


def main(names: list[str], programs: Mapping[str, Planted], plain: Mapping[str, Callable[[], ipu.Profile]]) -> None:
    for name, each in programs.items():
        start = time.process_time()
        if names and name not in names:
            continue
        figures = each.profile()
        result = verdict(figures)
        gain = promised_gain(figures, each.cause)
        line = f"{name}: {result.sentence}\n    {figures.cycles:,} cycles, planted {each.cause}: promises {gain:,}"
        if each.remedied_cycles is not None:
            saved = figures.cycles - each.remedied_cycles()
            line += f", its remedy saves {saved:,.0f}: {gain / saved:.2f}"
        is_named = result.sentence.lower().startswith(each.cause.lower())
        print("ok  " if is_named else "MISS", line, f"{time.process_time() - start:.1f} s", flush=True)
    for name, make in plain.items():
        if not names or name in names:
            result = verdict(make())
            print("MISS" if result.causes else "ok  ", f"{name}: {result.sentence}")


def promised_gain(figures: ipu.Profile, name: str) -> int:
    """Return the cycles that a remedy against a cause saves at most, by the beginning of its name."""
    result = verdict(figures)
    gains = {cause.name: gain for cause, gain in zip(result.causes, result.gains, strict=True)}
    return max((gain for cause, gain in gains.items() if cause.lower().startswith(name.lower())), default=0)


def check_planted(program: Planted) -> None:
    """Check that the first sentence names the planted cause, and that its promise is what the remedy saves."""
    figures = program.profile()
    assert verdict(figures).sentence.lower().startswith(program.cause.lower())
    if program.remedied_cycles is not None:
        saved = figures.cycles - program.remedied_cycles()
        assert abs(promised_gain(figures, program.cause) - saved) <= 0.3 * saved


if __name__ == "__main__":
    main(sys.argv[1:], PLANTED, PLAIN)
