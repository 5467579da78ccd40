"""Attribution of Keras models: the layer and the line that made it, never the line that runs the model."""

from __future__ import annotations

import keras
import numpy as np

import ipujax.keras as ipu_keras
from ipujax.keras import IPUConfig, IPUStrategy

ROWS, WIDTH = 32, 16


class Gate(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(WIDTH)  # made here

    def call(self, x):
        gate = keras.ops.sigmoid(self.inner(x))  # called here
        return gate * x


def model_of_three_lines():
    inputs = keras.Input((4, WIDTH))
    x = keras.layers.Dense(WIDTH, activation="relu")(inputs)  # dense
    x = keras.layers.MultiHeadAttention(2, 8)(x, x)  # attention
    x = Gate()(x)
    return keras.Model(inputs, keras.layers.Dense(WIDTH)(x))  # last


def trained(make):
    config = IPUConfig()
    config.auto_select_ipus = 1
    with IPUStrategy(config).scope():
        model = make()
        model.compile(keras.optimizers.Adam(1e-3), "mse", steps_per_execution=2)  # compiled here
        x = np.ones((ROWS, 4, WIDTH), np.float32)
        model.fit(x, x, batch_size=8, verbose=0)  # run here
        return model.ipu_profile


def line_with(comment):
    with open(__file__, encoding="utf-8") as file:
        return next(n for n, text in enumerate(file, 1) if text.rstrip().endswith(f"# {comment}"))


def lines_by_layer(profile):
    lines = {}
    for row in profile.step_costs:
        if row.cycles and row.origin.line:
            name = row.origin.layer.split("/")[0].rstrip("_0123456789")
            lines.setdefault(name, set()).add(row.origin.line.split(" ")[0].rpartition(":")[2])
    return {name: {int(line) for line in found} for name, found in lines.items()}


def test_attribution_of_layers_is_the_line_that_made_them():
    profile = trained(model_of_three_lines)
    lines = lines_by_layer(profile)
    assert lines["dense"] == {line_with("dense"), line_with("last")}
    assert lines["multi_head_attention"] == {line_with("attention")}  # also of the layers that it makes for itself
    assert lines["gate"] <= {line_with("made here"), line_with("called here"), line_with("called here") + 1}
    assert len(lines["gate"]) > 1
    assert lines["adam"] == lines["compile_loss"] == {line_with("compiled here")}
    assert not any(line_with("run here") in found for found in lines.values())


def test_attribution_of_layers_made_outside_of_the_scope_is_their_name():
    model = model_of_three_lines()
    profile = trained(lambda: model)
    lines = {row.origin.line for row in profile.step_costs if row.cycles}
    assert f"{model.layers[1].name} (Dense)" in lines
    assert not any(line.endswith(f":{line_with('run here')} (trained)") for line in lines)


def test_attribution_of_layers_without_a_constructor():
    class Plain(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    with ipu_keras.IPUStrategy().scope():
        assert Plain(name="plain").get_config()["name"] == "plain"


def test_attribution_restores_keras():
    methods = [(keras.layers.Layer, name) for name in ("__new__", "__call__")]
    before = [getattr(owner, name) for owner, name in methods]
    with ipu_keras.IPUStrategy().scope():
        assert [getattr(owner, name) for owner, name in methods] != before
    assert [getattr(owner, name) for owner, name in methods] == before
