"""Annotations of JAX mean something on an IPU, or a warning with the line says that they do not."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from tests.ipujax.annotation_rows import (
    CONTEXT,
    LAYERS,
    OFFLOADING,
    ROWS,
    VALUES,
    Row,
    X,
    factored,
    has_operation,
    in_each_way,
    multiplied,
)

DEVICE = ipu.IPUModel(tiles_per_ipu=8)
SCRIPT = Path(__file__).parent / "jax_parameters.py"
ALL = {f"{primitive} {param}": row for (primitive, param), row in ROWS.items()}
ALL |= {"context of equal layers": LAYERS, **VALUES}
ALL |= {f"policy {name}": row for name, row in OFFLOADING.items()} | {f"context {a}": row for a, row in CONTEXT.items()}

# Over a mesh: `test_mesh_annotations`, `test_shardings`, and the tests of types with shardings in `lowering.partition`.
OF_MESHES = frozenset(
    [
        "check_vma",
        "concrete_mesh",
        "context_mesh",
        "ctx_mesh",
        "decode_shardings",
        "dst_sharding",
        "in_shardings",
        "in_specs",
        "newly_manual_axes",
        "infer_sharding_from_operands",
        "out_sharding",
        "out_shardings",
        "out_specs",
        "partition",
        "partitioned",
        "propagate_user_sharding",
        "sharding",
        "sharding_rule",
        "unconstrained_dims",
    ]
)
# In kernels of Pallas for other machines, in sparse arrays, or in code that JAX makes for GPUs and TPUs.
OF_OTHER_MACHINES = frozenset(
    ["approx", "assume_unique", "command_buffer_compatible", "full_range", "to", "use_rolled_loops"]
)
OTHER_PRIMITIVES = frozenset(
    ["buffer_callback", "core_map", "create_linear", "empty2", "empty_ref", "mpmd_map", "with_memory_space_constraint"]
)
# Of JAX's functions for MLIR, not of primitives.
OF_LOWERING = frozenset(
    [
        "expand_complex_convolutions",
        "ip",
        "loc",
        "platform",
        "result_accuracy",
        "results",
        "target_name_prefix",
        "reduce_op",
    ]
)
# Parameters of any name, which rules hand to others or leave unread.
OF_ANY_NAME = frozenset(["**_", "**__", "**k", "**kw", "**kwargs", "**kwds", "**params", "**unused_kwargs"])
# `jax.jit` refuses these inside of another function, or knows one value of them.
WITHOUT_PROGRAMS = frozenset({("jit", "compiler_options_kvs"), ("compute_on", "compiler_options_json")})
WITHOUT_PROGRAMS |= {("compute_on", "out_memory_spaces"), ("check", "debug"), ("sharding_constraint", "layout")}
WITHOUT_PROGRAMS |= {("jit", "in_layouts"), ("jit", "out_layouts")}
# Numbers, shapes and structure, which the tests of operations hold.
OF_NUMBERS = frozenset(
    [
        "_prim",
        "all_gather_dimension",
        "allow_extended_dtype",
        "alpha",
        "args_tree",
        "attributes",
        "avals",
        "axes",
        "axis",
        "axis_index_groups",
        "axis_name",
        "axis_size",
        "backend",
        "base_dilation",
        "batch_group_count",
        "beta",
        "bit_width",
        "body_jaxpr",
        "body_nconsts",
        "branches",
        "broadcast_dimensions",
        "bwd",
        "call",
        "call_jaxpr",
        "callback",
        "callee",
        "collective_axes",
        "combine_fn",
        "computation",
        "compute_left_eigenvectors",
        "compute_right_eigenvectors",
        "compute_schur_vectors",
        "compute_uv",
        "concat_axis",
        "cond_jaxpr",
        "cond_nconsts",
        "conjugate_a",
        "const_lengths",
        "consts",
        "ctx",
        "custom_call_api_version",
        "device_id_type",
        "dim",
        "dimension",
        "dimension_numbers",
        "dimensions",
        "dropout_rate",
        "dtype",
        "edtype",
        "enable_eigvec_derivs",
        "err_tree",
        "error_message",
        "exc_type",
        "expand_padding",
        "exponent_bits",
        "exported",
        "external_meshes",
        "fallback",
        "feature_group_count",
        "fft_lengths",
        "fft_type",
        "fill_value",
        "fmt",
        "full_matrices",
        "fun_jaxpr_thunk",
        "fwd_jaxpr",
        "grid_mapping",
        "group_offset",
        "has_placeholders",
        "impl",
        "in_tree",
        "in_zeros",
        "index_dtype",
        "input_dtype",
        "input_layouts",
        "is_async",
        "is_initialized",
        "is_max_k",
        "is_training",
        "jaxpr",
        "jaxprs",
        "k",
        "left",
        "left_side",
        "legacy_backend_config",
        "length",
        "lhs_dilation",
        "lhs_spinfo",
        "limit_indices",
        "log_space",
        "logging_record",
        "lower",
        "mantissa_bits",
        "mask_type",
        "max_bits",
        "mesh",
        "meshes",
        "message",
        "n_batch",
        "n_dense",
        "name",
        "new_dtype",
        "new_sizes",
        "np_printoptions",
        "nse",
        "num_callee_consts",
        "num_carry",
        "num_consts",
        "num_keys",
        "num_res",
        "nz_in_flat",
        "out_avals",
        "out_dtype",
        "out_shape",
        "out_tree",
        "output_layouts",
        "padding",
        "padding_config",
        "perm",
        "permutation",
        "permutation_size",
        "perturb_singular",
        "pivoting",
        "platforms",
        "primitive",
        "ragged_dot_dimension_numbers",
        "reduction_dimension",
        "reorder",
        "reps",
        "require_same",
        "res_aval",
        "residuals_tree",
        "result_avals",
        "reverse",
        "rhs_dilation",
        "rhs_spinfo",
        "rounding_method",
        "rule",
        "scale",
        "scatter_consts",
        "scatter_dimension",
        "scatter_jaxpr",
        "seed",
        "select_callable",
        "select_consts",
        "select_jaxpr",
        "select_prim",
        "shape",
        "sizes",
        "slice_sizes",
        "sliding_window_length",
        "sort_eig_vals",
        "sort_eigenvalues",
        "source",
        "spinfo",
        "split_axis",
        "start_indices",
        "static_args",
        "strides",
        "subset_by_index",
        "supports_narrow_ints",
        "swap_ans",
        "symbolic_zeros",
        "target_name",
        "tiled",
        "tol",
        "transpose",
        "transpose_a",
        "transpose_thunk",
        "tree",
        "treedef",
        "ty",
        "unit_diagonal",
        "update_consts",
        "update_jaxpr",
        "use_causal_mask",
        "use_vmap",
        "variadic_args",
        "version",
        "vmap_method",
        "weak_type",
        "what",
        "which_linear",
        "window_dilation",
        "window_dimensions",
        "window_strides",
        "y",
    ]
)


@pytest.fixture(scope="module")
def parameters() -> dict[str, list[str]]:
    text = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True).stdout
    return json.loads(text)


def test_every_parameter_of_jax_has_a_row(parameters: dict[str, list[str]]) -> None:
    """A parameter that a version of JAX adds is one of numbers, or gets a row."""
    asking = {param for _, param in (*ROWS, *WITHOUT_PROGRAMS)} | OF_MESHES | OF_OTHER_MACHINES
    names = {name for names in parameters.values() for name in names}
    assert names - asking - OF_LOWERING - OF_NUMBERS - OF_ANY_NAME == set()
    assert not asking & OF_NUMBERS
    others = OF_MESHES | OF_OTHER_MACHINES
    lacking = {
        (primitive, name)
        for primitive, names in parameters.items()
        for name in names
        if name in asking - others and primitive not in OTHER_PRIMITIVES
        if not {(primitive, name), ("*", name)} & {*ROWS, *WITHOUT_PROGRAMS}
    }
    assert not lacking


def test_rows_are_of_parameters_of_jax(parameters: dict[str, list[str]]) -> None:
    names = {name for names in parameters.values() for name in names}
    assert not {
        (primitive, param)
        for primitive, param in (*ROWS, *WITHOUT_PROGRAMS)
        if param not in (names if primitive == "*" else parameters[primitive])
    }


def test_every_policy_and_context_has_a_row() -> None:
    offloading = {name for name in dir(jax.checkpoint_policies) if "offload" in name}
    assert offloading == set(OFFLOADING)
    (eqn,) = jax.make_jaxpr(lambda x: x + 1)(1.0).eqns
    of_tracing = {"cur_abstract_mesh", "remove_size_one_mesh_axis", "configs", "__weakref__"}
    assert set(type(eqn.ctx).__slots__) - of_tracing == set(CONTEXT)


def warnings_of(records: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", ALL)
def test_annotation(name: str, caplog: pytest.LogCaptureFixture) -> None:
    row: Row = ALL[name]
    jitted = ipu.jit(row.function, device=DEVICE)
    if row.becomes == "refused":
        with pytest.raises(ipu.IpuError, match=row.text):
            jitted(X)
        return
    expected = jax.jit(row.function)(X)
    with caplog.at_level(logging.WARNING, logger="ipujax"):
        actual = jitted(X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected)
    warnings = warnings_of(caplog.records)
    if row.becomes == "honoured":
        assert not warnings
        assert row.check(jitted.lower(X).compile())
    else:
        (warning,) = warnings
        assert row.text in warning and ".py:" in warning


def test_annotations_inside_a_function_of_jax_have_the_line_of_its_call(caplog: pytest.LogCaptureFixture) -> None:
    def call(x: Any) -> Any:
        return jnp.polyval(jnp.arange(3.0), jnp.tanh(x))  # its loop asks for unroll=16

    with caplog.at_level(logging.WARNING, logger="ipujax"):
        ipu.jit(call, device=DEVICE).lower(X)
    (warning,) = warnings_of(caplog.records)
    assert "unroll=16" in warning and f"({Path(__file__).name}:" in warning


def exported(function: Any) -> Any:
    return jax.export.export(jax.jit(function))(X).call


def what_is_asked(warning: str) -> str:
    """A warning without the function before its verb and the line after it."""
    return re.sub(r"^\S+ | \(\w+\.py:.*$", "", warning)


def test_annotations_in_an_exported_function(caplog: pytest.LogCaptureFixture) -> None:
    """Those of the function, with the line of the call: oracle is the function that is not exported."""
    call = exported(in_each_way)
    with caplog.at_level(logging.WARNING, logger="ipujax"):
        ipu.jit(in_each_way, device=DEVICE).lower(X)
        expected = warnings_of(caplog.records)
        caplog.clear()
        ipu.jit(lambda x: call(call(x)), device=DEVICE).lower(X)
    actual = warnings_of(caplog.records)
    assert len(expected) == 9
    assert sorted(map(what_is_asked, actual)) == sorted(map(what_is_asked, expected))
    assert all(f"({Path(__file__).name}:" in text for text in actual)


def test_what_jax_writes_into_modules_is_no_annotation(caplog: pytest.LogCaptureFixture) -> None:
    """Batch dimensions of a routine, and operands that the module itself rounds."""
    call = exported(lambda x: (jnp.linalg.cholesky(x @ x.T + 9 * jnp.eye(8)), multiplied("F16_F16_F16")(x)))
    with caplog.at_level(logging.WARNING, logger="ipujax"):
        ipu.jit(lambda x: call(x), device=DEVICE).lower(X)
    assert not warnings_of(caplog.records)


def test_a_foreign_call_without_side_effect_is_dead_code() -> None:
    compiled = ipu.jit(factored(has_side_effect=False), device=DEVICE).lower(X).compile()
    assert not has_operation("ffi_call")(compiled)


def test_constraints_and_metadata_cost_nothing() -> None:
    def cycles(function: Any) -> int:
        return ipu.jit(function, device=DEVICE).profile(X).cycles

    annotated = [ROWS["layout_constraint", "layout"], ROWS["xla_metadata_value", "xla_metadata_kvs"]]
    plain = [lambda x: x + 1, lambda x: x * 2]
    assert [cycles(row.function) for row in annotated] == list(map(cycles, plain))


def nested_stages(inner: int, wrap: Any = lambda f: f) -> Any:
    def in_inner_stage(x: Any) -> Any:
        with ipu.stage(inner):
            return (jnp.tanh(x) ** 2).mean()

    def loss(x: Any) -> Any:
        with ipu.stage(0):
            return wrap(in_inner_stage)(x * 2)

    return loss


NESTED = {
    "stages": (nested_stages(1), r"ipu\.stage\(1\) inside of ipu\.stage\(0\)"),
    "stages of a jitted function": (nested_stages(1, jax.jit), r"ipu\.stage\(1\) inside of ipu\.stage\(0\)"),
    "stages of a gradient": (jax.grad(nested_stages(1)), r"ipu\.stage\(1\) inside of ipu\.stage\(0\)"),
    "stages of a pipeline": (
        ipu.pipeline(jax.grad(nested_stages(1, jax.checkpoint)), micro_batches=2, reduce="stack"),
        r"ipu\.stage\(1\) inside of ipu\.stage\(0\)",
    ),
    "one stage": (jax.grad(nested_stages(0, jax.jit)), None),
    "a phase in a stage": (lambda x: ipu.stage(0)(lambda: ipu.phase(1)(jnp.tanh)(x) * 2)(), None),
    "phases": (lambda x: ipu.phase(1)(lambda: ipu.phase(0)(jnp.tanh)(x) * 2)(), r"ipu\.phase\(0\) inside .*phase\(1\)"),
}


@pytest.mark.parametrize("name", NESTED)
def test_stages_inside_of_others_are_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    function, expected = NESTED[name]
    with caplog.at_level(logging.WARNING, logger="ipujax"):
        ipu.jit(function, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=8)).lower(X)
    warnings = [text for text in warnings_of(caplog.records) if " inside of " in text]
    assert len(warnings) == (expected is not None)
    assert expected is None or re.search(rf"{expected}.*\({Path(__file__).name}:\d+", warnings[0])
