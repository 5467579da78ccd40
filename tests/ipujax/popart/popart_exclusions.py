"""PopART's own tests that fail against `ipujax.popart`, with a reason each; see `test_popart_own.py`.

Names are file and function: a function counts if one of its cases fails.
"""

from __future__ import annotations

from collections.abc import Mapping

_NUMPY = "the test's reference overflows or has another element type with the NumPy of today"
_ONNX = "the test calls a reference of onnx whose signature has changed"
_TEXT = "the test compares the text of an error"
_PATTERNS = "PopART raises if a rewrite is turned off that makes a gradient; JAX differentiates without"
_UNCHECKED = "PopART refuses arguments that this compiler computes with"
_SCAN = "PopART's Scan hands slices with the axis of length 1 to its body, ONNX's without"
_WHOLE_NUMBERS = "JAX has no gradients of whole numbers"
_NONSPATIAL = "batch normalisation of opset 7 with spatial = 0"
_CORNERS = "JAX's gradient at a corner or a pole is another one of the possible values"
_MIXED = "float16 with float32 is float32 in JAX"
_NOT_HERE = "not supported, see docs/popart.md"
_EMPTY = "a tensor with no elements"
_OVERLAP = "PopART computes wrong gradients of overlapping slices with noOverlap, and tests that; here they are right"

_BY_REASON: Mapping[str, str] = {
    _NUMPY: """
        swish_test::test_swish swish_test::test_swish_grad softplus_test::test_softplus
        softplus_test::test_softplus_grad softsign_test::test_softsign softsign_test::test_softsign_grad
        erf_test::test_erf_grad_0b incrementmod_test::test_incrementmod
    """,
    _ONNX: "resize_test_0::test_resize_11 resize_test_0::test_resize_10",
    _TEXT: """
        call_test::test_subgraph_with_zero_outputs call_test::test_subgraph_call_mismatch0
        call_test::test_subgraph_call_mismatch1 matmul_test_mismatched_inputs::test_matmul_mismatched_inputs
        matmul_test_scalar_input::test_matmul_scalar_input operators_test::test_transpose_sizes
        reshape_test::test_reshape_neg_one_error slice_test::test_slice_error_start_input
        subsample_test::test_subsample6 tile_test::test_tile_variable_repeats tile_test::test_tile_invalid_repeat_vals
        multiconv_test::test_conv_dithering
    """,
    _PATTERNS: """
        pattern_op_removal_test::test_atan2_arg0_grad_error pattern_op_removal_test::test_atan2_arg1_grad_error
        pattern_op_removal_test::test_convflipweights_grad_error pattern_op_removal_test::test_cos_grad_error
        pattern_op_removal_test::test_reciprocal_grad_error pattern_op_removal_test::test_sqrt_grad_error
        pattern_op_removal_test::test_subtract_grad_error pattern_op_removal_test::test_exp_grad_error
        pattern_op_removal_test::test_expm1_grad_error pattern_op_removal_test::test_cosh_grad_error
        pattern_op_removal_test::test_log1p_grad_error
    """,
    _UNCHECKED: """
        batchnorm_test::test_batchnorm_train_0_errorcases loss_test::test_nll_loss_input_with_invalid_input
        loss_test::test_3d_nll_loss_input loss_test::test_nll_loss_with_ignored_index
        multiconv_test::test_multiconv_bad_options operators_test::test_reverse
        pooling_test::test_average_pool_with_count_include_pad pooling_test::test_average_pool_invalid_params
        pooling_test::test_maxpool10_dilations randomnormal_test::test_randomnormal_seederror
        randomnormal_test::test_randomnormal_bad_dtype randomuniform_test::test_randomuniform_seederror
        randomuniform_test::test_randomuniform_bad_dtype shapeddropout_test::test_shapeddropout_invalid_ratio
        shapeddropout_test::test_shapeddropout_invalid_shape sum_mean_test::test_mean_training_3
        tile_test::test_tile_invalid_repeats_size
    """,
    _OVERLAP: "dynamicslice_test::test_dynamicslice_overlap_wrong dynamicupdate_test::test_dynamicupdate_overlap_wrong",
    _SCAN: "scan_test::test_scan_zip scan_test::test_scan_basic_rnn scan_test::test_scan_const_implicit_tensor",
    _WHOLE_NUMBERS: """
        reducemedian_test::test_reducemedian_training_1 reducemedian_test::test_reducemedian_training_2
    """,
    _NONSPATIAL: """
        batchnorm_test::test_batchnorm_train_nonspatial batchnorm_test::test_batchnorm_train_nonspatial_2
        batchnorm_test::test_batchnorm_test_nonspatial batchnorm_test::test_batchnorm_test_nonspatial_2
    """,
    _CORNERS: """
        abs_sign_test::test_abs_training atan2_test::test_atan2_grad
        pow_test::test_pow_grad_corner_cases resize_test_0::test_nearest_grad resize_test_0::test_resize_nearest_grad_1d
        resize_test_0::test_resize_nearest_grad_2d upsample_test::test_upsample_grad
    """,
    _MIXED: """
        mul_test::test_mixed_precision_floating_point_mul mul_test::test_fp16_and_nonscalar_fp32_input_mul
        operators_test_2::test_clip11_default_max_with_half
    """,
    _NOT_HERE: """
        ctc_beam_search_decoder::test_ctc_beam_search_decoder graph_replication_test::test_weight_update
        graph_replication_test::test_weight_update_replicated
        batchnorm_pytorch_fp16_test::test_batchnorm_fp16_torch_version_noexception loss_test::test_nll_all_ignore_index
        operators_test::test_get_op_types operators_test::test_get_op_types_definition
        operators_test::test_pad_type_edge operators_test::test_pad_type_reflect
        operators_test::test_negative_padding_func operators_test::test_pad_negative_padding
    """,
    _EMPTY: """
        batchnorm_test::test_batchnorm_train_1 batchnorm_test::test_batchnorm_train_3
        batchnorm_test::test_batchnorm_test_3
    """,
    "not examined yet": """
        detach_test::test_detach_grad_branches l1_test::test_l1_training
        dynamicslice_test::test_dynamicslice_no_leading_slice_dim
        dynamicupdate_test::test_dynamicupdate_no_leading_slice_dim
        dropout_test::test_dropout_training8 groupnorm_test::test_groupnorm_4
        shapeddropout_test::test_shapeddropout_droprows operators_test_2::test_convtranspose_grad
        scatter_test::test_scatter_3 auto_pad_test::test_average_pool_2_auto_pad
        auto_pad_test::test_average_pool_3_auto_pad operators_test_2::test_convtranspose_auto_pad
        operators_test_2::test_convtranspose_auto_pad_same_upper
    """,
}

# File and function → reason.
EXCLUDED: Mapping[str, str] = {name: reason for reason, names in _BY_REASON.items() for name in names.split()}
