"""GRU layers: forward, backward and weight update passes over sequences.

    params = gru.GruParams(poplar.FLOAT, batch_size, time_steps, [in_size, out_size])
    weights, state = gru.create_weights(graph, params), gru.create_initial_state(graph, params)
    y, kept = gru.gru_fwd(graph, params, state, x, weights, prog, keep_intermediates=True)
    d_state, dx, d_weights = gru.gru_bwd_with_wu(graph, params, prog, state, kept, weights, x, y, dy)

Equations are in `ipujax.recurrent`. Weights are [3, in, out] for inputs and [3, out, out] for outputs, biases
[3, out] or with `reset_after` [3, 2, out], their units in the order reset, update, candidate unless `cell_order` says
otherwise. The loop over steps is a `Repeat` of the control program.
Source: popnn `Gru.hpp`, `GruDef.hpp`. Limits: no attention (AUGRU), no recomputation in the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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

# Indices among the intermediates, in the order in which the cell's step returns them.
_RESET = 0
_OUTPUT_BEFORE = 3


@dataclass(frozen=True, slots=True, eq=False)
class GruParams(RecurrentParams):
    """GRU layer; see `RecurrentParams`. `cell_order` orders "reset", "update" and "candidate".

    Args:
        reset_after: apply the reset gate after the multiplication with the weights, not before it.
    """

    reset_after: bool = False

    @property
    def cell_name(self) -> str:
        return "gru_reset_after" if self.reset_after else "gru"

    @property
    def num_intermediates(self) -> int:
        """Number of intermediates of each step: r, u, c, the output before, and h U + b' with `reset_after`."""
        return GRADIENTS[self.cell_name].num_intermediates

    @property
    def biases_shape(self) -> tuple[int, ...]:
        """[3, out], or [3, 2, out] with `reset_after`: biases of inputs and of outputs."""
        return (len(self.cell_order), *((2,) if self.reset_after else ()), self.output_size)


class GruWeights(RecurrentWeights):
    """Parameters of a layer, or their gradients: [3, in, out], [3, out, out] and [3, out].

    With `reset_after` biases are [3, 2, out]: of inputs and of outputs.
    """

    __slots__ = ()


def create_input(graph: Graph, params: GruParams, name: str = "input") -> Tensor:
    """Create a tensor [steps, batch, in] mapped as `gru_fwd` slices it.

    Source: popnn::gru::createInput.
    """
    return _create_operands(graph, params, {0: name})[0]


def create_initial_state(graph: Graph, params: GruParams, name: str = "state") -> Tensor:
    """Create a tensor [batch, out] mapped as `gru_fwd` uses it, not yet written.

    Source: popnn::gru::createInitialState.
    """
    return _create_operands(graph, params, {1: name})[0]


def zero_initial_state(graph: Graph, state: Tensor, prog: Program, name: str = "zero_state") -> None:
    """Write zeros to a state."""
    zero(graph, state, prog, name)


def create_weights(graph: Graph, params: GruParams, name: str = "weights") -> GruWeights:
    """Create the parameters of a layer, mapped as `gru_fwd` uses them, not yet written.

    Source: popnn::gru::createWeights.
    """
    names = {2: f"{name}/input", 3: f"{name}/output", 4: f"{name}/biases"}
    return GruWeights(*_create_operands(graph, params, names))


def _create_operands(graph: Graph, params: GruParams, names: Mapping[int, str]) -> list[Tensor]:
    return create_operands(graph, params, forward(params, keep=False, pre_calc_weights=False), names)


def gru_fwd(
    graph: Graph,
    params: GruParams,
    state_init: Tensor,
    x: Tensor,
    weights: GruWeights,
    prog: Program,
    name: str = "gru_fwd",
    *,
    keep_intermediates: bool = False,
    pre_calc_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run a layer over sequences.

    Args:
        graph: graph to add to.
        params: the layer.
        state_init: the output before the first step [batch, out].
        x: [steps, batch, in].
        weights: the layer's parameters.
        prog: program to add to.
        name: debug name.
        keep_intermediates: also return the intermediates for the backward pass.
        pre_calc_weights: multiply the whole sequence by the input weights at once, before the loop: faster, but the
            products [steps, batch, 3, out] take memory.

    Returns:
        The outputs [steps, batch, out], or that of the last step [batch, out]; and the intermediates
        [4 or 5, steps, batch, out] or None.

    Raises:
        GraphError: tensors without the type and shapes of this layer.

    Source: popnn::gru::gruFwd.
    """
    check(name, params, {"initial output": state_init}, weights, x)
    operands = [x, state_init, *weights.tensors(), *params.lengths]
    output, intermediates = add(graph, forward(params, keep_intermediates, pre_calc_weights), operands, prog, name)
    return output, concat([part.expand_dims(0) for part in intermediates]) if keep_intermediates else None


def gru_bwd(
    graph: Graph,
    params: GruParams,
    prog: Program,
    fwd_output_init: Tensor,
    fwd_intermediates: Tensor,
    weights: GruWeights,
    x: Tensor,
    output: Tensor,
    output_grad: Tensor,
    name: str = "gru_bwd",
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run the backward pass, from the last step to the first.

    Args:
        graph: graph to add to.
        params: the layer.
        prog: program to add to.
        fwd_output_init: the output before the first step.
        fwd_intermediates: from `gru_fwd`.
        weights: the layer's parameters.
        x: [steps, batch, in]; checked, its gradient does not depend on it.
        output: from `gru_fwd`; checked likewise.
        output_grad: gradients of the outputs, of the shape of `output`.
        name: debug name.

    Returns:
        Gradients of the initial output; of the input [steps, batch, in], or None if the layer is to calculate none; and
        of the operands of the units' non-linearities, [3, steps, batch, out], for `gru_wu`.

    Raises:
        GraphError: tensors without the type and shapes of this layer.

    Source: popnn::gru::gruBwd.
    """
    check(name, params, {"initial output": fwd_output_init}, weights, x, {
        "output": (output, params.output_shape),
        "gradient of the output": (output_grad, params.output_shape),
        "intermediate": (fwd_intermediates, (params.num_intermediates, *params.sequence_shape)),
    })  # fmt: skip
    intermediates = [fwd_intermediates[n] for n in range(params.num_intermediates)]
    operands = [output_grad, weights.input_weights, weights.output_weights, *intermediates, *params.lengths]
    d_h, d_x, d_units = add(graph, backward(params), operands, prog, name)
    # From [steps, batch, units, out], as the scan stacks them.
    return d_h, d_x, d_units.transpose((2, 0, 1, 3))


def gru_wu(
    graph: Graph,
    params: GruParams,
    prog: Program,
    fwd_output_init: Tensor,
    fwd_intermediates: Tensor,
    bwd_intermediates: Tensor,
    weights: GruWeights,
    x: Tensor,
    output: Tensor,
    name: str = "gru_wu",
) -> GruWeights:
    """Compute gradients of the weights, from the intermediates of both passes.

    Args:
        graph: graph to add to.
        params: the layer.
        prog: program to add to.
        fwd_output_init: the output before the first step; checked, the intermediates hold it.
        fwd_intermediates: from `gru_fwd`.
        bwd_intermediates: from `gru_bwd`.
        weights: the layer's parameters; checked likewise.
        x: [steps, batch, in].
        output: from `gru_fwd`; checked likewise.
        name: debug name.

    Returns:
        New tensors of the shapes of the weights.

    Raises:
        GraphError: tensors without the type and shapes of this layer.

    Source: popnn::gru::gruWU.
    """
    check(name, params, {"initial output": fwd_output_init}, weights, x, {
        "output": (output, params.output_shape),
        "intermediate": (fwd_intermediates, (params.num_intermediates, *params.sequence_shape)),
        "backward intermediate": (bwd_intermediates, (len(params.cell_order), *params.sequence_shape)),
    })  # fmt: skip
    operands = [bwd_intermediates, x, fwd_intermediates[_OUTPUT_BEFORE], fwd_intermediates[_RESET]]
    return GruWeights(*add(graph, weight_gradients(params), operands, prog, name))


def gru_bwd_with_wu(
    graph: Graph,
    params: GruParams,
    prog: Program,
    fwd_output_init: Tensor,
    fwd_intermediates: Tensor,
    weights: GruWeights,
    x: Tensor,
    output: Tensor,
    output_grad: Tensor,
    name: str = "gru_bwd",
) -> tuple[Tensor, Tensor | None, GruWeights]:
    """Run `gru_bwd` and `gru_wu`; returns gradients of the initial output, the input (or None), and the weights.

    Source: popnn::gru::gruBwdWithWU.
    """
    common = (graph, params, prog, fwd_output_init, fwd_intermediates)
    d_h, d_x, units = gru_bwd(*common, weights, x, output, output_grad, name)
    return d_h, d_x, gru_wu(*common, units, weights, x, output, f"{name}/weights")
