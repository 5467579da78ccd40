"""poplin: matrix multiplication, convolution and linear algebra, under PopLibs' names in snake_case.

    out = poplin.mat_mul(graph, a, b, prog, "MatMul")

Operands lie on tiles already; `create_mat_mul_input_lhs` and its like make tensors that lie where the plan uses them.
Source: Poplar & PopLibs user guide, tutorial 4; names from poplin.
"""

from ipujax.poplar.library import registrar as _registrar
from ipujax.poplin.convolution import ConvParams as ConvParams
from ipujax.poplin.convolution import add_bias as add_bias
from ipujax.poplin.convolution import convolution as convolution
from ipujax.poplin.convolution import create_biases as create_biases
from ipujax.poplin.convolution import create_input as create_input
from ipujax.poplin.convolution import create_weights as create_weights
from ipujax.poplin.convolution_passes import calculate_weight_deltas as calculate_weight_deltas
from ipujax.poplin.convolution_passes import convolution_bias_update as convolution_bias_update
from ipujax.poplin.convolution_passes import convolution_weight_update as convolution_weight_update
from ipujax.poplin.convolution_passes import get_gradient_params as get_gradient_params
from ipujax.poplin.convolution_passes import weights_transpose_chans_flip_xy as weights_transpose_chans_flip_xy
from ipujax.poplin.matmul import create_mat_mul_grouped_input_lhs as create_mat_mul_grouped_input_lhs
from ipujax.poplin.matmul import create_mat_mul_grouped_input_rhs as create_mat_mul_grouped_input_rhs
from ipujax.poplin.matmul import create_mat_mul_input_lhs as create_mat_mul_input_lhs
from ipujax.poplin.matmul import create_mat_mul_input_rhs as create_mat_mul_input_rhs
from ipujax.poplin.matmul import mat_mul as mat_mul
from ipujax.poplin.matmul import mat_mul_acc as mat_mul_acc
from ipujax.poplin.matmul import mat_mul_grouped as mat_mul_grouped
from ipujax.poplin.matmul import mat_mul_grouped_acc as mat_mul_grouped_acc
from ipujax.poplin.matmul import transpose_grouped_matrix as transpose_grouped_matrix
from ipujax.poplin.triangular import cholesky as cholesky
from ipujax.poplin.triangular import triangular_mask as triangular_mask
from ipujax.poplin.triangular import triangular_solve as triangular_solve
from ipujax.public import public_names as _public_names

add_codelets = _registrar("poplin")
__dir__ = _public_names(globals())
