"""Programs with shardings on 8 devices: a script that prints, as JSON, the outcome of each by name.

A process of its own runs it: how many devices JAX has on a CPU is settled when it starts. Of each program with explicit
axes it compares the jaxpr after the pass `partition`, evaluated by plain JAX, with `jax.jit`: numbers, dtypes and
shardings of results. It prints the kinds of collectives of both, and equations that are computed whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, reshard

from ipujax.lowering.jax_compat import jaxpr_as_fun
from ipujax.lowering.partition import Notes, partition
from ipujax.lowering.passes.inline import inline

DEVICES = 8
XLA_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}
RNG = np.random.default_rng(0)


def values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def loss_of_mlp(params: Any, x: Any) -> Any:
    first, second = params
    return (jnp.einsum("bn,nk->bk", jnp.tanh(x @ first), second, out_sharding=P("data")) ** 2).mean()


def scanned(x: Any, w: Any) -> Any:
    return lax.scan(lambda c, w: (jnp.tanh(jnp.einsum("bi,ij->bj", c, w, out_sharding=P("data"))), c.sum()), x, w)


def windows(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def looked_up(table: Any, rows: Any) -> Any:
    return table.at[rows].get(out_sharding=P("data"))


def looked_up_by_pairs(table: Any, rows: Any, columns: Any) -> Any:
    """Reads and writes of elements, some outside of the table along the split dimension, the other, or both."""
    modes = [(read, write) for read, write in (("fill", "drop"), ("clip", "clip"))]
    read = [table.at[rows, columns].get(mode=mode, out_sharding=P("data")) for mode, _ in modes]
    written = [table.at[rows, columns].add(read[1], mode=mode, out_sharding=P("model")) for _, mode in modes]
    return read, written


def programs() -> dict[str, tuple[Callable[..., Any], tuple[tuple[np.ndarray, P], ...]]]:
    """Function and arguments with specs, by name of the rule that they are for."""
    rows = (values(8, 16), P("data", None))
    blocks = (values(8, 16), P("data", "model"))
    columns = (values(16, 32), P(None, "model"))
    split_rows = (values(32, 16), P("model", None))
    image = (values(4, 4, 8, 8), P("data"))
    table = (values(32, 8), P("model"))
    numbers = (np.arange(8) * 3, P("data"))
    return {
        "elementwise": (lambda x: jnp.where(x > 0, x.clip(-1, 1), jnp.exp(x)) + jnp.arange(16.0), (rows,)),
        "dot_general": (
            lambda x, w, v: jnp.einsum("bn,nk->bk", jnp.tanh(x @ w), v, out_sharding=P("data")),
            (rows, columns, split_rows),
        ),
        "dot_general, gradient": (
            lambda x, w, v: jax.value_and_grad(loss_of_mlp)((w, v), x),
            (rows, columns, split_rows),
        ),
        "dot_general, sharded parameters": (
            lambda x, w: jax.grad(lambda w: (jnp.einsum("bi,ij->bj", x, w, out_sharding=P("data")) ** 2).mean())(w),
            (rows, (values(16, 32), P("data", None))),
        ),
        "conv": (
            lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", out_sharding=P("data", "model")),
            (image, (values(8, 4, 3, 3), P("model"))),
        ),
        "reductions": (
            lambda x: (x.sum(), x.max(0), x.min(1), (x > 0).any(), (x > 0).all(0), x.mean(1), x.prod(1)),
            (blocks,),
        ),
        "softmax": (jax.nn.softmax, (blocks,)),
        "reshape": (
            lambda x: (
                x.reshape(8, 4, 4, out_sharding=P("data", "model")),
                lax.reshape(x, (2, 4, 16), out_sharding=P("data")),
            ),
            (blocks,),
        ),
        "shapes": (
            lambda x: (
                *(x.T, x[:, None], x[:, ::-1], x[:, 2:6], jnp.broadcast_to(x[None], (3, 8, 16))),
                *(jnp.concatenate([x, x], 1), jnp.pad(x, ((0, 0), (1, 1))), jnp.split(x, 2, 1)),
            ),
            (rows,),
        ),
        "cumulative, sort, arg": (
            lambda x: (jnp.cumsum(x, 1), jnp.sort(x, 1), jnp.argmax(x, 1), lax.top_k(x, 2)),
            (rows,),
        ),
        "windows": (lambda x: jax.value_and_grad(lambda x: windows(x).sum())(x), ((values(4, 8, 8, 4), P("data")),)),
        "gather": (looked_up, ((values(32, 8), P()), numbers)),
        "gather, split rows": (looked_up, (table, numbers)),
        "gather, split rows of truths": (looked_up, ((values(32, 8) > 0, P("model")), numbers)),
        "gather, split rows of keys": (
            lambda seeds, i: jax.random.key_data(
                looked_up(reshard(jax.random.split(jax.random.key(3), 32), P("model")), i)
            ),
            (rows, numbers),
        ),
        "scatter": (lambda t, i: jax.grad(lambda t: (looked_up(t, i) ** 2).sum())(t), (table, numbers)),
        "gather and scatter, split rows, outside": (
            looked_up_by_pairs,
            (
                table,
                (np.array([0, 31, 40, -50, 7, 9, 33, 12]), P("data")),
                (np.array([7, 9, 3, 8, -20, 4, 30, 2]), P("data")),
            ),
        ),
        "dynamic slices": (
            lambda x: (
                lax.dynamic_update_slice(x, x[:, :4] * 0, (0, jnp.int32(3))),
                lax.dynamic_slice(x, (0, jnp.int32(2)), (8, 4)),
            ),
            (rows,),
        ),
        "iota": (lambda x: x + lax.broadcasted_iota(jnp.float32, (8, 16), 0, out_sharding=P("data")), (rows,)),
        "random": (
            lambda x: x + jax.random.normal(jax.random.key(0), (8, 16), out_sharding=P("data", "model")),
            (blocks,),
        ),
        "scan": (scanned, (rows, (values(3, 16, 16), P(None, None, "model")))),
        "while": (lambda x: lax.while_loop(lambda c: c[1] < 5, lambda c: (c[0] * 2, c[1] + 1), (x, 0)), (rows,)),
        "cond": (lambda x: lax.cond(x.sum() > 0, lambda x: x * 2, jnp.sin, x), (rows,)),
        "custom_jvp": (lambda x: jax.grad(lambda x: jax.nn.relu(jax.nn.silu(x)).sum())(x), (blocks,)),
        "checkpoint": (
            lambda x, w: jax.grad(lambda w: jax.checkpoint(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w))(w),
            (rows, columns),
        ),
        "reshard": (
            lambda x: (reshard(x, P("model", "data")), reshard(x, P(None, "data")), reshard(x, P(("data", "model")))),
            (rows,),
        ),
        "reshard, permute": (lambda x: reshard(x, P(("model", "data"))), ((values(8, 16), P(("data", "model"))),)),
        "unreduced": (
            lambda a, b: reshard(
                jnp.einsum("ab,bc->ac", a, b, out_sharding=P(None, None, unreduced={"model"})), P("model", None)
            ),
            ((values(8, 16), P(None, "model")), (values(16, 8), P("model", None))),
        ),
        "auto_axes": (
            lambda x: jax.sharding.auto_axes(lambda z: jnp.sin(z) @ z.T, out_sharding=P("data"))(x),
            (rows,),
        ),
        "shard_map": (
            lambda x: jax.shard_map(lambda x: x - lax.pmean(x, "data"), in_specs=P("data"), out_specs=P("data"))(x),
            (rows,),
        ),
        "vmap with an axis name": (
            jax.vmap(lambda row: row - lax.pmean(row, "rows") + lax.psum((row, row * 2), "rows")[1], axis_name="rows"),
            (rows,),
        ),
        "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), (rows,)),
        **documented(rows, blocks, columns, split_rows),
        "vmap": (lambda a, b: jax.vmap(jnp.dot)(a, b), (rows, (values(8, 16), P("data")))),
    }


def layer(h: Any, w: Any) -> Any:
    return jnp.tanh(jnp.einsum("bi,ij->bj", h, w, out_sharding=P("data")))


def attention(x: Any, w: Any) -> Any:
    q, k, v = (jnp.einsum("bsd,dhe->bhse", x, w[n]) for n in range(3))
    scores = jnp.einsum("bhse,bhte->bhst", q, k)
    return jnp.einsum("bhst,bhte->bhse", jax.nn.softmax(scores), v)


def mixture(x: Any, w: Any) -> Any:
    by_expert = reshard(x, P("model", "data"))
    return reshard(jnp.einsum("ecd,edf->ecf", by_expert, w), P(None, ("data", "model")))


def ring_sum(x: Any) -> Any:
    ring = [(n, (n + 1) % 4) for n in range(4)]
    return lax.fori_loop(0, 3, lambda _, c: (c[0] + c[1], lax.ppermute(c[1], "model", ring)), (x, x))[0]


def mapped(fun: Any, in_specs: Any, out_specs: Any) -> Any:
    return lambda *args: jax.shard_map(fun, in_specs=in_specs, out_specs=out_specs)(*args)


def documented(rows: Any, blocks: Any, columns: Any, split_rows: Any) -> dict[str, Any]:
    """Programs like those of JAX's pages on sharding, explicit sharding, and `shard_map`, written anew."""
    matrix = (values(16, 16), P("data", None))
    stack = (values(4, 8, 16), P(None, "data"))
    tall = (values(16, 16), P("model", None))
    sums = (P("data", "model"), P("model", None))
    return {
        "page: sin of blocks": (lambda x: jnp.sin(x) * 2 + x, (blocks,)),
        "page: product of blocks": (
            lambda a, b: jnp.einsum("ij,jk->ik", a, b, out_sharding=P("data")),
            (blocks, tall),
        ),
        "page: transposed sum": (lambda x: (x + reshard(x.T.T, P("data", "model"))).sum(0), (blocks,)),
        "page: outer sum": (lambda a, b: a[:, None] + b[None, :], ((values(8), P("data")), (values(4), P("model")))),
        "page: layers in a scan": (
            lambda x, w: lax.scan(lambda h, w: (layer(h, w), None), x, w)[0],
            (rows, (values(3, 16, 16), P(None, "data", None))),
        ),
        "page: loss of two layers": (
            lambda x, w, y: ((layer(x, w) - y) ** 2).mean(),
            (rows, matrix, rows),
        ),
        "page: layer norm": (lambda x: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5), (blocks,)),
        "page: cross-entropy": (
            lambda x: -(jax.nn.log_softmax(x) * jax.nn.softmax(x)).sum(-1).mean(),
            (rows,),
        ),
        "page: heads": (
            attention,
            ((values(4, 8, 16), P("data")), (values(3, 16, 4, 4), P(None, None, "model"))),
        ),
        "page: experts": (mixture, ((values(4, 8, 16), P(None, "data")), (values(4, 16, 16), P("model")))),
        "page: gradient of a layer": (
            lambda x, w: jax.grad(lambda w: layer(x, w).sum())(w),
            (rows, columns),
        ),
        "page: vmap over a stack": (lambda x: jax.vmap(lambda x: jnp.cumsum(x, 1))(x), (stack,)),
        "page: shard_map of a product": (
            mapped(lambda a, b: lax.psum_scatter(a @ b, "model", tiled=True), sums, P(("data", "model"))),
            ((values(32, 16), P("data", "model")), tall),
        ),
        "page: shard_map of a ring": (mapped(ring_sum, P("data", "model"), P("data", "model")), (blocks,)),
        "page: shard_map of an exchange": (
            mapped(lambda x: lax.all_to_all(x, "model", 0, 1, tiled=True), P("model", None), P(None, "model")),
            (split_rows,),
        ),
    }


# A result of XLA's collective, its kind, and its groups: [groups,ranks], a list of ranks, or axes of a mesh, of which
# some may be parts of one: mesh['a'=2,'b'=4] {'b':(2)2}.
_COLLECTIVE = re.compile(
    r"= (\(?[^=]*?\)?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(.*"
)
_GROUPS = re.compile(r"replica_groups=(?:\[(\d+),(\d+)\]|\{\{([\d,]+)\}|mesh\[([^]]*)\][^{]*\{([^}]*)\})")
_AXIS = re.compile(r"('[^']*')(?::\(\d+\)(\d+))?")
_RESULT = re.compile(r"(f32|s32|u32|pred|bf16|u8)\[([\d,]*)\]")
_RECEIVED = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


def ranks_of(line: str) -> int:
    """Number of devices of each group of a collective."""
    groups = _GROUPS.search(line)
    assert groups is not None, line
    if groups[2]:
        return int(groups[2])
    if groups[3]:
        return len(groups[3].split(","))
    sizes = dict(part.split("=") for part in groups[4].split(","))
    return int(np.prod([int(part or sizes[axis]) for axis, part in _AXIS.findall(groups[5])]))


def received_by_xla(text: str) -> float:
    """Bytes that a device receives in the collectives of a partitioned HLO."""
    total = 0.0
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        ranks = ranks_of(line) if match[2] != "collective-permute" else 1
        size = {"pred": 1, "u8": 1, "bf16": 2}
        num_bytes = sum(
            size.get(dtype, 4) * int(np.prod([int(n) for n in dims.split(",") if n]))
            for dtype, dims in _RESULT.findall(match[1])
        )
        total += _RECEIVED[match[2]](ranks) * num_bytes
    return total


def outcome(fun: Callable[..., Any], args: tuple[tuple[np.ndarray, P], ...]) -> dict[str, Any]:
    kinds = (AxisType.Explicit, AxisType.Auto)
    explicit, auto = (jax.make_mesh((2, 4), ("data", "model"), (kind,) * 2) for kind in kinds)
    with jax.set_mesh(explicit):
        arrays = [jax.device_put(x, NamedSharding(explicit, spec)) for x, spec in args]
        reference = jax.jit(fun)(*arrays)
        traced = jax.jit(fun).trace(*arrays)
    notes = Notes()
    after = partition(inline(traced.jaxpr), notes=notes)
    with jax.set_mesh(auto):
        arrays = [jax.device_put(x, NamedSharding(auto, spec)) for x, spec in args]
        results = jax.jit(jaxpr_as_fun(after))(*arrays)
    for result, want in zip(results, jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(np.asarray(result), np.asarray(want), rtol=1e-5, atol=1e-5)
        assert result.dtype == want.dtype
        assert result.sharding.is_equivalent_to(NamedSharding(auto, want.sharding.spec), result.ndim)
    text = traced.lower().compile().as_text()
    return {
        "kinds": sorted({move.step.kind for move in notes.moves}),
        "xla": sorted({kind for name, kind in XLA_KINDS.items() if re.search(rf"= .*\b{name}(-start)?\(", text)}),
        "bytes": sum(move.received_bytes for move in notes.moves),
        "bytes of xla": received_by_xla(text),
        "gathered": notes.gathered,
    }


def tried(fun: Callable[..., Any], args: Any) -> dict[str, Any]:
    try:
        return outcome(fun, args)
    except Exception as error:  # of any type: the test shows it
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print(json.dumps({name: tried(*program) for name, program in programs().items()}))
