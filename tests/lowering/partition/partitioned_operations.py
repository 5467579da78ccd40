"""All rows of the op table with random shardings: a script that prints, as JSON, the fault of each row that has one.

Of each row the jaxpr after the pass `partition`, evaluated by plain JAX on as many devices as its random mesh has, is
compared with `jax.jit` on one device: numbers, dtypes and shapes. An axis of a mesh divides a dimension of an operand.
A process of its own runs it: how many devices JAX has on a CPU is settled when it starts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from ipujax.lowering.jax_compat import jaxpr_as_fun
from ipujax.lowering.partition import Shardings, partition
from ipujax.lowering.passes.inline import inline
from tests.lowering.rules.op_case import OpCase
from tests.lowering.rules.op_table import CASES

MOST_DEVICES = 36
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)
RTOL = {2: 2e-3, 4: 2e-4}  # by bytes of an element: sums over devices are in another order
ATOL = {2: 1e-3, 4: 1e-4}


def mesh_for(leaves: Sequence[Any], rng: np.random.Generator) -> Mesh | None:
    """A mesh of one or two axes, each of a size that divides a dimension; None if no dimension can be divided."""
    sizes = sorted({p for x in leaves for n in np.shape(x) for p in PRIMES if n and n % p == 0})
    if not sizes:
        return None
    drawn = rng.choice(sizes, size=int(rng.integers(1, 3)))
    shape = drawn if drawn.prod() <= MOST_DEVICES else drawn[:1]
    names = ("rows", "columns")[: len(shape)]
    devices = np.array(jax.devices()[: shape.prod()]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def sharding_of(x: Any, mesh: Mesh, rng: np.random.Generator) -> NamedSharding | None:
    """A random sharding of an operand; None for keys."""
    if jax.dtypes.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key):
        return None
    extents = list(np.shape(x))
    dims: list[tuple[str, ...]] = [() for _ in extents]
    for name, size in mesh.shape.items():
        divisible = [d for d, n in enumerate(extents) if n and n % size == 0]
        if divisible and rng.random() < 0.8:
            d = int(rng.choice(divisible))
            extents[d] //= size
            dims[d] = (*dims[d], name)
    return NamedSharding(mesh, P(*(axes or None for axes in dims)))


def compare(result: Any, want: Any, case: OpCase) -> None:
    assert (result.shape, result.dtype) == (want.shape, want.dtype)
    if jax.dtypes.issubdtype(want.dtype, jax.dtypes.prng_key):
        result, want = jax.random.key_data(result), jax.random.key_data(want)
    width = min(max(want.dtype.itemsize, 2), 4)
    wide = np.complex128 if np.iscomplexobj(want) else np.float64
    np.testing.assert_allclose(
        np.asarray(result).astype(wide),
        np.asarray(want).astype(wide),
        rtol=max(case.rtol, RTOL[width]),
        atol=max(case.atol, ATOL[width]),
    )


def check(case: OpCase, rng: np.random.Generator) -> None:
    leaves, tree = jax.tree.flatten([make(rng) for make in case.specs])
    mesh = mesh_for(leaves, rng)
    if mesh is None:
        return
    shardings = tuple(sharding_of(x, mesh, rng) for x in leaves)

    def fun(*flat: Any) -> Any:
        return case.fun(*jax.tree.unflatten(tree, flat))

    reference = jax.tree.leaves(jax.jit(fun)(*leaves))
    after = partition(inline(jax.jit(fun).trace(*leaves).jaxpr), Shardings(shardings))
    with jax.set_mesh(mesh):
        pairs = zip(leaves, shardings, strict=True)
        arrays = [x if sharding is None else jax.device_put(x, sharding) for x, sharding in pairs]
        results = jax.jit(jaxpr_as_fun(after))(*arrays)
    for result, want in zip(results, reference, strict=True):
        compare(result, want, case)


def faults(seed: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, case in enumerate(CASES):
        try:
            check(case, np.random.default_rng((seed, number)))
        except Exception as error:  # of any type: the test shows it
            found[f"{case.primitive}: {case.name}"] = f"{type(error).__name__}: {error}"[:500]
    return found


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", MOST_DEVICES)
    print(json.dumps(faults(int(sys.argv[1]))))
