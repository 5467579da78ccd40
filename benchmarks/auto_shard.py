"""Plans of `ipu.auto_shard` against all assignments of the mesh's axis to the arguments of a GPT block.

    python benchmarks/auto_shard.py
    python benchmarks/auto_shard.py --ipus 8 --case step --tiles 64

A case is a block, its training step, or a block whose arguments are larger than one IPU. Each of the 324 assignments is
compiled: the axis splits one dimension of each of five arguments, or none. A row is one number of IPUs and one case:
cycles of the plan and of the best assignment, their ratio, how many assignments fit, the programs that the search
estimated, and its CPU seconds. Exits with 1 where a plan is more than 5 % slower, or does not fit though one does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu

HEADS = 8
AT_MOST = 1.05  # cycles of a plan, of those of the best assignment


def block(qkv: Any, out: Any, up: Any, down: Any, x: Any) -> Any:
    """Attention of `HEADS` heads and a feed-forward layer, each with a residual; x is [batch, sequence, features]."""
    batch, length, width = x.shape
    heads = (x @ qkv).reshape(batch, length, 3, HEADS, width // HEADS)
    q, k, v = (heads[:, :, n] for n in range(3))
    weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k) * (width // HEADS) ** -0.5)
    h = x + jnp.einsum("bhst,bthe->bshe", weights, v).reshape(x.shape) @ out
    return h + jax.nn.gelu(h @ up) @ down


def step(qkv: Any, out: Any, up: Any, down: Any, x: Any) -> Any:
    """Parameters after one step of gradient descent."""
    params = qkv, out, up, down
    grads = jax.grad(lambda params: (block(*params, x) ** 2).mean())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def shapes(width: int, batch: int, length: int) -> list[jax.ShapeDtypeStruct]:
    """Arguments of a block."""
    sizes = (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width), (batch, length, width)
    return [jax.ShapeDtypeStruct(s, np.float32) for s in sizes]


def cases(tiles: int) -> dict[str, tuple[Any, list[jax.ShapeDtypeStruct], int]]:
    """Function, arguments and tiles of each IPU, by name."""
    return {
        "block": (block, shapes(128, 8, 64), tiles),
        "step": (step, shapes(128, 8, 64), tiles),
        # 3.1 MB of parameters, on IPUs of 2.5 MB.
        "large": (block, shapes(256, 8, 16), 4),
    }


def assignments(args: Sequence[jax.ShapeDtypeStruct], num_ipus: int) -> Iterator[tuple[P, ...]]:
    """Specs of all arguments: the axis splits one dimension of each, or none."""
    options = [
        [P(), *(P(*[None] * d, "x") for d, size in enumerate(arg.shape) if size % num_ipus == 0)] for arg in args
    ]
    yield from product(*options)


def cycles_of(fun: Any, args: Sequence[Any], specs: Sequence[P], mesh: Any, device: Any) -> float:
    """Cycles of an assignment; infinite if it does not fit."""
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    try:
        return ipu.jit(fun, device=device, in_shardings=shardings).lower(*args).compile().profile.cycles
    except ipu.TileMemoryError:
        return inf


def compared(name: str, num_ipus: int, tiles: int) -> bool:
    """Prints the row of one case; True if the plan is as good as it must be."""
    fun, args, tiles = cases(tiles)[name]
    mesh = ipu.make_mesh((num_ipus,), ("x",), axis_types=(AxisType.Auto,))
    device = ipu.IPUModel(num_ipus=num_ipus, tiles_per_ipu=tiles)
    start = time.process_time()
    plans = ipu.auto_shard(fun, mesh, args, device=device)
    seconds = time.process_time() - start
    plan = next((row.cycles for row in plans if row.fits), inf)
    cycles_by_specs = {specs: cycles_of(fun, args, specs, mesh, device) for specs in assignments(args, num_ipus)}
    specs, best = min(cycles_by_specs.items(), key=lambda item: item[1])
    fitting = sum(cycles < inf for cycles in cycles_by_specs.values())
    print(
        f"{num_ipus} IPUs {name:6} {plan:12,} {best:12,} {plan / best:7.3f} {fitting:4} of {len(cycles_by_specs)} fit"
        f" {plans.num_estimated:5} estimated {seconds:6.1f} CPU s"
    )
    print(f"  plan {plans.rows[0].code}\n  best {specs}", flush=True)
    return plan <= AT_MOST * best


def main() -> int:
    """Compares the plans of the cases that the command line chooses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ipus", type=int, action="append", help="of the mesh; 4 and 8")
    parser.add_argument("--case", action="append", choices=cases(1), help="several times for several; all")
    parser.add_argument("--tiles", type=int, default=1472, help="of an IPU")
    args = parser.parse_args()
    rows = product(args.ipus or (4, 8), args.case or cases(1))
    return int(not all([compared(name, num_ipus, args.tiles) for num_ipus, name in rows]))


if __name__ == "__main__":
    sys.exit(main())
