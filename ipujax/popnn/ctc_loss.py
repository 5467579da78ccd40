"""Connectionist temporal classification: the loss of labels that are not aligned with the data, and its gradient.

A path gives one class for every time step; it spells a label when repetitions and then blanks are removed. The loss
is the negative logarithm of the probability of all paths that spell the label. The recursions are in `ctc_paths`; their
loops over time are `Repeat`s of the control program, and logarithms are float whatever the data is.

    loss, gradient = ctc_loss.calc_loss_and_gradient_log_probabilities(
        graph, poplar.FLOAT, log_probs, labels, data_lengths, label_lengths, prog, blank_class=0)

Shapes: data [time, batch, classes], labels [batch, length], lengths [batch]; entries beyond a sequence's lengths are
ignored. A label that no path of its data spells has the loss infinity and the gradient zero.
Source: popnn `CTCLoss.hpp`; A. Graves et al., ICML 2006. Limits: no plan; labels are not checked at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.poplar.library import add
from ipujax.poplin.operands import create_mapped_operands
from ipujax.popnn.ctc_paths import loss_and_gradient, loss_of_paths
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor, dtype_name


def create_data_input(
    graph: Graph, dtype: Any, batch_size: int, max_time: int, num_classes: int, name: str = "ctc_data"
) -> Tensor:
    """Create a tensor [time, batch, classes] mapped as the loss uses it.

    Source: popnn::ctc::createDataInput.
    """
    return _create_operand(graph, dtype, batch_size, max_time, 1, num_classes, 0, name)


def create_labels_input(
    graph: Graph, dtype: Any, batch_size: int, max_label_length: int, name: str = "ctc_labels"
) -> Tensor:
    """Create a tensor [batch, length] mapped as the loss uses it.

    Source: popnn::ctc::createLabelsInput.
    """
    return _create_operand(graph, dtype, batch_size, 1, max_label_length, 2, 1, name)


def _create_operand(
    graph: Graph, dtype: Any, batch: int, time: int, length: int, classes: int, which: int, name: str
) -> Tensor:
    # `dtype` is that of the operand; types and sizes of the others are any that the loss accepts.
    data, labels = (dtype, np.int32) if which == 0 else (np.float32, dtype)
    operands = [((time, batch, classes), data), ((batch, length), labels), ((batch,), np.int32), ((batch,), np.int32)]

    def build(scratch: Graph, tensors: Sequence[Tensor]) -> None:
        add(scratch, lambda *arrays: loss_of_paths(*arrays, blank=0), tensors, Program(), name)

    return create_mapped_operands(graph, operands, build, [which], [name])[0]


def calc_ctc_loss(
    graph: Graph,
    out_type: Any,
    log_probs: Tensor,
    labels: Tensor,
    data_lengths: Tensor,
    label_lengths: Tensor,
    prog: Program,
    blank_class: int,
    name: str = "ctc_loss",
) -> Tensor:
    """Compute the loss of each sequence.

    Args:
        graph: graph to add to.
        out_type: type of the result.
        log_probs: logarithms of probabilities [time, batch, classes].
        labels: classes other than the blank, integers [batch, length].
        data_lengths: valid time steps, integers [batch], at most `time`.
        label_lengths: valid symbols, integers [batch], at most `length`.
        prog: program to add to.
        blank_class: the class of no symbol.
        name: debug name.

    Returns:
        A new tensor [batch], infinity where no path spells the label.

    Raises:
        GraphError: tensors that do not match, or a blank out of the range of the classes.

    Source: popnn::ctc::calcCTCLossLogProbabilities.
    """
    operands = [log_probs, labels, data_lengths, label_lengths]
    return _add_loss(graph, out_type, loss_of_paths, operands, prog, blank_class, name)


def calc_ctc_loss_logits(
    graph: Graph,
    out_type: Any,
    logits: Tensor,
    labels: Tensor,
    data_lengths: Tensor,
    label_lengths: Tensor,
    prog: Program,
    blank_class: int,
    name: str = "ctc_loss",
) -> Tensor:
    """Compute the loss of each sequence from data before the softmax; arguments as of `calc_ctc_loss`.

    Source: popnn::ctc::calcCTCLossLogits.
    """
    operands = [logits, labels, data_lengths, label_lengths]
    return _add_loss(graph, out_type, _of_logits(loss_of_paths), operands, prog, blank_class, name)


def calc_loss_and_gradient_log_probabilities(
    graph: Graph,
    out_type: Any,
    log_probs: Tensor,
    labels: Tensor,
    data_lengths: Tensor,
    label_lengths: Tensor,
    prog: Program,
    blank_class: int,
    name: str = "ctc_loss",
    *,
    include_softmax_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each sequence, and its gradient.

    Args:
        graph: graph to add to.
        out_type: type of the results.
        log_probs: see `calc_ctc_loss`, as all that follow.
        labels: integers [batch, length].
        data_lengths: integers [batch].
        label_lengths: integers [batch].
        prog: program to add to.
        blank_class: the class of no symbol.
        name: debug name.
        include_softmax_gradient: return the gradient of the log-softmax's operand, else that of `log_probs`.

    Returns:
        New tensors [batch] and [time, batch, classes].

    Raises:
        GraphError: as `calc_ctc_loss`.

    Source: popnn::ctc::calcLossAndGradientLogProbabilities, option includeSoftmaxGradient.
    """
    function = partial(loss_and_gradient, include_softmax_gradient=include_softmax_gradient)
    operands = [log_probs, labels, data_lengths, label_lengths]
    return _add_loss(graph, out_type, function, operands, prog, blank_class, name)


def calc_loss_and_gradient_logits(
    graph: Graph,
    out_type: Any,
    logits: Tensor,
    labels: Tensor,
    data_lengths: Tensor,
    label_lengths: Tensor,
    prog: Program,
    blank_class: int,
    name: str = "ctc_loss",
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each sequence from data before the softmax, and the gradient of that data.

    Arguments as of `calc_loss_and_gradient_log_probabilities`.

    Source: popnn::ctc::calcLossAndGradientLogits.
    """
    function = _of_logits(partial(loss_and_gradient, include_softmax_gradient=True))
    operands = [logits, labels, data_lengths, label_lengths]
    return _add_loss(graph, out_type, function, operands, prog, blank_class, name)


# In float, as the recursions are; the gradient stays that of the logits with `include_softmax_gradient`.
def _of_logits(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *rest, blank: function(jax.nn.log_softmax(x.astype(jnp.float32), -1), *rest, blank=blank)


def _add_loss(
    graph: Graph,
    out_type: Any,
    function: Callable[..., Any],
    operands: Sequence[Tensor],
    prog: Program,
    blank: int,
    name: str,
) -> Any:
    _check(name, operands, blank)
    return add(
        graph, lambda *a: jax.tree.map(lambda y: y.astype(out_type), function(*a, blank=blank)), operands, prog, name
    )


def _check(name: str, operands: Sequence[Tensor], blank_class: int) -> None:
    data, labels, data_lengths, label_lengths = operands
    kinds = [np.dtype(t.dtype).kind for t in operands]
    got = ", ".join(f"{dtype_name(t.dtype)}{list(t.shape)}" for t in operands)
    if data.ndim != 3 or labels.ndim != 2 or kinds[0] != "f" or any(kind not in "iu" for kind in kinds[1:]):
        expected = "floats [time, batch, classes], integers [batch, length], [batch] and [batch]"
        raise GraphError(f"{name}: data and labels must be sequences", expected=expected, got=got)
    batch = data.shape[1]
    if labels.shape[0] != batch or not data_lengths.shape == label_lengths.shape == (batch,):
        raise GraphError(f"{name}: must have as many labels as sequences", expected=f"batch {batch}", got=got)
    if not data.shape[0] or not 0 <= blank_class < data.shape[2]:
        raise GraphError(f"{name}: the blank must be a class", expected=f"0 to {data.shape[2] - 1}", got=blank_class)


calc_ctc_loss_log_probabilities = calc_ctc_loss  # its name in PopLibs
