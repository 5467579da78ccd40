"""Each parameter of JAX that asks for more than numbers: what becomes of it on an IPU, and a program that shows it.

A row is honoured (the numbers of `jax.jit`, no warning, and its own check), warned of (one warning with the line) or
refused (an error with a text).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback, pallas as pl
from jax.experimental.compute_on import compute_on
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu
from jax.experimental.scheduling_groups import scheduling_group, xla_metadata_call
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import SingleDeviceSharding

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
WORDS = np.arange(8, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Row:
    """An annotation.

    Args:
        becomes: what becomes of it.
        function: a function of X that has it.
        text: part of the warning or the error.
        check: of the compiled program of one that is honoured: True if it does as it is asked.
    """

    becomes: Literal["honoured", "warned", "refused"]
    function: Callable[..., Any]
    text: str = ""
    check: Callable[[Any], bool] = lambda compiled: True


def honoured(function: Callable[..., Any], check: Callable[[Any], bool] = lambda compiled: True) -> Row:
    return Row("honoured", function, check=check)


def warned(text: str, function: Callable[..., Any]) -> Row:
    return Row("warned", function, text)


def has_operation(name: str) -> Callable[[Any], bool]:
    return lambda compiled: name in {fallback.operation for fallback in compiled.profile.fallbacks}


def factored(**settings: Any) -> Callable[..., Any]:
    """A call of a foreign function, whose results nothing reads."""
    jax.jit(lax.linalg.cholesky).lower(np.eye(2))  # JAX loads LAPACK for it
    results = (jax.ShapeDtypeStruct((8, 8), np.float32), jax.ShapeDtypeStruct((), np.int32))
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", results, **settings)

    def function(x: Any) -> Any:
        call(x @ x.T + 8 * jnp.eye(8), uplo=np.uint8(ord("L")))
        return x

    return function


def recomputed(**settings: Any) -> Callable[..., Any]:
    def layer(x: Any) -> Any:
        return jnp.sin(checkpoint_name(jnp.cos(x) @ x, "product"))

    return jax.grad(lambda x: jax.checkpoint(layer, **settings)(x).sum())


def offloaded(policy: Any) -> Row:
    return honoured(recomputed(policy=policy), lambda compiled: compiled.profile.streaming_memory_bytes > 0)


def doubled(ref: Any, out: Any) -> None:
    out[...] = ref[...] * 2


def kernel(**settings: Any) -> Callable[..., Any]:
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    return lambda x: pl.pallas_call(doubled, out_shape=shape, interpret=True, **settings)(x)


def seen_in_order(x: Any) -> Any:
    for n in range(3):
        x = io_callback(lambda v, n=n: v + n, jax.ShapeDtypeStruct(X.shape, X.dtype), x, ordered=True)
    return x


def on_machine(compute_type: str) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        with compute_on(compute_type):
            return x * 2

    return function


def multiplied(algorithm: str, dtype: Any = np.float32) -> Callable[[Any], Any]:
    """A product of operands of a dtype by an algorithm."""
    precision = lax.DotAlgorithmPreset[algorithm]
    return lambda x: lax.dot(x.astype(dtype), x.astype(dtype), precision=precision).astype(np.float32)


def with_metadata(x: Any) -> Any:
    with set_xla_metadata(key="value"):
        return x * 2


def drawn_in_both_ways(x: Any) -> Any:
    key = jax.random.key(1)
    with jax.threefry_partitionable(True):
        one = jax.random.uniform(key, X.shape), jax.random.split(key, 3)
    with jax.threefry_partitionable(False):
        return x + one[0] - jax.random.uniform(key, X.shape), jax.random.key_data(one[1])


def drawn_by_equal_layers(x: Any) -> Any:
    """Layers of which a compiler makes one function, were it not for their random numbers."""
    key = jax.random.key(1)
    for n in range(4):
        with jax.threefry_partitionable(n % 2 == 0):
            x = jnp.tanh(x @ x) * jax.random.bernoulli(key, 0.5, x.shape) + jnp.sin(x)
    return x


def with_ref(**settings: Any) -> Callable[..., Any]:
    return lambda x: jax.new_ref(x, **settings)[...] + 1


def called(**settings: Any) -> Callable[..., Any]:
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    return lambda x: jax.pure_callback(lambda v: v + 1, shape, x, vmap_method="sequential", **settings)


ON_DEVICE = SingleDeviceSharding(jax.devices()[0])
LAYOUT = Layout(major_to_minor=(1, 0))
POLICIES = jax.checkpoint_policies
TO_HOST = {"offload_src": "device", "offload_dst": "pinned_host"}

# By primitive and parameter; "*" stands for all other primitives.
ROWS: Mapping[tuple[str, str], Row] = {
    ("*", "accuracy"): warned("accuracy=HIGHEST", lambda x: lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST)),
    ("scan", "unroll"): warned("unroll=2", lambda x: lax.fori_loop(0, 4, lambda i, y: y * 0.5 + i, x, unroll=2)),
    ("layout_constraint", "layout"): warned("a layout", lambda x: with_layout_constraint(x, LAYOUT) + 1),
    ("dot_general", "precision"): warned("precision=BF16_BF16_F32", multiplied("BF16_BF16_F32")),
    ("conv_general_dilated", "precision"): honoured(
        lambda x: lax.conv(x[None, None], x[None, None, :2, :2], (1, 1), "SAME", precision="highest")
    ),
    ("ragged_dot_general", "precision"): honoured(
        lambda x: lax.ragged_dot(x, x[None], jnp.array([8]), precision="highest")
    ),
    ("*", "preferred_element_type"): honoured(
        lambda x: lax.dot(x.astype(jnp.float16), x.astype(jnp.float16), preferred_element_type=jnp.float32)
    ),
    ("compute_on", "compute_type"): warned("compute on 'device_host'", on_machine("device_host")),
    ("xla_metadata_value", "xla_metadata_kvs"): warned("metadata", lambda x: set_xla_metadata(x * 2, key="value")),
    ("xla_metadata_call", "**meta"): warned(
        "metadata for XLA, {'key': 'value'}", lambda x: xla_metadata_call(lambda v: v * 2, key="value")(x)
    ),
    ("io_callback", "sharding"): warned(
        "names a device",
        lambda x: io_callback(lambda v: v, jax.ShapeDtypeStruct(X.shape, X.dtype), x, sharding=ON_DEVICE),
    ),
    ("pure_callback", "sharding"): warned("names a device", called(sharding=ON_DEVICE)),
    ("io_callback", "ordered"): honoured(seen_in_order),
    ("debug_print", "ordered"): honoured(lambda x: (jax.debug.print("{}", x[0, 0], ordered=True), x)[1]),
    ("debug_callback", "effect"): honoured(lambda x: (jax.debug.callback(lambda v: None, x, ordered=True), x)[1]),
    ("pallas_call", "compiler_params"): warned(
        "compiler_params", kernel(compiler_params=tpu.CompilerParams(has_side_effects=False))
    ),
    ("pallas_call", "cost_estimate"): warned(
        "a cost_estimate",
        kernel(cost_estimate=pl.CostEstimate(flops=1, transcendentals=0, bytes_accessed=1)),
    ),
    ("pallas_call", "metadata"): honoured(kernel(metadata={"key": "value"})),
    ("pallas_call", "interpret"): honoured(kernel()),
    ("pallas_call", "debug"): honoured(kernel(debug=False)),
    ("pallas_call", "input_output_aliases"): honoured(kernel(input_output_aliases={0: 0})),
    ("new_ref", "memory_space"): warned("a Ref in", with_ref(memory_space=jax.memory.Space.Host)),
    ("new_ref", "kind"): honoured(with_ref()),
    ("device_put", "devices"): honoured(lambda x: jax.device_put(x, jax.devices()[0])),
    ("device_put", "srcs"): honoured(lambda x: jax.device_put(x, jax.devices()[0], src=ON_DEVICE)),
    ("device_put", "copy_semantics"): honoured(lambda x: jax.device_put(x, may_alias=False)),
    ("ffi_call", "has_side_effect"): honoured(factored(has_side_effect=True), has_operation("lapack_spotrf_ffi")),
    ("ffi_call", "input_output_aliases"): honoured(factored(has_side_effect=True, input_output_aliases={0: 0})),
    ("remat2", "policy"): offloaded(
        POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=["product"], **TO_HOST
        )
    ),
    ("remat2", "prevent_cse"): honoured(recomputed(prevent_cse=False)),
    ("remat2", "differentiated"): honoured(recomputed()),
    ("jit", "inline"): honoured(lambda x: jax.jit(jnp.sin, inline=True)(x)),
    ("jit", "keep_unused"): honoured(lambda x: jax.jit(lambda v, w: v + 1, keep_unused=True)(x, x)),
    ("jit", "donated_invars"): honoured(lambda x: jax.jit(lambda v: v + 1, donate_argnums=0)(x * 2)),
    ("sort", "is_stable"): honoured(lambda x: lax.sort([jnp.round(x), x], num_keys=1, is_stable=True)),
    ("*", "indices_are_sorted"): honoured(lambda x: x.at[WORDS].get(indices_are_sorted=True)),
    ("*", "unique_indices"): honoured(lambda x: x.at[WORDS].set(0.0, unique_indices=True)),
    ("*", "mode"): honoured(lambda x: (x.at[WORDS + 4].get(mode="fill", fill_value=7.0), x.at[9].add(1, mode="drop"))),
    ("approx_top_k", "recall_target"): honoured(lambda x: lax.approx_max_k(x, 2, recall_target=0.5)),
    ("approx_top_k", "reduction_input_size_override"): honoured(
        lambda x: lax.approx_max_k(x, 2, reduction_input_size_override=64)
    ),
    ("approx_top_k", "aggregate_to_topk"): honoured(lambda x: lax.approx_max_k(x, 2, aggregate_to_topk=True)),
    ("svd", "algorithm"): honoured(lambda x: lax.linalg.svd(x, algorithm=lax.linalg.SvdAlgorithm.QR, compute_uv=False)),
    ("eigh", "algorithm"): honoured(lambda x: abs(lax.linalg.eigh(x + x.T, symmetrize_input=False)[0])),
    ("rng_bit_generator", "algorithm"): honoured(
        lambda x: lax.rng_bit_generator(
            jnp.arange(4, dtype=jnp.uint32), (4,), algorithm=lax.RandomAlgorithm.RNG_DEFAULT
        )
    ),
    ("*", "use_magma"): honoured(lambda x: abs(lax.linalg.qr(x, use_magma=None)[1])),
    ("eig", "implementation"): honoured(
        lambda x: jnp.sort(abs(lax.linalg.eig(x, compute_left_eigenvectors=False, compute_right_eigenvectors=False)[0]))
    ),
    ("dce_sink", "prevent_mlir_dce"): honoured(lambda x: (lax.dce_sink(jnp.sin(x)), x)[1]),
    ("*", "layout"): honoured(
        lambda x: jax.nn.dot_product_attention(x[None, :, None], x[None, :, None], x[None, :, None])
    ),
}
# Of policies that offload: a program for each name in `jax.checkpoint_policies`, but those that only save.
OFFLOADING: Mapping[str, Row] = {
    "save_and_offload_only_these_names": ROWS["remat2", "policy"],
    "offload_dot_with_no_batch_dims": offloaded(POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")),
}
LAYERS = honoured(drawn_by_equal_layers)
# Of the context of an equation, by attribute.
CONTEXT: Mapping[str, Row] = {
    "compute_type": warned("compute on 'device_host'", on_machine("device_host")),
    "xla_metadata": warned("metadata", with_metadata),
    "threefry_partitionable": honoured(drawn_in_both_ways),
}
# Other values of parameters and contexts that have a row.
VALUES: Mapping[str, Row] = {
    "a core for sparse arrays": warned("compute on 'tpu_sparsecore'", on_machine("tpu_sparsecore")),
    "a stream": warned("compute on 'gpu_stream:1'", on_machine("gpu_stream:1")),
    "the device": honoured(on_machine("device")),
    "a scheduling group": warned("{'scheduling_group': 'a'}", lambda x: scheduling_group("a")(lambda v: v * 2)(x)),
    "a tolerance": warned("accuracy=Tolerance", lambda x: lax.exp(x, accuracy=lax.Tolerance(1e-3, 1e-3, 1))),
    "half-precision product of float32": warned("precision=F16_F16_F16", multiplied("F16_F16_F16")),
    "half-precision product": honoured(multiplied("F16_F16_F16", np.float16)),
    "double-precision product of float32": warned("precision=F64_F64_F64", multiplied("F64_F64_F64")),
    "float32 product of float16": warned("precision=F32_F32_F32", multiplied("F32_F32_F32", np.float16)),
    "float32 product": honoured(multiplied("F32_F32_F32")),
}


def in_each_way(x: Any) -> Any:
    """A function with each annotation that an exported module keeps."""
    with set_xla_metadata(key="value"):
        x = jnp.sin(x)
    for compute_type in ("device_host", "tpu_sparsecore", "gpu_stream:1", "device"):
        x = on_machine(compute_type)(x)
    x = scheduling_group("a")(lambda v: v + 1)(set_xla_metadata(x * 2, other="value"))
    x = lax.exp(-abs(x), accuracy=lax.AccuracyMode.HIGHEST) + lax.log(3 + x * x, accuracy=lax.Tolerance(1e-3, 1e-3, 1))
    return multiplied("BF16_BF16_F32")(x) + multiplied("F32_F32_F32")(x) + multiplied("F16_F16_F16", np.float16)(x)
