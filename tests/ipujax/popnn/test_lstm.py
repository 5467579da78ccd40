"""popnn.lstm against the equations, step by step in numpy, and against `jax.grad` of a scan of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax import poplar
from ipujax.poplar.program import Sequence
from ipujax.popnn import lstm
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph.program import Execute, Repeat
from ipujax.runtime.graph.walks import distinct
from tests.ipujax.poplar.engine_helpers import both, constant, new_graph, variable
from tests.ipujax.popnn.recurrent_helpers import assert_all_close, numbers

STEPS = 3
BATCH = 3
IN = 5
OUT = 6
LENGTHS = np.array([3, 1, 2], np.int32)
CREATE = (lstm.create_input, lstm.create_weights, lstm.create_initial_state)
ORDER = ("forget", "input", "candidate", "output")
VALUES = {
    "x": numbers((STEPS, BATCH, IN), 1),
    "h": numbers((BATCH, OUT), 2),
    "c": numbers((BATCH, OUT), 3),
    "w": numbers((4, IN, OUT), 4) / 2,
    "u": numbers((4, OUT, OUT), 5) / 2,
    "b": numbers((4, OUT), 6),
}
D_OUT = numbers((STEPS, BATCH, OUT), 7)
D_CELL = numbers((BATCH, OUT), 8)


def reference(v, lengths=None, full=True, act=jnp.tanh):
    """Outputs and last cell state, by a scan of the equations of each gate by itself."""

    def step(carry, now):
        h, c = carry
        x, t = now
        f, i, o = (jax.nn.sigmoid(x @ v["w"][k] + h @ v["u"][k] + v["b"][k]) for k in (0, 1, 3))
        g = act(x @ v["w"][2] + h @ v["u"][2] + v["b"][2])
        new_c = f * c + i * g
        new_h = o * act(new_c)
        on = True if lengths is None else (t < lengths)[:, None]
        return (jnp.where(on, new_h, h), jnp.where(on, new_c, c)), jnp.where(on, new_h, 0)

    (h, c), every = lax.scan(step, (v["h"], v["c"]), (v["x"], jnp.arange(STEPS)))
    return every if full else h, c


def expected_gradients(d_out, d_cell, **settings):
    def objective(v):
        y, c = reference(v, **settings)
        return jnp.sum(y * d_out) + jnp.sum(c * d_cell)

    return jax.jit(jax.grad(objective))(VALUES)


def layer(graph, params):
    """Tensors of a layer with `VALUES`, as the library creates them."""
    x, weights, state = (make(graph, params) for make in CREATE)
    tensors = {"x": x, "h": state.output, "c": state.cell_state}
    tensors |= dict(zip("wub", weights.tensors(), strict=True))
    order = [ORDER.index(unit) for unit in params.cell_order]
    for name, tensor in tensors.items():
        value = VALUES[name]
        graph.set_initial_value(tensor, value[order] if name in "wub" else value)
    return x, weights, state


def test_one_step_in_numpy():
    v = VALUES
    graph = new_graph()
    prog = Sequence()
    params = lstm.LstmParams(poplar.FLOAT, BATCH, 1, [IN, OUT], output_full_sequence=False)
    x, weights, state = layer_of_one_step(graph, params)
    y, cell, kept = lstm.lstm_fwd(graph, params, prog, state, weights, x)
    assert kept is None
    z = np.einsum("bi,kio->kbo", v["x"][0], v["w"]) + np.einsum("bi,kio->kbo", v["h"], v["u"]) + v["b"][:, None]
    forget, input_, output = (1 / (1 + np.exp(-z[k])) for k in (0, 1, 3))
    c = forget * v["c"] + input_ * np.tanh(z[2])
    actual = both(graph, prog, {"y": y, "c": cell})
    np.testing.assert_allclose(actual["c"], c, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual["y"], output * np.tanh(c), rtol=1e-5, atol=1e-6)


def layer_of_one_step(graph, params):
    x, weights, state = (make(graph, params) for make in CREATE)
    inputs = (VALUES["x"][:1], *(VALUES[n] for n in "wubhc"))
    for tensor, value in zip([x, *weights.tensors(), state.output, state.cell_state], inputs, strict=True):
        graph.set_initial_value(tensor, value)
    return x, weights, state


CASES = {
    "plain": {},
    "lengths, order": {"var_time_steps": True, "cell_order": ("input", "output", "candidate", "forget")},
    "lengths, last output": {"var_time_steps": True, "output_full_sequence": False},
}


@pytest.mark.parametrize("case", CASES)
def test_passes_against_gradients_of_jax(case):
    inputs = dict(CASES[case])
    graph = new_graph()
    prog = Sequence()
    lengths = constant(graph, LENGTHS, poplar.INT) if inputs.pop("var_time_steps", False) else None
    params = lstm.LstmParams(poplar.FLOAT, BATCH, STEPS, [IN, OUT], lengths, **inputs)
    full = params.output_full_sequence
    order = [ORDER.index(unit) for unit in params.cell_order]
    x, weights, state = layer(graph, params)
    y, cell, kept = lstm.lstm_fwd(graph, params, prog, state, weights, x, keep_intermediates=True)
    d_out = D_OUT if full else D_OUT[0]
    d_cell = D_CELL
    d_state, d_x, d_weights = lstm.lstm_bwd_with_wu(
        graph, params, prog, state, kept, weights, x, y, constant(graph, d_out), constant(graph, d_cell)
    )
    outs = {"y": y, "cell": cell, "x": d_x, "h": d_state.output, "c": d_state.cell_state}
    actual = both(graph, prog, outs | dict(zip("wub", d_weights.tensors(), strict=True)))
    settings = {"lengths": None if lengths is None else LENGTHS, "full": full}
    outputs, last = reference(VALUES, **settings)
    gradients = expected_gradients(d_out, d_cell, **settings)
    gradients |= {name: gradients[name][np.array(order)] for name in "wub"}
    assert_all_close(actual, {"y": outputs, "cell": last, **gradients}, rtol=1e-4, atol=1e-5)
    assert not graph.notes.fallbacks


def test_backward_alone_and_without_gradient_of_the_input():
    graph = new_graph()
    prog = Sequence()
    params = lstm.LstmParams(poplar.FLOAT, BATCH, STEPS, [IN, OUT], calc_input_gradients=False, activation="relu")
    x, weights, state = layer(graph, params)
    y, _, kept = lstm.lstm_fwd(graph, params, prog, state, weights, x, keep_intermediates=True, pre_calc_weights=True)
    d_state, d_x, units = lstm.lstm_bwd(graph, params, prog, state, kept, weights, x, y, constant(graph, D_OUT))
    assert d_x is None
    actual = both(graph, prog, {"y": y, "h": d_state.output, "c": d_state.cell_state, "units": units})
    gradients = expected_gradients(D_OUT, 0, act=jax.nn.relu)
    expected = {"y": reference(VALUES, act=jax.nn.relu)[0], "h": gradients["h"], "c": gradients["c"]}
    # The gradient of a bias is that of its unit, summed.
    np.testing.assert_allclose(actual.pop("units").sum((1, 2)), gradients["b"], rtol=1e-4, atol=1e-5)
    assert_all_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_half():
    graph = new_graph()
    prog = Sequence()
    params = lstm.LstmParams(poplar.HALF, BATCH, STEPS, [IN, OUT])
    x, weights, state = layer(graph, params)
    lstm.zero_initial_state(graph, state, prog)
    y, _, _ = lstm.lstm_fwd(graph, params, prog, state, weights, x)
    graph.create_host_read("y", y)
    engine = poplar.Engine(graph, prog)
    engine.load_and_run(poplar.IPUModel(tiles_per_ipu=8).create_device())
    outputs, _ = reference(VALUES | {"h": 0 * VALUES["h"], "c": 0 * VALUES["c"]})
    assert engine.read_tensor("y").dtype == np.float16
    np.testing.assert_allclose(engine.read_tensor("y"), outputs, atol=4e-3)


def test_loops_are_programs_whose_size_does_not_grow_with_steps():
    def loops(steps):
        graph = new_graph()
        prog = Sequence()
        params = lstm.LstmParams(poplar.FLOAT, BATCH, steps, [IN, OUT])
        x, weights, state = (make(graph, params) for make in CREATE)
        y, _, kept = lstm.lstm_fwd(graph, params, prog, state, weights, x, keep_intermediates=True)
        lstm.lstm_bwd_with_wu(graph, params, prog, state, kept, weights, x, y, variable(graph, list(y.shape)))
        repeats = [node for node in distinct(prog) if isinstance(node, Repeat)]
        assert [node.count for node in repeats] == [steps, steps]
        return [sum(isinstance(node, Execute) for node in distinct(repeat)) for repeat in repeats]

    assert loops(8) == loops(64)


def test_wrong_operands():
    graph = new_graph()
    prog = Sequence()
    params = lstm.LstmParams(poplar.FLOAT, BATCH, STEPS, [IN, OUT])
    x, weights, state = layer(graph, params)
    wrong = variable(graph, [STEPS, BATCH, OUT])
    half = variable(graph, [STEPS, BATCH, IN], poplar.HALF)
    ragged = constant(graph, [1, 2], poplar.INT)
    cases = [
        (lambda: lstm.lstm_fwd(graph, params, prog, state, weights, wrong), r"the input(.|\n)*3, 5\](.|\n)*3, 6\]"),
        (lambda: lstm.lstm_fwd(graph, params, prog, state, weights, half), r"float32(.|\n)*float16"),
        (lambda: lstm.lstm_bwd(graph, params, prog, state, x, weights, x, wrong, wrong), "the intermediate"),
        (lambda: lstm.LstmParams(poplar.FLOAT, 1, 1, [1, 1], cell_order=("input", "forget")), "each of forget, input"),
        (lambda: lstm.LstmParams(poplar.FLOAT, 1, 0, [1, 1]), "at least 1"),
        (lambda: lstm.LstmParams(poplar.FLOAT, 1, 1, [1, 1], activation="tanhh"), "try: 'tanh'"),
        (lambda: lstm.LstmParams(poplar.FLOAT, 3, 1, [1, 1], ragged), r"integers \[3\](.|\n)*int32\[2\]"),
    ]
    for call, message in cases:
        with pytest.raises(GraphError, match=message) as error:
            call()
        assert "test_lstm.py" in str(error.value)
