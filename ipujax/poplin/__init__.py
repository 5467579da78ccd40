"""poplin: matrix multiplication, convolution and linear algebra, under PopLibs' names in snake_case.

    out = poplin.mat_mul(graph, a, b, prog, "MatMul")

Operands need a tile mapping; `create_mat_mul_input_lhs` and its like map tensors as the plan uses them.
Source: Poplar & PopLibs user guide, tutorial 4; names from poplin.
"""

from ipujax.poplar.library import check_arguments as _check_arguments, registrar as _registrar
from ipujax.poplin.convolution import (
    ConvParams as ConvParams,
    add_bias as add_bias,
    calculate_weight_deltas as calculate_weight_deltas,
    convolution as convolution,
    convolution_bias_update as convolution_bias_update,
    convolution_weight_update as convolution_weight_update,
    create_biases as create_biases,
    create_input as create_input,
    create_weights as create_weights,
    get_gradient_params as get_gradient_params,
    weights_transpose_chans_flip_xy as weights_transpose_chans_flip_xy,
)
from ipujax.poplin.matmul import (
    create_mat_mul_grouped_input_lhs as create_mat_mul_grouped_input_lhs,
    create_mat_mul_grouped_input_rhs as create_mat_mul_grouped_input_rhs,
    create_mat_mul_input_lhs as create_mat_mul_input_lhs,
    create_mat_mul_input_rhs as create_mat_mul_input_rhs,
    mat_mul as mat_mul,
    mat_mul_acc as mat_mul_acc,
    mat_mul_grouped as mat_mul_grouped,
    mat_mul_grouped_acc as mat_mul_grouped_acc,
    transpose_grouped_matrix as transpose_grouped_matrix,
)
from ipujax.poplin.triangular import (
    cholesky as cholesky,
    triangular_mask as triangular_mask,
    triangular_solve as triangular_solve,
)
from ipujax.public import public_names as _public_names

add_codelets = _registrar("poplin")
__dir__ = _public_names(globals())
_check_arguments(globals())
