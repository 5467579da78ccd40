"""popnn.gru against the equations, step by step in numpy, and against `jax.grad` of a scan of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax import poplar
from ipujax.poplar.program import Sequence
from ipujax.popnn import gru
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph.program import Repeat
from ipujax.runtime.graph.walks import distinct
from tests.ipujax.poplar.engine_helpers import both, constant, new_graph, variable
from tests.ipujax.popnn.recurrent_helpers import assert_all_close, numbers

STEPS = 3
BATCH = 3
IN = 5
OUT = 6
LENGTHS = np.array([2, 3, 1], np.uint32)
CREATE = (gru.create_input, gru.create_weights, gru.create_initial_state)
ORDER = ("reset", "update", "candidate")
BIASES = numbers((3, 2, OUT), 6)
VALUES = {
    "x": numbers((STEPS, BATCH, IN), 1),
    "h": numbers((BATCH, OUT), 2),
    "w": numbers((3, IN, OUT), 4) / 2,
    "u": numbers((3, OUT, OUT), 5) / 2,
    "b": BIASES[:, 0],
}
D_OUT = numbers((STEPS, BATCH, OUT), 7)


def reference(v, after=False, lengths=None, full=True):
    """Outputs, by a scan of the equations of each gate by itself."""
    b, b_back = (v["b"][:, 0], v["b"][:, 1]) if after else (v["b"], jnp.zeros((3, OUT)))

    def step(h, now):
        x, t = now
        r, u = (jax.nn.sigmoid(x @ v["w"][k] + b[k] + h @ v["u"][k] + b_back[k]) for k in (0, 1))
        back = r * (h @ v["u"][2] + b_back[2]) if after else (r * h) @ v["u"][2]
        new = u * h + (1 - u) * jnp.tanh(x @ v["w"][2] + b[2] + back)
        on = True if lengths is None else (t < lengths)[:, None]
        return jnp.where(on, new, h), jnp.where(on, new, 0)

    h, every = lax.scan(step, v["h"], (v["x"], jnp.arange(STEPS)))
    return every if full else h


def layer(graph, params, values):
    """Tensors of a layer, as the library creates them."""
    x, weights, state = (
        make(graph, params) for make in (gru.create_input, gru.create_weights, gru.create_initial_state)
    )
    order = [ORDER.index(unit) for unit in params.cell_order]
    for name, tensor in {"x": x, "h": state, **dict(zip("wub", weights.tensors(), strict=True))}.items():
        graph.set_initial_value(tensor, values[name][order] if name in "wub" else values[name])
    return x, weights, state


def test_one_step_in_numpy():
    v = VALUES
    graph = new_graph()
    prog = Sequence()
    params = gru.GruParams(poplar.FLOAT, BATCH, 1, [IN, OUT], output_full_sequence=False)
    x, weights, state = layer(graph, params, v | {"x": v["x"][:1]})
    y, kept = gru.gru_fwd(graph, params, state, x, weights, prog)
    assert kept is None
    z = np.einsum("bi,kio->kbo", v["x"][0], v["w"]) + v["b"][:, None]
    r, u = (1 / (1 + np.exp(-(z[k] + v["h"] @ v["u"][k]))) for k in (0, 1))
    c = np.tanh(z[2] + (r * v["h"]) @ v["u"][2])
    np.testing.assert_allclose(both(graph, prog, {"y": y})["y"], u * v["h"] + (1 - u) * c, rtol=1e-5, atol=1e-6)


CASES = {
    "plain": {},
    "lengths, order": {"var_time_steps": True, "cell_order": ("update", "candidate", "reset")},
    "lengths, last output, reset after": {"var_time_steps": True, "output_full_sequence": False, "reset_after": True},
}


@pytest.mark.parametrize("case", CASES)
def test_passes_against_gradients_of_jax(case):
    inputs = dict(CASES[case])
    graph = new_graph()
    prog = Sequence()
    lengths = constant(graph, LENGTHS, poplar.UNSIGNED_INT) if inputs.pop("var_time_steps", False) else None
    params = gru.GruParams(poplar.FLOAT, BATCH, STEPS, [IN, OUT], lengths, **inputs)
    full = params.output_full_sequence
    order = np.array([ORDER.index(unit) for unit in params.cell_order])
    values = VALUES | ({"b": BIASES} if params.reset_after else {})
    x, weights, state = layer(graph, params, values)
    pre = case == "plain"
    y, kept = gru.gru_fwd(graph, params, state, x, weights, prog, keep_intermediates=True, pre_calc_weights=pre)
    d_out = D_OUT if full else D_OUT[0]
    d_h, d_x, d_weights = gru.gru_bwd_with_wu(graph, params, prog, state, kept, weights, x, y, constant(graph, d_out))
    actual = both(graph, prog, {"y": y, "h": d_h, "x": d_x} | dict(zip("wub", d_weights.tensors(), strict=True)))
    settings = {"after": params.reset_after, "lengths": None if lengths is None else LENGTHS, "full": full}
    gradients = jax.jit(jax.grad(lambda v: jnp.sum(reference(v, **settings) * d_out)))(values)
    gradients |= {name: gradients[name][order] for name in "wub"}
    assert_all_close(actual, {"y": reference(values, **settings), **gradients}, rtol=1e-4, atol=1e-5)
    assert not graph.notes.fallbacks
    assert [node.count for node in distinct(prog) if isinstance(node, Repeat)] == [STEPS, STEPS]


def test_backward_alone_without_gradient_of_the_input():
    graph = new_graph()
    prog = Sequence()
    params = gru.GruParams(poplar.FLOAT, BATCH, STEPS, [IN, OUT], calc_input_gradients=False)
    x, weights, state = layer(graph, params, VALUES)
    gru.zero_initial_state(graph, state, prog)
    y, kept = gru.gru_fwd(graph, params, state, x, weights, prog, keep_intermediates=True)
    d_h, d_x, units = gru.gru_bwd(graph, params, prog, state, kept, weights, x, y, constant(graph, D_OUT))
    assert d_x is None
    start = VALUES | {"h": 0 * VALUES["h"]}
    gradients = jax.grad(lambda v: jnp.sum(reference(v) * D_OUT))(start)
    actual = both(graph, prog, {"h": d_h, "units": units})
    np.testing.assert_allclose(actual["h"], gradients["h"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(actual["units"].sum((1, 2)), gradients["b"], rtol=1e-4, atol=1e-5)


def test_wrong_operands():
    graph = new_graph()
    prog = Sequence()
    params = gru.GruParams(poplar.FLOAT, BATCH, STEPS, [IN, OUT], reset_after=True)
    x, weights, state = layer(graph, params, VALUES | {"b": BIASES})
    thin = gru.GruWeights(weights.input_weights, weights.output_weights, variable(graph, [3, OUT]))
    with pytest.raises(GraphError, match=r"the bias(.|\n)*\[3, 2, 6\](.|\n)*\[3, 6\]"):
        gru.gru_fwd(graph, params, state, x, thin, prog)
    with pytest.raises(GraphError, match="the backward intermediate"):
        wrong = variable(graph, list(params.sequence_shape))
        kept = variable(graph, [5, *params.sequence_shape])
        gru.gru_wu(graph, params, prog, state, kept, wrong, weights, x, wrong)
    with pytest.raises(GraphError, match="each of reset, update, candidate once"):
        gru.GruParams(poplar.FLOAT, 1, 1, [1, 1], cell_order=ORDER[:2])
