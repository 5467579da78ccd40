"""Lines and layers of random networks are the same on one IPU and over a mesh of four."""

from __future__ import annotations

from collections import Counter
from random import Random

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.source_info import source_line
from tests.ipujax.random_networks import ROWS, WIDTH, function_of

SEEDS = (range(0, 2), range(2, 26), range(26, 50))  # the fast suite has the first
LEAST = 5  # cycles: of fewer a fused row may have none on some machine


def on_one_ipu(seed: int) -> ipu.Profile:
    function, weights = function_of(seed)
    return ipu.jit(function).profile(weights, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))


def over_a_mesh(seed: int) -> ipu.Profile:
    """The profile of a seed's function over a mesh: by shardings of its arguments, or by `jax.shard_map`."""
    random = Random(-seed)
    function, weights = function_of(seed)
    is_flat = random.random() < 0.5
    axes = (("data", 4),) if is_flat else (("data", 2), ("model", 2))
    names, sizes = zip(*axes, strict=True)
    form = random.choice(["shard_map", "auto", "explicit"])
    kind = AxisType.Explicit if form == "explicit" else AxisType.Auto
    mesh = ipu.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))
    device = ipu.IPUModel(num_ipus=4)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    if form == "shard_map":
        mapped = jax.shard_map(
            lambda weights, x: jax.lax.pmean(function(weights, x), names),
            mesh=mesh,
            in_specs=(P(), P(names)),
            out_specs=P(),
            check_vma=False,
        )
        return ipu.jit(mapped, device=device).profile(weights, x)
    specs = [P()] if is_flat or form == "explicit" else [P(), P(None, "model"), P("model")]

    def placed(x: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return ipu.jit(function, device=device).profile(
        [placed(w, random.choice(specs)) for w in weights], placed(x, P(names if is_flat else "data"))
    )


def lines_of(profile: ipu.Profile, least: int) -> set[str]:
    """Lines of the networks with so many cycles."""
    rows = profile.step_costs
    return {row.origin.line for row in rows if row.cycles >= least and "random_networks.py" in row.origin.line}


def traced_lines(seed: int) -> set[str]:
    """Lines of all equations, also of views, which take cycles where they are moved."""
    function, weights = function_of(seed)
    jaxpr = jax.make_jaxpr(function)(weights, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))
    return set(map(source_line, equations(jaxpr.jaxpr)))


def layers_of(profile: ipu.Profile, least: int) -> set[tuple[str, str]]:
    """Layers and parts with so many cycles, without collectives, which one IPU has not.

    Of operations, as the table of layers leaves out those that run beside slower ones of a merged compute set.
    """
    cycles = Counter[tuple[str, str]]()
    for row in profile.step_costs:
        if row.origin.layer and row.origin.part not in ("collectives", "streams"):
            cycles[row.origin.layer, row.origin.part] += row.cycles
    return {layer for layer, count in cycles.items() if count >= least}


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_attribution_over_a_mesh_is_that_of_one_ipu(seeds: range) -> None:
    for seed in seeds:
        single, sharded = on_one_ipu(seed), over_a_mesh(seed)
        assert len(lines_of(single, LEAST)) > 1
        assert lines_of(single, LEAST) <= lines_of(sharded, 0), seed
        assert lines_of(sharded, LEAST) <= traced_lines(seed), seed
        assert layers_of(single, LEAST) <= layers_of(sharded, 0), seed
        assert layers_of(sharded, LEAST) <= layers_of(single, 0), seed


def test_attribution_of_a_mapped_function_is_within_its_callers() -> None:
    mesh = ipu.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def network(x: jax.Array) -> jax.Array:
        def mapped(x: jax.Array) -> jax.Array:
            return jax.lax.psum(jnp.sum(x @ x.T), "data")

        return jnp.sin(jax.shard_map(mapped, mesh=mesh, in_specs=P("data"), out_specs=P())(x))

    profile = ipu.jit(network, device=ipu.IPUModel(num_ipus=4)).profile(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    assert {row.layer for row in profile.layers if row.cycles} == {"(no layer)", "network", "network/mapped"}
