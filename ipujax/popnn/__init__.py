"""popnn: operations of neural networks other than linear algebra, under PopLibs' names in snake_case.

Non-linearities and their gradients, pooling, losses, normalisation; recurrent layers in `popnn.lstm` and `popnn.gru`,
connectionist temporal classification in `popnn.ctc_loss`. All are compositions of operations of the other libraries.
Source: names from popnn.
"""

from ipujax.poplar.library import check_arguments as _check_arguments, registrar as _registrar
from ipujax.popnn import ctc_loss as ctc_loss, gru as gru, lstm as lstm
from ipujax.popnn.loss import (
    LOSSES as LOSSES,
    arg_max as arg_max,
    arg_min as arg_min,
    calc_accuracy as calc_accuracy,
    calc_loss as calc_loss,
    max_and_arg_max as max_and_arg_max,
    min_and_arg_min as min_and_arg_min,
)
from ipujax.popnn.non_linearity import (
    NON_LINEARITIES as NON_LINEARITIES,
    log_softmax as log_softmax,
    non_linearity as non_linearity,
    non_linearity_in_place as non_linearity_in_place,
    non_linearity_input_gradient as non_linearity_input_gradient,
    softmax as softmax,
)
from ipujax.popnn.norms import (
    batch_norm as batch_norm,
    batch_norm_gradients as batch_norm_gradients,
    batch_norm_param_gradients as batch_norm_param_gradients,
    batch_norm_statistics as batch_norm_statistics,
    batch_norm_whiten as batch_norm_whiten,
    batch_normalise as batch_normalise,
    create_norm_params as create_norm_params,
    group_norm as group_norm,
    group_norm_gradients as group_norm_gradients,
    group_norm_param_gradients as group_norm_param_gradients,
    group_norm_statistics as group_norm_statistics,
    group_norm_whiten as group_norm_whiten,
    group_normalise as group_normalise,
    instance_norm as instance_norm,
    instance_norm_gradients as instance_norm_gradients,
    instance_norm_param_gradients as instance_norm_param_gradients,
    instance_norm_statistics as instance_norm_statistics,
    instance_norm_whiten as instance_norm_whiten,
    instance_normalise as instance_normalise,
    layer_norm as layer_norm,
    layer_norm_gradients as layer_norm_gradients,
    layer_norm_param_gradients as layer_norm_param_gradients,
    layer_norm_statistics as layer_norm_statistics,
    layer_norm_whiten as layer_norm_whiten,
    layer_normalise as layer_normalise,
    norm_param_update as norm_param_update,
)
from ipujax.popnn.pooling import PoolParams as PoolParams, pool as pool, pool_input_gradient as pool_input_gradient
from ipujax.popops import top_k as top_k
from ipujax.public import public_names as _public_names

add_codelets = _registrar("popnn")
__dir__ = _public_names(globals(), "ctc_loss", "gru", "lstm")
for _library in (globals(), *map(vars, (ctc_loss, gru, lstm))):
    _check_arguments(_library)
