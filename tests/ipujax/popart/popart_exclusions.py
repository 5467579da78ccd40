"""PopART's own tests that fail against `ipujax.popart`, with a reason each; see `test_popart_own.py`.

Names are file and function: a function counts if one of its cases fails.
"""

from __future__ import annotations

from collections.abc import Mapping

_NUMPY = "the test's own arithmetic overflows, has another element type, or is refused by the NumPy of today"
_TORCH = "the PyTorch of today has another gradient at the origin; the test wants PopART's there"
_ONNXSCRIPT = "the PyTorch of today exports models with onnxscript, which is not here"
_OWN = "the test reads a gradient that it does not ask for"
_ROUNDING = "differences of the last bit, relative to results near zero"
_RANDOM = "another sequence of random numbers: 47.8 % are dropped, and 48 % are wanted"
_WHOLE_NUMBERS = "JAX has no gradients of whole numbers"
_OVERLAP = "PopART computes wrong gradients of overlapping slices with noOverlap, and tests that; here they are right"
_LOG = "the test reads PopLibs' log of convolutions"
_INFERENCE_PATTERN = "PopART cannot compute this operator without a pattern; here patterns make gradients alone"
_REFUSED_OPTION = "enableFloatingPointChecks is refused, see docs/popart.md"
_NOT_HERE = "not supported, see docs/popart.md"

_BY_REASON: Mapping[str, str] = {
    _NUMPY: """
        swish_test::test_swish swish_test::test_swish_grad softplus_test::test_softplus
        softplus_test::test_softplus_grad softsign_test::test_softsign softsign_test::test_softsign_grad
        erf_test::test_erf_grad_0b incrementmod_test::test_incrementmod operators_test::test_negative_padding_func
        operators_test::test_pad_negative_padding
    """,
    _TORCH: "atan2_test::test_atan2_grad",
    _ONNXSCRIPT: """
        lstm_test_2::test_import_torch_lstm lstm_test_2::test_import_torch_lstm_multi_run
        lstm_test_2::test_import_torch_lstm_train lstm_test_2::test_lstm_export_with_constantofshape
    """,
    _OWN: "batchnorm_test::test_batchnorm_train_3",
    _ROUNDING: """
        auto_pad_test::test_average_pool_2_auto_pad auto_pad_test::test_average_pool_3_auto_pad
        lstm_test_2::test_lstm_torch_grad_all_inputs
    """,
    _RANDOM: "shapeddropout_test::test_shapeddropout_droprows",
    _WHOLE_NUMBERS: """
        reducemedian_test::test_reducemedian_training_1 reducemedian_test::test_reducemedian_training_2
    """,
    _OVERLAP: "dynamicslice_test::test_dynamicslice_overlap_wrong dynamicupdate_test::test_dynamicupdate_overlap_wrong",
    _LOG: "multiconv_test::test_conv_dithering",
    _INFERENCE_PATTERN: "pattern_op_removal_test::test_cosh_grad_error",
    _REFUSED_OPTION: """
        batchnorm_pytorch_fp16_test::test_batchnorm_fp16_torch_version_noexception loss_test::test_nll_all_ignore_index
    """,
    _NOT_HERE: """
        ctc_beam_search_decoder::test_ctc_beam_search_decoder graph_replication_test::test_weight_update
        graph_replication_test::test_weight_update_replicated
    """,
}

# File and function → reason.
EXCLUDED: Mapping[str, str] = {name: reason for reason, names in _BY_REASON.items() for name in names.split()}
