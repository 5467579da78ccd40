"""LSTM layers: forward, backward and weight update passes over sequences.

    params = lstm.LstmParams(poplar.FLOAT, batch_size, time_steps, [in_size, out_size])
    weights, state = lstm.create_weights(graph, params), lstm.create_initial_state(graph, params)
    y, cell, kept = lstm.lstm_fwd(graph, params, prog, state, weights, x, keep_intermediates=True)
    d_state, dx, d_weights = lstm.lstm_bwd_with_wu(graph, params, prog, state, kept, weights, x, y, dy)

Equations are in `ipujax.recurrent`. Weights are [4, in, out] for inputs and [4, out, out] for outputs, biases
[4, out], their units in the order forget, input, candidate, output unless `cell_order` says otherwise. The loop over
steps is a `Repeat` of the control program. Gradients of weights are one multiplication over all steps, after the loop.
Source: popnn `Lstm.hpp`, `LstmDef.hpp`. Limits: one layer a call, no recomputation in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ipujax.poplar.library import add
from ipujax.popnn.rnn import (
    GRADIENTS,
    RecurrentParams,
    RecurrentWeights,
    backward,
    check,
    create_operands,
    forward,
    weight_gradients,
)
from ipujax.popops.fills import zero
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor, concat

NUM_INTERMEDIATES = GRADIENTS["lstm"].num_intermediates
_OUTPUT_FACTORS = (3, 4)  # indices of the intermediates whose product is the output: o and tanh(c')


@dataclass(frozen=True, slots=True, eq=False)
class LstmParams(RecurrentParams):
    """LSTM layer; see `RecurrentParams`. `cell_order` orders "forget", "input", "candidate" and "output"."""

    @property
    def cell_name(self) -> str:
        return "lstm"


@dataclass(frozen=True, slots=True, eq=False)
class LstmState:
    """Recurrent state, or its gradients: output and cell state, each [batch, out]."""

    output: Tensor
    cell_state: Tensor

    def named(self) -> dict[str, Tensor]:
        """Return both tensors of an initial state, by their names in errors."""
        return {"initial output": self.output, "initial cell state": self.cell_state}


class LstmWeights(RecurrentWeights):
    """Parameters of a layer, or their gradients: [4, in, out], [4, out, out] and [4, out]."""

    __slots__ = ()


def create_input(graph: Graph, params: LstmParams, name: str = "input") -> Tensor:
    """Create a tensor [steps, batch, in] mapped as `lstm_fwd` slices it.

    Source: popnn::lstm::createInput.
    """
    return _create_operands(graph, params, {0: name})[0]


def create_initial_state(graph: Graph, params: LstmParams, name: str = "state") -> LstmState:
    """Create two tensors [batch, out] mapped as `lstm_fwd` uses them, not yet written; see `zero_initial_state`.

    Source: popnn::lstm::createInitialState.
    """
    return LstmState(*_create_operands(graph, params, {1: f"{name}/output", 2: f"{name}/cell"}))


def zero_initial_state(graph: Graph, state: LstmState, prog: Program, name: str = "zero_state") -> None:
    """Write zeros to a state.

    Source: popnn::lstm::zeroInitialState.
    """
    zero(graph, state.output, prog, f"{name}/output")
    zero(graph, state.cell_state, prog, f"{name}/cell")


def create_weights(graph: Graph, params: LstmParams, name: str = "weights") -> LstmWeights:
    """Create the parameters of a layer, mapped as `lstm_fwd` uses them, not yet written.

    Source: popnn::lstm::createWeights.
    """
    names = {3: f"{name}/input", 4: f"{name}/output", 5: f"{name}/biases"}
    return LstmWeights(*_create_operands(graph, params, names))


def _create_operands(graph: Graph, params: LstmParams, names: Mapping[int, str]) -> list[Tensor]:
    # Mapped as `pre_calc_weights` uses them: mapped for the joined product, that one costs 3 % more.
    return create_operands(graph, params, forward(params, keep=False, pre_calc_weights=True), names)


def lstm_fwd(
    graph: Graph,
    params: LstmParams,
    prog: Program,
    state_init: LstmState,
    weights: LstmWeights,
    x: Tensor,
    name: str = "lstm_fwd",
    *,
    keep_intermediates: bool = False,
    pre_calc_weights: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run a layer over sequences.

    Args:
        graph: graph to add to.
        params: the layer.
        prog: program to add to.
        state_init: the state before the first step.
        weights: the layer's parameters.
        x: [steps, batch, in].
        name: debug name.
        keep_intermediates: also return the intermediates for the backward pass.
        pre_calc_weights: multiply the whole sequence by the input weights at once, before the loop: faster, but the
            products [steps, batch, 4, out] take memory.

    Returns:
        The outputs [steps, batch, out], or those of the last step [batch, out]; the last cell state [batch, out]; and
        the intermediates [6, steps, batch, out] or None.

    Raises:
        GraphError: tensors without the type and shapes of this layer.

    Source: popnn::lstm::lstmFwd.
    """
    check(name, params, state_init.named(), weights, x)
    operands = [x, state_init.output, state_init.cell_state, *weights.tensors(), *params.lengths]
    run = forward(params, keep_intermediates, pre_calc_weights)
    output, cell, intermediates = add(graph, run, operands, prog, name)
    return output, cell, concat([part.expand_dims(0) for part in intermediates]) if keep_intermediates else None


def lstm_bwd(
    graph: Graph,
    params: LstmParams,
    prog: Program,
    fwd_state_init: LstmState,
    fwd_intermediates: Tensor,
    weights: LstmWeights,
    x: Tensor,
    output: Tensor,
    output_grad: Tensor,
    last_cell_state_grad: Tensor | None = None,
    name: str = "lstm_bwd",
) -> tuple[LstmState, Tensor | None, Tensor]:
    """Run the backward pass, from the last step to the first.

    Args:
        graph: graph to add to.
        params: the layer.
        prog: program to add to.
        fwd_state_init: the state before the first step.
        fwd_intermediates: from `lstm_fwd`.
        weights: the layer's parameters.
        x: [steps, batch, in]; checked, its gradient does not depend on it.
        output: from `lstm_fwd`; checked likewise.
        output_grad: gradients of the outputs, of the shape of `output`.
        last_cell_state_grad: gradients of the last cell state [batch, out], zeros when None.
        name: debug name.

    Returns:
        Gradients of the initial state; of the input [steps, batch, in], or None if the layer is to calculate none; and
        of the operands of the units' non-linearities, [4, steps, batch, out], for `lstm_wu`.

    Raises:
        GraphError: tensors without the type and shapes of this layer.

    Source: popnn::lstm::lstmBwd.
    """
    check(name, params, fwd_state_init.named(), weights, x, {
        "output": (output, params.output_shape),
        "gradient of the output": (output_grad, params.output_shape),
        "intermediate": (fwd_intermediates, (NUM_INTERMEDIATES, *params.sequence_shape)),
        **({} if last_cell_state_grad is None else {"cell gradient": (last_cell_state_grad, params.state_shape)}),
    })  # fmt: skip
    intermediates = [fwd_intermediates[n] for n in range(NUM_INTERMEDIATES)]
    cell = [] if last_cell_state_grad is None else [last_cell_state_grad]
    operands = [output_grad, weights.input_weights, weights.output_weights, *intermediates, *cell, *params.lengths]
    d_h, d_c, d_x, d_units = add(graph, backward(params, len(cell)), operands, prog, name)
    # From [steps, batch, units, out], as the scan stacks them.
    return LstmState(d_h, d_c), d_x, d_units.transpose((2, 0, 1, 3))


def lstm_wu(
    graph: Graph,
    params: LstmParams,
    prog: Program,
    fwd_state_init: LstmState,
    fwd_intermediates: Tensor,
    bwd_intermediates: Tensor,
    weights: LstmWeights,
    x: Tensor,
    output: Tensor,
    name: str = "lstm_wu",
) -> LstmWeights:
    """Compute gradients of the weights, from the intermediates of both passes.

    Args:
        graph: graph to add to.
        params: the layer.
        prog: program to add to.
        fwd_state_init: the state before the first step.
        fwd_intermediates: from `lstm_fwd`.
        bwd_intermediates: from `lstm_bwd`.
        weights: the layer's parameters; checked, their gradients do not depend on them.
        x: [steps, batch, in].
        output: from `lstm_fwd`.
        name: debug name.

    Returns:
        New tensors of the shapes of the weights.

    Raises:
        GraphError: tensors without the type and shapes of this layer.

    Source: popnn::lstm::lstmWU.
    """
    check(name, params, fwd_state_init.named(), weights, x, {
        "output": (output, params.output_shape),
        "intermediate": (fwd_intermediates, (NUM_INTERMEDIATES, *params.sequence_shape)),
        "backward intermediate": (bwd_intermediates, (len(params.cell_order), *params.sequence_shape)),
    })  # fmt: skip
    # Without the full sequence the outputs of earlier steps are recomputed from two intermediates.
    outputs = [output] if params.output_full_sequence else [fwd_intermediates[k] for k in _OUTPUT_FACTORS]
    operands = [bwd_intermediates, x, fwd_state_init.output, *outputs]
    return LstmWeights(*add(graph, _weight_gradients(params), operands, prog, name))


def _weight_gradients(params: LstmParams) -> Callable[..., tuple[jax.Array, ...]]:
    """Make the function of the units' gradients, input, initial output, and outputs or the two factors of them."""

    def run(d_units: jax.Array, x: jax.Array, first: jax.Array, *outputs: jax.Array) -> tuple[jax.Array, ...]:
        all_outputs = outputs[0] if len(outputs) == 1 else outputs[0] * outputs[1]
        before = jnp.concatenate([first[None], all_outputs[:-1]])
        return weight_gradients(params)(d_units, x, before)

    return run


def lstm_bwd_with_wu(
    graph: Graph,
    params: LstmParams,
    prog: Program,
    fwd_state_init: LstmState,
    fwd_intermediates: Tensor,
    weights: LstmWeights,
    x: Tensor,
    output: Tensor,
    output_grad: Tensor,
    last_cell_state_grad: Tensor | None = None,
    name: str = "lstm_bwd",
) -> tuple[LstmState, Tensor | None, LstmWeights]:
    """Run `lstm_bwd` and `lstm_wu`; returns gradients of the initial state, the input (or None), and the weights.

    Source: popnn::lstm::lstmBwdWithWU.
    """
    common = (graph, params, prog, fwd_state_init, fwd_intermediates)
    state, d_x, units = lstm_bwd(*common, weights, x, output, output_grad, last_cell_state_grad, name)
    return state, d_x, lstm_wu(*common, units, weights, x, output, f"{name}/weights")
