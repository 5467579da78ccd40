"""Connectionist temporal classification: the loss of labels that are not aligned with the data, and its gradient.

A path gives one class for every time step; it spells a label when repetitions and then blanks are removed. The loss
is the negative logarithm of the probability of all paths that spell the label. The
loops of its recursions over time are `Repeat`s of the control program, and logarithms are float whatever the data is.

    loss, gradient = ctc_loss.calc_loss_and_gradient_log_probabilities(
        graph, poplar.FLOAT, log_probs, labels, data_lengths, label_lengths, prog, blank_class=0)

Shapes: data [time, batch, classes], labels [batch, length], lengths [batch]; entries beyond a sequence's lengths are
ignored. A label that no path of its data spells has the loss infinity and the gradient zero.
Source: popnn `CTCLoss.hpp`; A. Graves et al., ICML 2006. Limits: no plan; labels are not checked at run time.

The recursions sum over all paths that spell a label. A label of L symbols is extended to blank, symbol, blank, …,
blank: 2 L + 1 positions. From one time step to the next a path stays at its position, advances by 1, or by 2 over a
blank between different symbols. `alpha` sums paths from the start to a position, with its emission, `beta` paths from a
position to an end, without it; both are logarithms.

Source: A. Graves et al., ICML 2006, equations 6 to 15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.poplar.library import add
from ipujax.poplar.types import element_type
from ipujax.poplin.operands import create_mapped_operands
from ipujax.recurrent import counting_dtype
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor, dtype_name

_LOG_ZERO = np.float32(-1e30)  # logarithm of probability 0: finite, so that differences of two of them are no NaN
_IMPOSSIBLE = np.float32(-1e29)  # far below any sum of logarithms of float probabilities


def loss_of_paths(
    log_probs: jax.Array, labels: jax.Array, data_lengths: jax.Array, label_lengths: jax.Array, *, blank: int
) -> jax.Array:
    """Return the negative logarithm of the probability of all paths, float [batch]; infinity without any path.

    Args:
        log_probs: [time, batch, classes].
        labels: [batch, length].
        data_lengths: valid time steps [batch].
        label_lengths: valid symbols [batch].
        blank: class of no symbol.
    """
    emissions, can_skip = _emissions(log_probs, labels, blank)
    alpha, _ = _sum_from_start(emissions, can_skip, data_lengths, all_steps=False)
    total = _sum_over_ends(alpha, _is_end(alpha.shape[1], label_lengths))
    return jnp.where(total > _IMPOSSIBLE, -total, jnp.inf)


def loss_and_gradient(
    log_probs: jax.Array,
    labels: jax.Array,
    data_lengths: jax.Array,
    label_lengths: jax.Array,
    *,
    blank: int,
    include_softmax_gradient: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return the loss of `loss_of_paths` and its gradient, floats [batch] and [time, batch, classes].

    Args:
        log_probs: see `loss_of_paths`, as all that follow.
        labels: [batch, length].
        data_lengths: [batch].
        label_lengths: [batch].
        blank: class of no symbol.
        include_softmax_gradient: return the gradient of the log-softmax's operand, else that of `log_probs`.
    """
    time, _, classes = log_probs.shape
    emissions, can_skip = _emissions(log_probs, labels, blank)
    is_end = _is_end(emissions.shape[2], label_lengths)
    last, alpha = _sum_from_start(emissions, can_skip, data_lengths, all_steps=True)
    assert alpha is not None, "alpha of all steps with `all_steps`"
    total = _sum_over_ends(last, is_end)
    beta = _sum_to_end(emissions, can_skip, data_lengths, is_end)
    # The probability that a path of the label is at a position, summed to that of each emitted class.
    at_position = jnp.exp(alpha + beta - total[None, :, None])
    is_class = _extend_labels(labels, blank)[..., None] == jnp.arange(classes, dtype=counting_dtype(labels.dtype))
    emits_class = jnp.einsum("tbs,bsc->tbc", at_position, is_class.astype(at_position.dtype))
    gradient = jnp.exp(log_probs.astype(emits_class.dtype)) - emits_class if include_softmax_gradient else -emits_class
    # No gradient after the end of a sequence, nor for a label that no path spells: `total` is arbitrary there.
    counts = _is_valid_step(time, data_lengths) & (total > _IMPOSSIBLE)[None]
    loss = jnp.where(total > _IMPOSSIBLE, -total, jnp.inf)
    return loss, jnp.where(counts[..., None], gradient, 0)


def _extend_labels(labels: jax.Array, blank: int) -> jax.Array:
    """Return the classes of all positions, [batch, 2 length + 1]."""
    labels = labels.astype(counting_dtype(labels.dtype))  # a narrow one may lack the class `blank`
    blanks = jnp.full_like(labels, blank)
    pairs = jnp.stack([blanks, labels], -1).reshape(labels.shape[0], -1)
    return jnp.concatenate([pairs, jnp.full((labels.shape[0], 1), blank, labels.dtype)], 1)


def _emissions(log_probs: jax.Array, labels: jax.Array, blank: int) -> tuple[jax.Array, jax.Array]:
    """Return emissions of positions [time, batch, positions], and a mask of those that an advance by 2 reaches."""
    extended = _extend_labels(labels, blank)
    wide = jnp.maximum(log_probs.astype(jnp.float32), _LOG_ZERO)
    # Labels beyond a sequence's length are arbitrary: an index out of range must not become NaN.
    emissions = jnp.take_along_axis(wide, extended[None].astype(jnp.int32), axis=2, mode="clip")
    blanks = jnp.full((extended.shape[0], 2), blank, extended.dtype)
    two_before = jnp.concatenate([blanks, extended], 1)[:, : extended.shape[1]]
    return emissions, (extended != blank) & (extended != two_before)


def _is_valid_step(time: int, lengths: jax.Array) -> jax.Array:
    return jnp.arange(time, dtype=counting_dtype(lengths.dtype))[:, None] < lengths[None]  # [time, batch]


def _is_end(num_positions: int, label_lengths: jax.Array) -> jax.Array:
    # A path ends at the last symbol, or at the blank after it.
    position = jnp.arange(num_positions, dtype=jnp.int32)
    last_blank = 2 * label_lengths.astype(jnp.int32)[:, None]
    return (position == last_blank) | (position == last_blank - 1)


def _sum_over_ends(alpha: jax.Array, is_end: jax.Array) -> jax.Array:
    at_end = jnp.where(is_end, alpha, _LOG_ZERO)
    greatest = jnp.max(at_end, 1, keepdims=True)
    return greatest[:, 0] + jnp.log(jnp.sum(jnp.exp(at_end - greatest), 1))


def _log_sum_exp(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    # Less the greatest, so that no exponential overflows and at least one is 1.
    greatest = jnp.maximum(jnp.maximum(a, b), c)
    return greatest + jnp.log(jnp.exp(a - greatest) + jnp.exp(b - greatest) + jnp.exp(c - greatest))


def _log_zeros(x: jax.Array, num_positions: int) -> jax.Array:
    return jnp.full((x.shape[0], num_positions), _LOG_ZERO)


def _sum_from_start(
    emissions: jax.Array, can_skip: jax.Array, data_lengths: jax.Array, *, all_steps: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return `alpha` of the last valid step [batch, positions]; with `all_steps` also [time, batch, positions]."""
    time, batch, num_positions = emissions.shape

    def step(alpha: jax.Array, operands: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        emission, is_valid = operands
        from_1_before = jnp.concatenate([_log_zeros(alpha, 1), alpha], 1)[:, :num_positions]
        from_2_before = jnp.concatenate([_log_zeros(alpha, 2), alpha], 1)[:, :num_positions]
        new = _log_sum_exp(alpha, from_1_before, jnp.where(can_skip, from_2_before, _LOG_ZERO)) + emission
        alpha = jnp.where(is_valid, new, alpha)
        return alpha, alpha if all_steps else None

    # Before the first step all paths are at the first blank: it leads to that blank and to the first symbol.
    first = jnp.zeros((batch, 1), emissions.dtype)
    start = jnp.concatenate([first, jnp.full((batch, num_positions - 1), _LOG_ZERO)], 1)
    return jax.lax.scan(step, start, (emissions, _is_valid_step(time, data_lengths)[..., None]))


def _sum_to_end(emissions: jax.Array, can_skip: jax.Array, data_lengths: jax.Array, is_end: jax.Array) -> jax.Array:
    """Return `beta` of all time steps, [time, batch, positions]."""
    time = emissions.shape[0]
    at_end = jnp.where(is_end, jnp.float32(0), _LOG_ZERO)

    def step(later: jax.Array, operands: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        emission, has_next = operands
        to_1_after = jnp.concatenate([later, _log_zeros(later, 1)], 1)[:, 1:]
        to_2_after = jnp.concatenate([jnp.where(can_skip, later, _LOG_ZERO), _log_zeros(later, 2)], 1)[:, 2:]
        beta = jnp.where(has_next, _log_sum_exp(later, to_1_after, to_2_after), at_end)
        return beta + emission, beta

    # True for a step that another valid step follows.
    has_next = jnp.arange(1, time + 1, dtype=counting_dtype(data_lengths.dtype))[:, None] < data_lengths[None]
    return jax.lax.scan(step, at_end, (emissions, has_next[..., None]), reverse=True)[1]


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
    """Create operand number `which` of the loss, mapped as the loss itself would read it."""
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
    """Add a loss to the graph after checks of its operands, with results of type `out_type`."""
    _check(name, operands, blank)
    kind = element_type(out_type, name)
    return add(
        graph, lambda *a: jax.tree.map(lambda y: y.astype(kind), function(*a, blank=blank)), operands, prog, name
    )


def _check(name: str, operands: Sequence[Tensor], blank_class: int) -> None:
    """Refuse operands of a loss that do not fit each other, and a blank that is no class."""
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
