"""Tests of JAX that check something other than results of functions, each with the reason for its exclusion.

    python benchmarks/jax_test_exclusions.py

`jax_tests.py` reads the tables; it detects different texts of errors by itself, with the reason `WORDS`, and what
ipujax refuses by name from the text of the error, see `REFUSALS`. A pattern is one of `fnmatch`, of class and test.
"""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase

WORDS = "wording: an error of the class that is expected, in words of ipujax"
_TEXT = "StableHLO, HLO: reads their text, or objects of XLA"
_OPTIONS = "XLA: compile options, or platforms to lower for"
_COUNTS = "counts: traces, lowerings, cache misses or entries of jax.jit"
_LOGS = "wording: of what JAX logs when it traces, lowers or calls"
_OBJECT = "internals: repr, pickled state, stack depth or garbage of the object that jax.jit returns"
_UNKNOWN_TO_CACHE = "internals: what the cache of jax.jit cannot hold; ipu.jit takes it"
_ONE_DEVICE = "shardings: a device of XLA for results, which ipu.jit refuses by name"
_SHARDED_REFS = "shardings: Refs over several devices, which ipu.jit refuses by name"
_LEFT_AXES = "shardings: a shard_map with axes left to the compiler, which ipu.jit refuses by name"
_TERMS = "shardings: values that differ, declared equal by check_vma=False, or terms of a sum declared parts"
_UNEVEN = "shardings: blocks of several sizes, which ipu.jit refuses by name"
_WHOLE_ARRAYS = (
    "shardings: of results of a program that splits nothing, or of random numbers: whole, and XLA may split them"
)
_WIDER = "wider: takes what jax.jit refuses"
_SIZE = "size: does not fit the chip of 64 tiles that these tests run on"
_GSPMD = "shardings: GSPMDSharding and modules of GSPMD, which ipu.jit refuses by name"
_OWN_TYPES = "internals: types and operations on Refs of one's own (hijax), which ipu.jit refuses by name"
_DTYPES = "internals: extended dtypes of one's own as results, which ipu.jit refuses by name"
_TOKENS = "XLA: its tokens as arguments or results, which ipu.jit refuses by name"
_RAISED = "wording: an exception of a Python function is raised as it is, which JAX wraps in a RuntimeError"
_COMPOSITES = (
    "",
    "_decorator",
    "_with_jit_function",
    "_with_attributes",
    "_attribute_dtypes",
    "_with_non_default_version",
    "_with_no_args",
    "_with_variadic_input_output",
    "_with_array_consts",
)

# Reason by text of an error of ipujax, which the exception that ends a test has.
REFUSALS = {
    "jax.shard_map leaves axes of its mesh to the compiler": _LEFT_AXES,
    "IPUs have blocks of one size": _UNEVEN,
    "the arrays that the type of your own stands for": _OWN_TYPES,
    "JAX cannot replace the Ref that call_hi_primitive uses": _OWN_TYPES,
    "got: GSPMDSharding": _GSPMD,
    "takes from outside is sharded over": _SHARDED_REFS,
}

_EXCLUSIONS: dict[str, dict[str, str]] = {
    "api_test": {
        "JitTest.test_jit_lower_as_text": _TEXT,
        "JitTest.test_jit_lower_compile_as_text": _TEXT,
        "JitTest.test_jit_lower_*compiler_ir": _TEXT,
        "JitTest.test_jit_lower_compile_executable": _TEXT,
        "JitTest.test_jit_lower_no_pruning": _TEXT,
        "JitTest.test_jit_replica_attributes": _TEXT,
        "JitTest.test_jit_lower_cost_analysis": "XLA: its estimate of StableHLO that is not compiled",
        "JitTest.test_jit_lower_compile_with_compiler_options*": _OPTIONS,
        "JitTest.test_lower_compile_with_compiler_options_multiple": _OPTIONS,
        "APITest.test_lowering_platform_aot": _OPTIONS,
        "OverrideLoweringTest.test_sharding_constraint_as_noop": _TEXT,
        "APITest.test_compiler_ir": _TEXT,
        "APITest.test_eval_shape_out_shardings": _ONE_DEVICE,
        "*.test_no_cse_widget_*": _TEXT,
        "Remat*Test.test_remat_partial_cse_prevention*": _TEXT,
        "JitTest.test_static_args_equality": _COUNTS,
        "JitTest.test_cache_key_defaults": _COUNTS,
        "JitTest.test_jit_global_cache": _COUNTS,
        "APITest.test_inner_jit_function_retracing": _COUNTS,
        "APITest.test_user_trace_context_hooks": _COUNTS,
        "APITest.test_eval_shape_trace_cache_share": _COUNTS,
        "APITest.test_cache_miss_explanations*": _LOGS,
        "JitTest.test_fun_name": _OBJECT,
        "JitTest.test_jit_repr*": _OBJECT,
        "JitTest.test_jit_of_nonweakreferenceable_function": _UNKNOWN_TO_CACHE,
        "JitTest.test_cpp_jit_raises_on_non_hashable_static_argnum": "wording: of a ValueError, JAX's own, from __eq__",
        "JitTest.test_jit_reference_dropping": _OBJECT,
        "TracebackTest.test_jit_traceback": _OBJECT,
        "APITest.test_jit_returning_token": _TOKENS,
        "APITest.test_jit_capturing_token": _TOKENS,
        "JitTest.test_trivial_computations_with_tokens": _TOKENS,
    },
    "lax_test": {
        **dict.fromkeys(map("CompositeTest.test_composite{}".format, _COMPOSITES), _TEXT),
        "LaxTest.testDotAlgorithmConfig": _TEXT,
        "CustomElementTypesTest.*": _DTYPES,
        "LaxTest.test_dce_sink_prevents_xla_dce": _TEXT,
        "RaggedTest.test_ragged_dot*_out_sharding": _TEXT,
    },
    "lax_control_flow_test": {
        "LaxControlFlowTest.test_scan_unroll": _TEXT,
        "LaxControlFlowTest.testIssue810": _TEXT,
        "LaxControlFlowTest.test_scan_lowering_doesnt_introduce_singleton": _TEXT,
        "LaxControlFlowTest.test_platform_dependent_with_non_existent_custom_call": _TEXT,
        "LaxControlFlowTest.test_platform_dependent_multiple_identical_branches": _TEXT,
        "LaxControlFlowTest.test_platform_dependent_lowering": _TEXT,
        "LaxControlFlowTest.test_platform_dependent_batched": _TEXT,
        "LaxControlFlowTest.test_platform_dependent_grad": _TEXT,
    },
    "mutable_array_test": {
        "MutableArrayTest.test_*sharded_aot*": _SHARDED_REFS,
    },
    "pjit_test": {
        "*.test_abstract_mesh_context_trace": _OPTIONS,
        "*.test_changing_abstract_device": _COUNTS,
        "*.test_compilation_cache_miss_when_devices_change": _COUNTS,
        "*.test_eval_shape_jitted_fun_cache_hit": _COUNTS,
        "*.test_extended_dtypes": _DTYPES,
        "*.test_nary_op_input_constraint": _TEXT,
        "*.test_xla_metadata_applied_to_op": _TEXT,
        **dict.fromkeys(
            (
                "*.test_jit_submhlo_cached",
                "*.test_wsc_eager_copy",
                "PJitTest.testShardingConstraintPyTreeWith*",
            ),
            _TEXT,
        ),
        "*.test_aot_devices_to_compile_error": _OPTIONS,
        **dict.fromkeys(
            (
                "*.test_cache_miss_explanations*",
                "*.test_different_devices_wsc_abstract_mesh_cache_hit",
                "*.test_global_jit_cpp_cache_hit_out_shardings",
                "*.test_jax_set_mesh_trace_only_once",
                "*.test_jit_cpp_cache_obj_config",
                "*.test_jit_mul_sum_sharding_preserved",
                "*.test_lowering_cache_hit_*",
                "*.test_wsc_aval_cache_hit",
            ),
            _COUNTS,
        ),
        **dict.fromkeys(
            (
                "*.test_aot_sharding_dce",
                "*.test_input_shardings_single_device",
                "*.test_single_device_sharding_preserved",
                "*.test_to_gspmd_sharding_cache_with_and_without_device",
            ),
            _ONE_DEVICE,
        ),
        **dict.fromkeys(
            (
                "*.test_compiled_out_info",
                "*.test_nullary_out_sharding_partial",
                "*.test_partial_sharded_prng_key_inp",
                "*.test_prng_sharding_propagation*",
                "*.test_wsc_named_sharding_nullary",
            ),
            _WHOLE_ARRAYS,
        ),
        **dict.fromkeys(
            (
                "*.test_abstract_mesh_lower",
                "*.test_empty_mesh_to_out_sharding",
                "*.test_in_out_shardings_unconstrained_error",
                "*.test_jit_out_shardings_unconstrained",
                "*.test_jit_with_sharding_constraint_committed_inp_error",
            ),
            _WIDER,
        ),
        "*.test_jit_token_input": _TOKENS,
        "*.test_jit_with_mesh_context_manager": "shardings: a mesh as a context, which ipu.jit refuses by name",
        "*.test_shape_dtype_struct_as_const_error": "wording: of JAX's own error about a ShapeDtypeStruct",
        **dict.fromkeys(("*.test_reshape6", "*.test_reshape19"), _SIZE),
    },
    "shard_map_test": {
        "*.test_different_devices_shmap_abstract_mesh_cache_hit": _COUNTS,
        "*.test_mutable_array_arg*": _SHARDED_REFS,
        "*.test_partial_auto_error_invalid_auto": _WIDER,
        "*.test_all_gather_invariant_basic": _WHOLE_ARRAYS,
        **dict.fromkeys(
            (
                "*.test_replicated_unreduced_bitcast*",
                "*.test_unreduced_replicated_bitcast*",
                "*.test_sharded_unreduced_roundtrip_check_vma_false*",
                "*.test_reduced_pcast_fwd_unreduced_bwd",
            ),
            _TERMS,
        ),
    },
    "shard_alike_test": {
        "*.test_shard_input_as_output": _COUNTS,
    },
    "state_test": {
        "PinnedBuffersTest.*": "internals: buffers of a type of their own, which ipu.jit refuses by name",
    },
    "pallas/tpu_pallas_interpret_test": {
        "*.test_inputs_and_outputs_not_evenly_divisible_by_block_shape": _SIZE,
        "*.test_skip_floating_point_ops": _TEXT,
    },
    "export_test": {
        "*.test_grad_with_sharding_*": _TEXT,
        "*.test_explicit_sharding_dot_general_*": _TEXT,
        "*.test_lower_load_with_different_partitioners_*use_shardy_on_save_False": _GSPMD,
    },
    "hijax_test": {
        "HijaxTest.test_lower_*_arg_names_for_*": _OBJECT,
        "HijaxTransformCoverageTest.test_custom_jvp_with_hiprimitive_lowered": _OBJECT,
    },
    "jaxpr_effects_test": {
        **dict.fromkeys(
            (
                "EffectfulJaxprLoweringTest.test_lowered_jaxpr_*",
                "EffectfulJaxprLoweringTest.test_lowering_that_*",
                "EffectfulJaxprLoweringTest.test_nontrivial_lowering_*",
            ),
            _TEXT,
        ),
        "EffectfulJaxprLoweringTest.test_cannot_lower_unlowerable_effect": _WIDER,
        "EffectfulJaxprLoweringTest.test_cant_jit_and_pmap_function_with_ordered_effects": _WIDER,
    },
    "python_callback_test": {
        "PureCallbackTest.test_can_shard_pure_callback_maximally*": _TEXT,
        "PureCallbackTest.test_pure_callback_fastpath": _COUNTS,
        "PythonCallbackTest.test_callback_with_wrong_number_of_args_*": _RAISED,
        "PythonCallbackTest.test_exception_in_callback_*": _LOGS,
    },
}


def exclusion(file: str, name: str) -> str | None:
    """The reason why a test is excluded; None if it is not.

    Args:
        file: name of the test file, without `.py`.
        name: class and test, as in `JitTest.test_jit`.
    """
    return next((why for pattern, why in _EXCLUSIONS.get(file, {}).items() if fnmatchcase(name, pattern)), None)


def refusal(text: str) -> str | None:
    """The reason of an exclusion by the text of the exception that ends a test; None if it is a failure."""
    return next((why for words, why in REFUSALS.items() if words in text), None)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    for name, patterns in _EXCLUSIONS.items():
        print(name, *(f"  {pattern}: {why}" for pattern, why in patterns.items()), sep="\n")
